"""A record's identity does not depend on how its file writes it."""

import base64
import datetime as dt
import hashlib
import json
import re

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from packplan.core.samples.identity import HEAD_BYTES, digest_record, digest_unreadable, image_base64

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 400


def canonical(value, key=None):
    """Return the form of a record that is digested, by the rules alone, without a shortcut."""
    if isinstance(value, dict) and key in {"tools", "arguments", "parameters", "input", "content"}:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and key == "tools":
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return {name: canonical(held, name) for name, held in value.items() if held is not None}
    if isinstance(value, list):
        return [canonical(held) for held in value]
    found = isinstance(value, str) and re.fullmatch(
        r"(data:image/png;base64,)?(iVBORw0KGgo[A-Za-z0-9+/]{60,}=*)", value
    )
    if not found:
        return value
    image = base64.b64decode(found[2])
    return f"medium of {len(image)} bytes {hashlib.sha256(image[:HEAD_BYTES]).hexdigest()}"


MEDIA = [
    f"{start}{base64.b64encode(PNG[:size]).decode()}" for start in ("", "data:image/png;base64,") for size in (90, 5000)
]
TEXTS = ["null", "x" * 5000, "a"]
KEYS = ["tools", "arguments", "parameters", "input", "content", "images", "a"]


@given(
    st.recursive(
        st.none() | st.integers() | st.sampled_from(MEDIA + TEXTS),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
        max_leaves=8,
    )
)
@example({"a": [{"a": TEXTS[1]}]})
@example({"tools": [{"b": 1, "a": 2}]})
def test_a_digest_is_that_of_the_canonical_form_whatever_the_shortcut(record):
    """With long texts, images, nulls, and objects that count as they are written, anywhere."""
    text = json.dumps(canonical(record), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    event(f"the canonical form is another: {text != json.dumps(record, sort_keys=True, separators=(',', ':'))}")

    assert hashlib.sha256(text.encode()).digest() == digest_record(record)
    if isinstance(record, dict):
        assert digest_record(record) == digest_record({**dict(reversed(record.items())), "b": None})


@pytest.mark.parametrize("size", [100, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, len(PNG)])
def test_an_image_in_a_record_is_known_by_size_and_head(size):
    """Bytes of a column are the same as base64; what follows the head counts by its size."""
    coded = base64.b64encode(PNG[:size]).decode()
    uri = f"data:image/png;base64,{coded}"

    assert digest_record({"bytes": PNG[:size]}) == digest_record({"bytes": coded}) == digest_record({"bytes": uri})
    assert digest_record({"bytes": PNG[:size]}) != digest_record({"bytes": PNG[: size - 1]})
    assert digest_record({"bytes": PNG[:size]}) != digest_record({"bytes": b"\x88" + PNG[1:size]})
    assert coded == image_base64(coded) == image_base64(uri)


LOOKS_LIKE_ONE = "iVBORw0KGgo" + "A" * 81


@pytest.mark.parametrize("end", ["-", "ä", "\ud83d", "===", "=A", "\n"])
def test_base64_is_whole_or_text(end):
    """Up to two fillers end it; nothing else does."""
    assert image_base64(LOOKS_LIKE_ONE) == LOOKS_LIKE_ONE
    assert image_base64(f"{LOOKS_LIKE_ONE}==") == f"{LOOKS_LIKE_ONE}=="
    assert image_base64(LOOKS_LIKE_ONE + end) is None
    assert digest_record([LOOKS_LIKE_ONE + end]) != digest_record([f"{LOOKS_LIKE_ONE}{end}x"])


def test_what_json_has_not_cannot_be_read_or_is_no_image_counts_as_it_is():
    assert digest_record({"day": dt.date(2026, 1, 1)}) != digest_record({"day": dt.date(2026, 1, 2)})
    assert digest_unreadable([b"a", b"b"]) == digest_unreadable([b"ab"]) != digest_record("ab")
    assert digest_record("\ud83d") != digest_record("\ud83e")
    for text in ("data:image/png;base64,ä", "data:image/png;base64,A", "iVBORw0KGgo.png", "data:x"):
        assert digest_record([text]) != digest_record([f"{text}x"])
