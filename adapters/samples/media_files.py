"""
Reads facts of images and videos without decoding them, except for the first frame of a video.

Image sizes are read from headers; frame counts and frame rates are read from video containers. A
digest shows whether a file has changed.

Frames are counted in a container's index, or by its packets if it has no index (mkv, webm). If this
does not suffice, for example because the frame rate varies, the video is decoded to measure it. The
field `doubt` then has the reason. A file that cannot be used for training is refused with a reason.
"""

import hashlib
import math
import stat
import warnings
from collections.abc import Iterator, Sequence
from fractions import Fraction
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from PIL import Image, UnidentifiedImageError

from packplan.core.errors import counted
from packplan.core.samples.identity import HEAD_BYTES
from packplan.core.samples.media import Image as ImageSource
from packplan.core.samples.media import Video
from packplan.core.samples.tables import MediaFacts

CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2": "mp4", "matroska,webm": "mkv", "avi": "avi"}
"""Packplan's name of each supported container, by FFmpeg's name; all others are refused."""

TRUSTED_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "mpeg4", "mjpeg"})
"""
Codecs whose videos are measured without decoding. Videos with other codecs are decoded, which
reveals damage and missing decoders.
"""

MAX_PIXELS = 2**26
"""
Largest number of pixels in a frame, 8,192 x 8,192. A header that states a larger size is most
likely damaged.
"""

_INDEXED = ("mp4", "avi")

_BASE = "custom.media_dir, else ROOT_IMAGE_DIR, else the data file's folder"
"""Where relative paths of media start, for messages."""

_JITTER = 1
"""
Largest difference between frame distances that counts as rounding, in units of the container's time
base.
"""

_LOST_S = 0.5
"""
Seconds by which both frames and sound may end before the container's duration; more means a
truncated file.
"""


def read_image_size(image: ImageSource, *, decode: bool = False) -> tuple[int, int]:
    """
    Return an image's width and height in pixels, from its header.

    Args:
        image: Path of the image file, or its content.
        decode: Whether to decode the pixels too, to find damage behind the header.

    Raises:
        ValueError: The image cannot be used; the message has the reason.
    """
    path = image if isinstance(image, str) else f"of {counted(len(image), 'byte')} in the record"
    try:
        # Opening a pipe would wait for a writer that may never come.
        if isinstance(image, bytes) or stat.S_ISREG(Path(image).stat().st_mode):
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(BytesIO(image) if isinstance(image, bytes) else image) as opened:
                    if decode:
                        opened.load()
                    return opened.size
        reason = f"the image {path} is a folder, a pipe or a device: name an image file"
    except FileNotFoundError:
        reason = f"the image {path} does not exist: relative paths start at {_BASE}"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        most = f"{Image.MAX_IMAGE_PIXELS:,}"
        reason = f"the image {path} has more than {most} pixels: shrink it, or raise custom.max_image_pixels"
    except UnidentifiedImageError:
        reason = f"the image {path} cannot be read, since it is damaged or not an image: cannot identify image file"
    except (OSError, SyntaxError, ValueError) as error:
        # The text of a system error repeats the path, so only its reason is used.
        why = getattr(error, "strerror", None) or error
        reason = f"the image {path} cannot be read, since it is damaged or not an image: {why}"
    raise ValueError(reason)


def shrink_size(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """
    Return an image's width and height after ms-swift's first resize, which limits its pixels.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        max_pixels: Largest number of pixels that the template allows; None means no limit.

    Raises:
        ValueError: The image is so narrow that its shorter side would shrink to 0 pixels.
    """
    if max_pixels is None or not 0 < max_pixels < width * height:
        return width, height
    ratio = width / height
    scaled = math.sqrt(max_pixels / ratio)
    sides = int(scaled * ratio), int(scaled)
    if not all(sides):
        message = f"an image of {width} x {height} shrinks to 0: raise template.max_pixels, now {max_pixels:,}"
        raise ValueError(message)
    return sides


def image_facts(image: ImageSource, *, decode: bool = False) -> MediaFacts:
    """
    Return the size of an image in bytes and in pixels, and a digest of its first 64 KiB.

    Args:
        image: Path of the image file, or its content.
        decode: Whether to decode the pixels too, to find damage behind the header.

    Raises:
        ValueError: The image cannot be used; the message has the reason.
    """
    width, height = read_image_size(image, decode=decode)
    if isinstance(image, bytes):
        head, size = image[:HEAD_BYTES], len(image)
    else:
        with Path(image).open("rb") as file:
            head, size = file.read(HEAD_BYTES), Path(image).stat().st_size
    return MediaFacts(size, width, height, _digest_to_int(hashlib.sha256(head).digest()))


@attrs.frozen
class VideoFacts:
    """
    Size, frame count and frame rate of a video, read from its container or its list of frames.
    """

    num_bytes: int

    width: int
    """Width of the frames in pixels, after the rotation that the container specifies."""

    height: int
    num_frames: int

    rate: Fraction
    """Frames a second; 0 for a list of frame images, which has no rate."""

    head: int
    """
    First eight bytes of a SHA-256, as an int64. For a video file, the SHA-256 covers the first and
    last 64 KiB. For listed frames, it covers the size and the first and last 64 KiB of each file.
    """

    doubt: str | None = None
    """Reason why the video has to be decoded to measure it; None if its container suffices."""

    def to_media_facts(self, seconds: float) -> MediaFacts:
        """Return these facts in the form in which they are stored; *seconds* is the duration."""
        doubted = int(self.doubt is not None)
        return MediaFacts(
            self.num_bytes, self.width, self.height, self.head, self.num_frames, round(1000 * seconds), doubted
        )


def video_facts(video: Video, *, max_seconds: float) -> VideoFacts:
    """
    Return size, frame count, frame rate and digest of a video; at most one frame is decoded.

    Args:
        video: Path of a video file, or paths of its frames.
        max_seconds: Longest accepted duration of a video file in seconds.

    Raises:
        ValueError: The video cannot be used; the message has the reason.
    """
    return _read_frame_files(video) if isinstance(video, tuple) else _read_container(video, max_seconds)


def _read_frame_files(frames: Sequence[str]) -> VideoFacts:
    sizes, total, digest = set(), 0, hashlib.sha256()
    for frame in frames:
        sizes.add(read_image_size(frame))
        size, head = _read_size_and_ends(frame)
        if len(sizes) > 1:
            message = f"the frame {frame} differs in size from earlier frames: all frames of a video need the same size"
            raise ValueError(message)
        total += size
        digest.update(size.to_bytes(8, "little") + head)
    ((width, height),) = sizes
    if width * height > MAX_PIXELS:
        message = f"the frame {frames[0]} is {width:,} x {height:,}, above {MAX_PIXELS:,} pixels: shrink it"
        raise ValueError(message)
    return VideoFacts(total, width, height, len(frames), Fraction(0), _digest_to_int(digest.digest()))


def _read_size_and_ends(path: str) -> tuple[int, bytes]:
    """Return the size of a file in bytes, and its first and last 64 KiB joined."""
    with Path(path).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEAD_BYTES)
        file.seek(max(len(head), size - HEAD_BYTES))
        return size, head + file.read(HEAD_BYTES)


def _digest_to_int(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)


def _read_container(path: str, max_seconds: float) -> VideoFacts:
    import av

    try:
        # Opening a pipe would wait for a writer that may never come.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ValueError(f"the video {path} is a folder, a pipe or a device: name a video file, or list its frames")
        with open_video(path) as container:
            size, ends = _read_size_and_ends(path)
            return _Container(path, container, size, max_seconds).read(_digest_to_int(hashlib.sha256(ends).digest()))
    except FileNotFoundError:
        raise ValueError(f"the video {path} does not exist: relative paths start at {_BASE}") from None
    except (av.FFmpegError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        reason = f"the video {path} cannot be read, since it is truncated, damaged or not a video: {why}"
        raise ValueError(reason) from None


@attrs.frozen
class _Container:
    """Video file that has been opened; `read` returns its facts."""

    path: str
    opened: Any
    size: int
    max_seconds: float

    def read(self, head: int) -> VideoFacts:
        """Return the facts of the video, with the digest *head*; ValueError for a bad video."""
        import av

        if (kind := CONTAINERS.get(name := self.opened.format.name)) is None:
            raise self._refusal(f"is a {name} file, but only mp4, mov, mkv, webm and avi are read: encode it again")
        stream = self.opened.streams.best("video")
        codec = None if stream is None else stream.codec_context
        if stream is None or stream.disposition & av.stream.Disposition.attached_pic:  # such as an album cover
            raise self._refusal("has no video stream")
        if codec is None:
            raise self._refusal("has a codec for which no decoder is installed: encode it again, as H.264")
        self._refuse_size(stream.width, stream.height)
        if stream.frames > self.size:  # decord would allocate memory for them, and end the process
            reason = f"claims {stream.frames:,} frames, in {counted(self.size, 'byte')}: encode it again"
            raise self._refusal(reason)
        seconds = (self.opened.duration or 0) / 1e6
        self._refuse_seconds(seconds)
        first, packets = self._first_frame(stream)
        if kind in _INDEXED and stream.frames:
            num, doubt = self._count_by_index(stream)
        else:
            num, doubt = self._count_by_packets(stream, packets, seconds)
        rate = stream.average_rate
        if not num or not rate:
            raise self._refusal("has no frame" if not num else "has no frame rate: encode it again")
        self._refuse_seconds(float(num / rate))
        if codec.name not in TRUSTED_CODECS:
            doubt = doubt or f"its codec is {codec.name}"
        width, height = (first.height, first.width) if _count_quarter_turns(first) % 2 else (first.width, first.height)
        return VideoFacts(self.size, width, height, num, Fraction(rate), head, doubt)

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"the video {self.path} {reason}")

    def _refuse_size(self, width: int, height: int) -> None:
        if not 0 < width * height <= MAX_PIXELS:
            raise self._refusal(f"has frames of {width:,} x {height:,}, above {MAX_PIXELS:,} pixels: shrink it")

    def _refuse_seconds(self, seconds: float) -> None:
        if seconds > self.max_seconds:
            raise self._refusal(
                f"lasts {seconds:,.0f} s, but may last at most {self.max_seconds:,.0f} s: cut it, or raise "
                "custom.max_video_s"
            )

    def _first_frame(self, stream: Any) -> tuple[Any, Iterator[Any]]:
        """Decode and return the first frame, with an iterator over all packets of the video."""
        packets = self.opened.demux(stream)
        read = []
        for packet in packets:
            read.append(packet)
            if frames := packet.decode():
                self._refuse_size(frames[0].width, frames[0].height)
                return frames[0], chain(read, packets)
        raise self._refusal("has no frame that can be decoded: encode it again")

    def _count_by_index(self, stream: Any) -> tuple[int, str | None]:
        """Return the frame count in the container's index, and a reason to doubt it, or None."""
        entries = stream.index_entries
        shown = [entry for entry in entries if not entry.is_discard]
        if any(entry.pos + entry.size > self.size for entry in shown):
            raise self._refusal(f"is truncated: its index names frames beyond its {counted(self.size, 'byte')}")
        if len(shown) != stream.frames:
            return len(entries), "it has an edit list, or its index and its header state different numbers of frames"
        times = [entry.timestamp for entry in shown]
        return len(entries), self._rate_doubt(stream, times)

    def _count_by_packets(self, stream: Any, packets: Iterator[Any], seconds: float) -> tuple[int, str | None]:
        """
        Return the number of packets as frame count, and a reason to doubt this count, or None.

        The count is 0 if a packet has no time.
        """
        times = []
        for packet in packets:
            if not packet.size:
                continue
            if packet.pts is None:
                return 0, None
            times.append(packet.pts)
            self._refuse_seconds(float(packet.pts * stream.time_base))
        if not times:
            return 0, None
        times.sort()
        end = float(times[-1] * stream.time_base) + (1 / float(stream.average_rate) if stream.average_rate else 0)
        if end < seconds - _LOST_S and not self._has_sound_until(seconds):
            raise self._refusal(f"is truncated: its header says {seconds:,.1f} s, but frames end after {end:,.1f} s")
        return len(times), self._rate_doubt(stream, times) or (None if seconds else "its header has no duration")

    def _has_sound_until(self, seconds: float) -> bool:
        """Return whether the sound lasts until *seconds*, the duration stated in the header."""
        with open_video(self.path) as again:
            sound = again.demux(audio=0) if again.streams.audio else ()
            times = (packet.pts * packet.time_base for packet in sound if packet.pts is not None)
            return any(float(time) > seconds - _LOST_S for time in times)

    def _rate_doubt(self, stream: Any, times: list[int]) -> str | None:
        """Return a reason to doubt that the frame rate is constant; None if it is constant."""
        distances = np.diff(times)
        is_even = stream.average_rate == stream.base_rate and (not distances.size or np.ptp(distances) <= _JITTER)
        return None if is_even else "its frame rate varies"


def quarter_turns(path: str) -> int:
    """Return the number of counter-clockwise quarter turns by which a player rotates a video."""
    with open_video(path) as container:
        first = next(container.decode(container.streams.best("video")))
        return _count_quarter_turns(first)


def _count_quarter_turns(frame: Any) -> int:
    return round(frame.rotation / 90) % 4 if frame.rotation % 90 == 0 else 0


def open_video(path: str) -> Any:
    """Open a video file, and return its PyAV container. FFmpeg does not follow links to URLs."""
    import av

    return av.open(path, options={"protocol_whitelist": "file"})
