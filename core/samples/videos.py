"""Videos of a record: files, folders of frames, or lists of frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packplan.core.samples.images import refuse_sizes, why_no_path
from packplan.core.samples.places import is_place, without_credentials
from packplan.core.samples.values import fail, is_empty

Video = str | tuple[str, ...]
"""Path of a video file or of a folder of frames, or the paths of the frames in order."""

VIDEO_TAG = "<video>"

_WRITE = "write a path, or a list of the paths of its frames"


def to_videos(value: object, *, urls: bool = False) -> list[Video]:
    """
    Return the videos of a record.

    Args:
        value: Value under the record's `videos`.
        urls: Whether places of other machines are read.

    >>> to_videos(["a.mp4", ["1.png", "2.png"], {"path": "b.webm"}])
    ['a.mp4', ('1.png', '2.png'), 'b.webm']

    Raises:
        ValueError: A video is neither a path nor a list of paths.
    """
    if is_empty(value):
        return []
    return [_to_video(video, urls=urls) for video in (value if isinstance(value, list) else [value])]


def _to_video(video: Any, *, urls: bool) -> Video:
    if isinstance(video, Mapping):
        refuse_sizes(video)
        video = video.get("path") or video.get("video") or video.get("url")
    if isinstance(video, list) and video:
        return tuple(_path(frame, "frame", urls=urls) for frame in video)
    return _path(video, "video", urls=urls)


def _path(value: Any, what: str, *, urls: bool) -> str:
    """Return the path of a video or of a frame."""
    if isinstance(value, Mapping):
        value = value.get("path")
    if not isinstance(value, str) or not value:
        fail(f"has a {what} that is no path: {_WRITE}")
    if value.startswith("data:"):
        fail(f"has the {what} {value[:40]!r}: write it to a file, and name that")
    if urls and is_place(value):
        return value
    if remedy := why_no_path(value, is_video=True):
        fail(f"has the {what} {without_credentials(value)[:60]!r}: {remedy}")
    return value
