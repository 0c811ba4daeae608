"""Videos that cannot be trained are named, in bounded time and memory."""

import contextlib
import os
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from packplan.adapters.samples import media_files
from packplan.core.errors import RecordError
from tests.e2e.ready import assert_refused, measured
from tests.e2e.test_videos import SAMPLING
from tests.made.pictures import showing
from tools.demo.videos import VideoSpec

pytestmark = pytest.mark.slow


def patched(data: bytes, box: bytes, offset: int, kind: str, *values: float) -> bytes:
    """Return a file in which values, packed as *kind*, stand so many bytes behind a box's name."""
    place, written = data.index(box) + len(box) + offset, struct.pack(kind, *values)
    return data[:place] + written + data[place + len(written) :]


def write_grey(size: tuple[int, int], number: int, rate: Fraction, *paths: Path) -> None:
    """Write videos that repeat one grey frame, which is encoded once."""
    import av

    codec = av.CodecContext.create("mjpeg", "w")
    codec.width, codec.height = size
    codec.pix_fmt, codec.time_base = "yuvj420p", Fraction(1)
    frame = av.VideoFrame(*size, codec.pix_fmt)
    for plane in frame.planes:
        plane.update(bytes([120]) * plane.buffer_size)
    frame.pts, frame.time_base = 0, Fraction(1)
    data = b"".join(map(bytes, [*codec.encode(frame), *codec.encode()]))
    for path in paths:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mjpeg", rate=rate)
            stream.width, stream.height, stream.pix_fmt = *size, codec.pix_fmt
            for place in range(number):
                packet = av.Packet(data)
                packet.stream, packet.time_base, packet.duration = stream, 1 / rate, 1
                packet.pts = packet.dts = place
                packet.is_keyframe = True
                container.mux(packet)


def bad_videos(folder: Path) -> dict[str | tuple[str, str], str]:
    """Write videos that cannot be trained; return their names -> what is said of them."""
    import av

    whole = VideoSpec(num_frames=80, size=(96, 54)).write(folder / "whole.mp4").read_bytes()
    with (
        av.open(folder / "whole.mp4") as source,
        av.open(folder / "cut.mp4", "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    os.truncate(folder / "cut.mp4", (folder / "cut.mp4").stat().st_size * 2 // 3)
    mkv = VideoSpec("mkv", num_frames=80).write(folder / "whole.mkv").read_bytes()
    (folder / "codec.mp4").write_bytes(whole.replace(b"avc1", b"zzz1"))
    VideoSpec(num_frames=10, rate=Fraction(1, 4000)).write(folder / "hours.mp4")
    VideoSpec("mkv", num_frames=10, rate=Fraction(1, 4000)).write(folder / "hours.mkv")
    (folder / "cut.mkv").write_bytes(mkv[: len(mkv) * 2 // 3])
    (folder / "empty.mp4").write_bytes(b"")
    still = Image.new("RGB", (64, 48))
    still.save(folder / "still.mp4", "png")
    still.save(folder / "moving.gif", save_all=True, append_images=[Image.new("RGB", (64, 48), 9)])
    (folder / "playlist.mp4").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n")
    VideoSpec(num_frames=1).write(folder / "one.mp4")
    VideoSpec(num_frames=2, size=(1616, 8)).write(folder / "flat.mp4")
    VideoSpec(num_frames=30, size=(640, 480)).write(folder / "large.mp4")
    with av.open(folder / "sound.mp4", "w") as sound:
        stream = sound.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        sound.mux([*stream.encode(frame), *stream.encode()])
    # decord would take memory for each, and end the process.
    (folder / "count.mp4").write_bytes(patched(whole, b"stts", 8, ">I", 4_000_000_000))
    write_grey((7680, 4320), 4, Fraction(1), folder / "8k.avi")
    write_grey((32, 32), 3600, Fraction(1, 10), folder / "10h.mkv")
    (folder / "large").mkdir()
    Image.new("1", (8200, 8200)).save(folder / "large" / "0.png")
    (folder / "large" / "1.png").hardlink_to(folder / "large" / "0.png")
    (folder / "none").mkdir()
    os.mkfifo(folder / "pipe.mp4")
    return {
        "gone.mp4": "gone.mp4 does not exist: relative paths start at custom.media_dir",
        "cut.mp4": "is truncated: its index names frames beyond",
        "cut.mkv": "is truncated: its header says 3.2 s",
        "codec.mp4": "has a codec for which no decoder is installed: encode it again, as H.264",
        "hours.mp4": "lasts 40,000 s, but may last at most 600 s: cut it, or raise custom.max_video_s",
        "hours.mkv": "lasts 40,000 s, but may last at most 600 s: cut it, or raise custom.max_video_s",
        "empty.mp4": "cannot be read",
        "still.mp4": "is a png_pipe file, but only mp4",
        "moving.gif": "is a gif file, but only mp4",
        "playlist.mp4": "playlist.mp4 cannot be read",
        "one.mp4": "one.mp4 cannot be sampled: it has 1 frame, but needs 2",
        "flat.mp4": "flat.mp4 cannot be sampled: frames of 1616 x 8: ",
        "large.mp4": "above custom.max_video_bytes, 3,000,000: lower template.fps_max_frames, or shrink the video",
        "sound.mp4": "has no video",
        "count.mp4": "claims 4,000,000,000 frames",
        "8k.avi": "(7680 x 4320)",
        "10h.mkv": "lasts 36,000 s, but may last at most 600 s: cut it",
        ("large/0.png", "large/1.png"): "is 8,200 x 8,200, above 67,108,864 pixels",
        "none": "is a folder, a pipe or a device",
        "pipe.mp4": "is a folder, a pipe or a device",
    }


def test_a_bad_video_is_named_by_its_record_and_nothing_takes_its_place(open_source, tmp_path):
    """From its container, and refused by a full encode too; the others are measured."""
    says = bad_videos(tmp_path)
    limits = {"max_video_s": 600, "max_video_bytes": 3_000_000}
    source, _ = open_source([showing(video) for video in [*says, "whole.mp4"]], custom=limits, **SAMPLING)

    *bad, good = measured(source)

    assert 1 == good.measurement.videos
    assert_refused(bad, says.values())


@pytest.mark.parametrize(("container", "spare"), [("mp4", 0), ("mp4", -1), ("mkv", 0), ("mkv", -1)])
def test_frames_beyond_the_bound_are_refused_by_their_size(monkeypatch, tmp_path, container, spare):
    """A frame of the bound itself is read."""
    video = str(VideoSpec(container).write(tmp_path / f"a.{container}"))
    monkeypatch.setattr(media_files, "MAX_PIXELS", 64 * 48 + spare)
    refused = pytest.raises(ValueError, match="has frames of 64 x 48, above 3,071 pixels: shrink it")
    with refused if spare else contextlib.nullcontext():
        assert 64 == media_files.video_facts(video, max_seconds=600).width


class CountingContainer:
    """Container, or a packet of one, that counts the frames that are decoded."""

    decoded = 0

    def __init__(self, plain):
        self._plain = plain

    def __getattr__(self, name):
        return getattr(self._plain, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._plain.close()

    def demux(self, *streams, **kinds):
        """Yield packets that count too."""
        return map(CountingContainer, self._plain.demux(*streams, **kinds))

    def decode(self, *streams):
        """Decode, and count."""
        frames = list(self._plain.decode(*streams))
        CountingContainer.decoded += len(frames)
        return frames


@pytest.mark.parametrize(
    ("kinds", "size", "number", "rate"),
    [(("mp4", "mkv"), (7680, 4320), 40, Fraction(2)), (("mp4", "mkv", "avi"), (32, 32), 36_000, Fraction(1))],
)
def test_one_frame_of_8k_or_10_hours_is_decoded(tmp_path, monkeypatch, kinds, size, number, rate):  # noqa: PLR0917  # fixtures
    """Whatever the container."""
    write_grey(size, number, rate, *(paths := [tmp_path / f"a.{kind}" for kind in kinds]))
    plain = media_files.open_video
    for path in paths:
        monkeypatch.setattr(media_files, "open_video", lambda one: CountingContainer(plain(one)))
        CountingContainer.decoded = 0
        found = media_files.video_facts(str(path), max_seconds=40_000)
        assert 1 == CountingContainer.decoded
        assert (*size, number) == (found.width, found.height, found.num_frames)


def test_a_container_that_lies_gives_the_length_that_training_has(open_source, tmp_path):
    """Of its size, duration, rate or number of frames; odd sides and transparency too."""
    whole = {kind: VideoSpec(kind, num_frames=30).write(tmp_path / f"w.{kind}").read_bytes() for kind in ("mp4", "mkv")}
    avi = VideoSpec("avi", "mpeg4", num_frames=30).write(tmp_path / "w.avi").read_bytes()
    lies = {
        "size.mp4": patched(whole["mp4"], b"avc1", 24, ">HH", 8000, 8000),
        "duration.mp4": patched(whole["mp4"], b"mvhd", 16, ">I", 36_000_000),
        "short.mp4": patched(whole["mp4"], b"mdhd", 16, ">I", 512),
        "more.mp4": patched(whole["mp4"], b"stts", 8, ">I", 3000),
        "fewer.mp4": patched(whole["mp4"], b"stts", 8, ">I", 10), "more.avi": patched(avi, b"vids", 28, "<I", 3000),
        "fewer.avi": patched(avi, b"vids", 28, "<I", 5), "rate.avi": patched(avi, b"vids", 16, "<II", 1, 100_000),
        "short.mkv": patched(whole["mkv"], b"\x44\x89\x88", 0, ">d", 100.0),
    }  # fmt: skip
    for name, data in lies.items():
        (tmp_path / name).write_bytes(data)
    VideoSpec("webm", "libvpx-vp9", size=(97, 53)).write(tmp_path / "odd.webm")
    VideoSpec("webm", "libvpx-vp9", pixels="yuva420p").write(tmp_path / "clear.webm")
    source, _ = open_source([showing(name) for name in [*lies, "odd.webm", "clear.webm"]], **SAMPLING)

    assert all(one.measurement.videos == 1 for one in measured(source))


def test_damage_between_two_frames_is_found_by_decoding_all(open_source, tmp_path):
    """By `verify --decode`, else by training, with its record. Its container is sound."""
    for name, bad, turned in (("a.mp4", "bad.mp4", 0), ("b.mp4", "turned.mp4", 90)):
        whole = VideoSpec(num_frames=60, size=(160, 120), turned=turned).write(tmp_path / name).read_bytes()
        middle = len(whole) // 2
        (tmp_path / bad).write_bytes(whole[:middle] + bytes(800) + whole[middle + 800 :])
    records = map(showing, ("a.mp4", "b.mp4", "bad.mp4", "turned.mp4"))
    source, encoder = open_source(records, **SAMPLING | {"fps": 12, "max_length": 4096})
    measured = list(source.measure_many(range(4), in_full=False))
    assert [1] * 4 == [one.measurement.videos for one in measured]
    for index in (0, 1):
        assert measured[index].media == source.media_facts(index, decode=True)

    for index, name in ((2, "bad.mp4"), (3, "turned.mp4")):
        for read in (lambda index: source.media_facts(index, decode=True), encoder.encode):
            with pytest.raises(RecordError) as caught:
                read(index)
            for said in (f"data.jsonl, line {index + 1}: ", f"{name} cannot be decoded: ", "plan verify --decode"):
                assert said in str(caught.value)
