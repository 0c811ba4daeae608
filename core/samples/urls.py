"""
URLs of remote files, such as `s3://bucket/data.jsonl`.

Only URLs with a scheme in `PACKAGES` are read. Other schemes, and chains such as `zip://a::s3://b`,
could refer to files on this machine. Messages never contain a URL's query, fragment or user name,
because these may be credentials.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

PACKAGES: Mapping[str, str | None] = MappingProxyType({
    "http": None, "https": None, "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub",
    "az": "adlfs", "oss": "ossfs", "memory": None,
})  # fmt: skip
"""
Scheme -> package that is needed to read its URLs, in addition to fsspec; None if fsspec is enough.
"""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

_CREDENTIALS = re.compile(r"(?<=//)(?P<user>[^/?#\s]*@)|[?#][^\s'\"]*")
"""
Parts of a URL that may be credentials: a user name, with or without a password, and everything
after the path.
"""

_SIGNED = re.compile(r"(?:X-Amz-|X-Goog-|X-OSS-)?(?:Signature|Credential|Security-Token)=|[?&]sig=", re.IGNORECASE)
"""Query parameters that mark a URL as signed."""

_SIGNING_KEYS = re.compile(
    r"(?:X-(?:Amz|Goog|OSS)-.*|Signature|Expires|AWSAccessKeyId|GoogleAccessId|OSSAccessKeyId|Key-Pair-Id|Policy"
    r"|Security-Token|sig|se|st|sp|sv|sr|skoid|sktid|skt|ske|sks|skv|spr)",
    re.IGNORECASE,
)
"""Query parameters that signing adds, and that do not change which file is read."""


def scheme_of(name: str) -> str | None:
    """
    Return the scheme of a URL in lower case; None for a path on this machine.

    >>> scheme_of("S3://bucket/a.jsonl"), scheme_of("data/a.jsonl")
    ('s3', None)
    """
    found = _SCHEME.match(name)
    return found[1].lower() if found else None


def is_url(name: object) -> bool:
    """Return whether a name is a single URL with a supported scheme."""
    return isinstance(name, str) and scheme_of(name) in PACKAGES and "::" not in name.partition("?")[0]


def url_fault(name: str) -> str | None:
    """
    Return the reason why a URL is refused; None for a path, and for a URL with a supported scheme.

    >>> url_fault("ftp://host/a.jsonl").partition(":")[0]
    'is at ftp'
    """
    scheme = scheme_of(name) or scheme_of(name.rpartition("::")[2])
    if scheme is None or is_url(name):
        return None
    kind = "a chain of URLs" if "::" in name else f"at {scheme}://"
    return f"is {kind}, which is not read: name a file, or a URL of {', '.join(PACKAGES)}"


def mask_credentials(text: str) -> str:
    """
    Return a text without the user names, queries and fragments of its URLs.

    >>> mask_credentials("https://me:secret@host/a.png?token=secret cannot be read")
    'https://host/a.png?… cannot be read'
    """
    return re.sub(
        r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]*",
        lambda url: _CREDENTIALS.sub(lambda found: "" if found["user"] else "?…", url[0]),
        text,
    )


def strip_signature(url: str) -> str:
    """
    Return a URL without the query parameters that signing adds.

    Without these parameters, all signed URLs of a file are equal.

    >>> strip_signature("https://host/a.png?id=5&X-Amz-Signature=1f&X-Amz-Date=2026")
    'https://host/a.png?id=5'
    """
    path, mark, query = url.partition("?")
    if not mark or not _SIGNED.search(mark + query):
        return url
    kept = [part for part in query.partition("#")[0].split("&") if not _SIGNING_KEYS.fullmatch(part.partition("=")[0])]
    return path + ("?" + "&".join(kept) if kept else "")


def may_hold_signature(text: str) -> bool:
    """Return whether a text may contain a signed URL."""
    return "ignature=" in text or "sig=" in text or "IGNATURE=" in text


def url_folder(url: str) -> str:
    """
    Return the folder of a URL, without credentials. Media paths are relative to this folder.

    >>> url_folder("s3://bucket/data/a.jsonl")
    's3://bucket/data'
    """
    scheme, _, rest = _CREDENTIALS.sub("", url).partition("://")
    return f"{scheme.lower()}://{rest.rpartition('/')[0] or rest}"


def join_url(folder: str, path: str) -> str:
    """
    Return the URL of a path relative to a folder. An absolute path or a URL is returned unchanged.

    Args:
        folder: Result of `url_folder`.
        path: Path in a record.

    >>> join_url("s3://bucket/data", "../images/a.png")
    's3://bucket/images/a.png'
    """
    if path.startswith("/") or scheme_of(path) is not None:
        return path
    scheme, _, rest = folder.partition("://")
    server, *parts = rest.split("/")
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in {"", "."}:
            parts = [*parts, part]
    return f"{scheme}://{'/'.join([server, *parts])}"
