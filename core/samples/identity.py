"""
Digests of records. A digest identifies a record by its content, whichever file contains it.

Two records are the same if their JSON values are equal. Whitespace and the format of the file do
not matter. The order of keys matters only in objects that become text, such as tools and arguments
of calls. A key whose value is `null` counts as absent, since tables store absent values as null.
Only the size and the first bytes of an image inside a record are digested, as for image files. A
signed URL is digested without its signature, which changes over time.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from packplan.core.samples.media import IMAGE_KEYS, IMAGE_MARKS, PART_KEYS, PATH_KEYS, VIDEO_KEYS
from packplan.core.samples.urls import is_url, may_hold_signature, strip_signature

HEAD_BYTES = 65_536
"""
Number of bytes at the start of an image that are digested: the header, and enough content to
distinguish images.
"""

DIGEST_BYTES = 32

_DATA_URI = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")

_BASE64_START = re.compile(rf"(?:{IMAGE_MARKS})[A-Za-z0-9+/]{{60}}")
"""Pattern for the start of an image in base64, without whitespace."""

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

_WRITTEN = ("tools", "arguments", "parameters", "input", "content")
"""
Keys whose objects are converted to text with their keys in the written order. `tools` may be a list
of objects.
"""

_MEDIA = frozenset({*IMAGE_KEYS, *VIDEO_KEYS, *PART_KEYS, *PATH_KEYS})
"""Lower-case keys of a record whose values are media."""

_MAY_DIFFER = re.compile(rf'"(?:data:|{IMAGE_MARKS}|(?:{"|".join(_WRITTEN)})":\{{|tools":\[)')
"""
Pattern for JSON text that the canonical form may change, apart from `null`. The pattern starts with
one fixed character, which is five times as fast as a choice of two characters.
"""

_LONG, _FIRST = 4096, 2
"""
Number of characters above which a text may be an image, and number of list entries that are checked
for such texts. A record with such a text is not encoded as plain JSON first.
"""


def digest_record(record: object) -> bytes:
    """
    Return the SHA-256 of a record's content, ignoring null values and signatures of URLs.

    >>> digest_record({"a": 1, "b": None}) == digest_record({"a": 1})
    True
    """
    text = None if isinstance(record, dict) and _holds_long_text(record) else _encode(record)
    if text is None or "null" in text or may_hold_signature(text) or _MAY_DIFFER.search(text):
        text = _encode(_canonical(record))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def digest_unreadable(texts: Iterable[bytes]) -> bytes:
    """Return the SHA-256 of the bytes of a record whose JSON is invalid."""
    digest = hashlib.sha256(b"unreadable\n")
    for text in texts:
        digest.update(text)
    return digest.digest()


def image_base64(text: str) -> str | None:
    """
    Return the base64 text of an image that is a data URI or plain base64; None for any other text.
    """
    if (prefix := _DATA_URI.match(text)) is not None:
        return text[prefix.end() :]
    if not _BASE64_START.match(text) or not text.isascii():
        return None
    digits = text.rstrip("=")
    return text if len(text) - len(digits) <= 2 and not digits.encode().translate(None, _ALPHABET) else None


def _holds_long_text(value: Any) -> bool:
    """Return whether an object, or one of the first entries of a list, contains a long text."""
    for held in value.values() if isinstance(value, dict) else value[:_FIRST]:
        if isinstance(held, str):
            if len(held) > _LONG:
                return True
        elif isinstance(held, (dict, list)) and _holds_long_text(held):
            return True
    return False


def _encode_other(value: object) -> str:
    """Convert to text a value of a type that JSON lacks."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _describe_medium(len(value), bytes(value[:HEAD_BYTES]))
    return f"{type(value).__name__} {value}"


_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False, default=_encode_other
).encode


def _describe_medium(size: int, head: bytes) -> str:
    return f"medium of {size} bytes {hashlib.sha256(head).hexdigest()}"


_as_written = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=_encode_other).encode


def _canonical_item(key: object, value: Any) -> Any:
    """Return the canonical form of a value under a key."""
    if (key in _WRITTEN and isinstance(value, Mapping)) or (key == "tools" and isinstance(value, list)):
        return _as_written(value)
    return _canonical_media(value) if isinstance(key, str) and key.lower() in _MEDIA else _canonical(value)


def _canonical_media(value: Any) -> Any:
    """Return the canonical form of media in a record."""
    if isinstance(value, list):
        return [_canonical_media(held) for held in value]
    return strip_signature(value) if is_url(value) else _canonical(value)


def _canonical(value: Any) -> Any:
    if isinstance(value, str):
        if (coded := image_base64(value)) is None:
            return value
        # Only the first bytes are decoded: four characters for three bytes.
        try:
            head = base64.b64decode(coded[: -(-HEAD_BYTES // 3) * 4], validate=True)[:HEAD_BYTES]
        except ValueError:
            return value
        return _describe_medium(len(coded) * 3 // 4 - coded[-2:].count("="), head)
    if isinstance(value, Mapping):
        return {key: _canonical_item(key, held) for key, held in value.items() if held is not None}
    return [_canonical(held) for held in value] if isinstance(value, (list, tuple)) else value
