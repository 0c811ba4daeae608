"""Images and videos of a record: paths, URLs or the bytes of an image."""

import base64
import contextlib
import re
from collections.abc import Mapping
from typing import Any

from packplan.core.samples.urls import is_url, mask_credentials
from packplan.core.samples.values import fail, is_empty

Image = str | bytes
"""Path of an image file, content of an image file, or URL of an image if URLs are accepted."""

IMAGE_KEYS = ("images", "image")

VIDEO_KEYS = ("videos", "video")

PART_KEYS = {"image": "images", "image_url": "images", "video": "videos", "video_url": "videos"}
"""Type of a message part that is an image or a video -> key of the record for such media."""

PATH_KEYS = ("path", "url")
"""Keys of an object whose value may be the path or URL of a medium."""

_NAMING = (*PATH_KEYS, *PART_KEYS, "source")
"""Keys of a message part whose value may be its medium."""

_MEDIUM_SETTINGS = (
    "min_pixels", "max_pixels", "resized_height", "resized_width", "total_pixels", "fps", "nframes", "min_frames",
    "max_frames", "video_start", "video_end",
)  # fmt: skip
"""
Keys with which qwen_vl_utils scales or samples a single medium. ms-swift ignores these keys in
records.
"""

_DATA_URI = re.compile(r"data:(?P<type>[^;,]*)(?P<coded>;base64)?,")

IMAGE_MARKS = "/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk[0-3]"
"""
Alternatives of a regular expression: the first characters of JPEG, PNG, GIF, WebP and BMP in
base64.
"""

_BASE64_START = re.compile(rf"\s*(?:{IMAGE_MARKS})[A-Za-z0-9+/\s]{{60}}")
"""
Pattern for the start of an image in base64. `_BASE64` distinguishes a damaged image from a path.
"""

INLINE_IMAGE = re.compile(f'"(?:data:image/|{_BASE64_START.pattern})')
"""Pattern for the start of an image inside JSON text."""

_BASE64 = re.compile(rf"\s*(?:{IMAGE_MARKS})[A-Za-z0-9+/\s]{{60,}}={{0,2}}\s*\Z")
"""Pattern for an image in base64. A path does not match because of the dot before its extension."""

_SCHEME = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9+.-]+)://")

_LONGEST_PATH = 4096
"""Maximum length of a path on Linux. A longer text is not a path."""


VIDEO_TAG = "<video>"

_WRITE = "write a path, or a list of the paths of its frames"


def to_images(value: object, *, urls: bool = False) -> list[Image]:
    """
    Return the images of a record, each as a path, the bytes of a file, or a URL.

    Args:
        value: Value under the record's `images`.
        urls: Whether URLs are accepted.

    >>> to_images([{"path": "a.png"}, "b.png"])
    ['a.png', 'b.png']

    Raises:
        ValueError: An image is invalid, or is a URL although URLs are not accepted.
    """
    if value is None or (isinstance(value, (str, bytes, list, Mapping)) and not value):
        return []
    listed = value if isinstance(value, list) else [value]
    return [_to_image(image, urls=urls) for image in listed]


def _to_image(image: Any, *, urls: bool) -> Image:
    if isinstance(image, Mapping):
        if held := image.get("bytes"):
            return held if isinstance(held, bytes) else _decode_base64(held, "'bytes'")
        refuse_media_settings(image)
        image = image.get("path") or image.get("url")
    if isinstance(image, bytes) and image:
        return image
    if not isinstance(image, str) or not image:
        fail("has 'images' with an entry that is not an image: write a path, a data URI, base64, {path} or {bytes}")
    if image.startswith("data:"):
        return _image_from_uri(image)
    if _BASE64_START.match(image):
        try:
            return _decode_base64(image, "an image")
        except ValueError:
            if _BASE64.match(image):
                raise
    return _require_path(image, "image", urls=urls)


def refuse_media_settings(described: Mapping[str, Any]) -> None:
    """
    Raise an error if a single image or video has settings such as `max_pixels`, which would be
    ignored.
    """
    if name := next((name for name in _MEDIUM_SETTINGS if described.get(name) is not None), None):
        fail(f"has {name!r} of one image or video, which would be ignored: remove it, or set the key in 'template'")


def shows_medium(part: Any) -> bool:
    """
    Return whether a message part is an image or a video.

    This is true if the part contains a medium or its path, or if the part has only a type. A type
    alone means the next medium of the record.
    """
    held = {name for name, value in part.items() if not is_empty(value)} if isinstance(part, Mapping) else set()
    kind = part["type"] if "type" in held else None
    return isinstance(kind, str) and kind in PART_KEYS and (held == {"type"} or not held.isdisjoint(_NAMING))


def _image_from_uri(image: str) -> bytes:
    """Return the bytes of an image in a data URI. Raise a ValueError if the URI is invalid."""
    uri = _DATA_URI.match(image)
    if uri is None or uri["coded"] is None or not uri["type"].lower().startswith("image/"):
        fail(f"has the image {image[:60]!r}: a data URI has to begin with data:image/…;base64,")
    return _decode_base64(image[uri.end() :], "a data URI")


def _decode_base64(text: object, where: str) -> bytes:
    try:
        # Few texts contain whitespace, and removing it takes time.
        with contextlib.suppress(ValueError):
            return base64.b64decode(str(text), validate=True)
        return base64.b64decode("".join(str(text).split()), validate=True)
    except ValueError:
        fail(f"has {where} that is not valid base64: encode it again")


def _require_path(text: str, what: str, *, urls: bool) -> str:
    """Return a path or an accepted URL of a medium. Raise a ValueError for any other text."""
    scheme = _SCHEME.match(text)
    if len(text) > _LONGEST_PATH:
        remedy = f"it is {'neither a path nor base64' if what == 'image' else 'not a path'}: write the {what} to a file"
    elif scheme is None or (urls and is_url(text)):
        return text
    elif scheme["name"].lower() == "file":
        remedy = f"write the path alone, without {scheme[0]}"
    else:
        remedy = "only files are read, so that training needs no network: copy the file here and name the copy"
        remedy += ", or set media_cache to a folder that keeps a copy" if is_url(text) else ""
    return fail(f"has the {what} {mask_credentials(text)[:60]!r}: {remedy}")


Video = str | tuple[str, ...]
"""Path of a video file, or the paths of the video's frames in order; URLs if they are accepted."""


def to_videos(value: object, *, urls: bool = False) -> list[Video]:
    """
    Return the videos of a record, each as a path, a URL, or a tuple of the paths of its frames.

    Args:
        value: Value under the record's `videos`.
        urls: Whether URLs are accepted.

    >>> to_videos(["a.mp4", ["1.png", "2.png"], {"path": "b.webm"}])
    ['a.mp4', ('1.png', '2.png'), 'b.webm']

    Raises:
        ValueError: A video is neither a path nor a list of paths, or is at a URL although URLs are
            not accepted.
    """
    if is_empty(value):
        return []
    return [_to_video(video, urls=urls) for video in (value if isinstance(value, list) else [value])]


def _to_video(video: Any, *, urls: bool) -> Video:
    if isinstance(video, Mapping):
        refuse_media_settings(video)
        video = video.get("path") or video.get("video") or video.get("url")
    if isinstance(video, list) and video:
        return tuple(_video_path(frame, "frame", urls=urls) for frame in video)
    return _video_path(video, "video", urls=urls)


def _video_path(value: Any, what: str, *, urls: bool) -> str:
    """Return the path or URL of a video or a frame. Raise a ValueError for any other value."""
    if isinstance(value, Mapping):
        value = value.get("path")
    if not isinstance(value, str) or not value:
        fail(f"has a {what} that is not a path: {_WRITE}")
    if value.startswith("data:"):
        fail(f"has the {what} {value[:40]!r}: write it to a file, and name the file")
    return _require_path(value, what, urls=urls)
