"""Videos: lengths as full encodes give them; packs train as their samples alone do."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.measuring import VIDEO_MODELS, differing, video_lengths, write_videos
from packplan.adapters.samples.media_files import video_facts
from packplan.adapters.samples.video_reading import _read_video
from packplan.app.check import compare_packs
from packplan.app.opening.runs import read_config
from tests.e2e.ready import measured
from tests.made.pictures import showing
from tests.records import write_lines
from tools.demo.videos import VideoSpec, video_specs

pytestmark = pytest.mark.slow

SAMPLING = {"video_min_pixels": 3200, "max_length": 256}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Records of text, images, and videos as files and lists of frames."""
    folder = tmp_path_factory.mktemp("clips")
    VideoSpec(num_frames=50).write(folder / "a.mp4")
    VideoSpec("webm", "libvpx-vp9", rate=Fraction(30000, 1001), size=(96, 54), seed=1).write(folder / "b.webm")
    VideoSpec(turned=90, seed=2).write(folder / "turned.mp4")
    for number in range(5):
        Image.new("RGB", (90, 60), (40 * number, 10, 200)).save(folder / f"{number}.png")
    first, frames = ["0.png", "1.png", "2.png"], [f"{number}.png" for number in range(5)]
    records = [
        showing(text="say 1", answer="hello hello"), showing("a.mp4"),
        showing("turned.mp4", answer="a bar that is upright"), showing("b.webm", first, frames, images=["4.png"]),
        showing(images=["3.png"]),
    ]  # fmt: skip
    return write_lines(folder / "mixed.jsonl", records)


def test_containers_give_the_lengths_of_full_encodes(demo, tmp_path):
    """Over containers, codecs, rates, sizes and turns: exactly, most without decoding."""
    videos = [attrs.evolve(video, num_frames=min(video.num_frames, 420)) for video in video_specs(20)]
    paths = write_videos(tmp_path, videos)
    for model in VIDEO_MODELS:
        (tmp_path / model).symlink_to(demo / "models" / model)
        quick, full = (video_lengths(tmp_path / model, paths, in_full=in_full) for in_full in (False, True))

        assert [] == differing(paths, quick, full)
        varying = [video.rate is None for video in videos]
        assert varying == [one.media[0].decoded for one in quick]
        assert 0 < sum(varying) < len(videos)


@pytest.mark.parametrize("model", VIDEO_MODELS)
def test_keys_of_sampling_steer_lengths_and_encodes_alike(model, mixed, open_source):
    """Each alone: frames in lists and files, beside images; another key, another fingerprint."""
    sampling, lengths, fingerprint = {}, [], None
    for key, value in (
        ("video_min_pixels", 3200), ("fps", 5), ("fps_max_frames", 6), ("fps", 0.5), ("fps_min_frames", 6),
        ("video_max_pixels", 5000), ("video_total_pixels", 10000),
    ):  # fmt: skip
        source, _ = open_source(mixed, model, max_length=1024, **(sampling := sampling | {key: value}))
        found = [one.measurement for one in measured(source)]

        assert [0, 1, 1, 3, 0] == [one.videos for one in found]
        lengths.append([one.length for one in found])
        if fingerprint is not None:
            assert [f"template.{key}"] == [one.key for one in fingerprint.differences(source.fingerprint())]
        fingerprint = source.fingerprint()
    assert all(one != other for one, other in pairwise(lengths))


def test_a_turned_video_has_the_frames_that_it_shows(tmp_path):
    """Read by PyAV where decord fails; an upright one is decord's, and its frames are the same."""
    from qwen_vl_utils import vision_process

    upright = {"video": str(VideoSpec(seed=7).write(tmp_path / "upright.mp4"))}
    plain, _, rate = vision_process._read_video_decord(upright)
    assert torch.equal(plain, _read_video(upright)[0])
    for turned in (90, 180, 270):
        video = VideoSpec(seed=7, turned=turned).write(tmp_path / f"{turned}.mp4")
        frames, _, its_rate = _read_video({"video": str(video)})
        expected = np.rot90(plain.permute(0, 2, 3, 1).numpy(), turned // 90, axes=(1, 2))
        assert np.array_equal(expected, frames.permute(0, 2, 3, 1).numpy())
        assert rate == its_rate
        facts = video_facts(str(video), max_seconds=60)
        assert (facts.height, facts.width) == frames.shape[2:]


@pytest.mark.parametrize("model", VIDEO_MODELS)
def test_a_pack_with_videos_is_its_samples_alone(model, mixed, write_run, ready):
    """Positions exactly, logits, losses and gradients to rounding; no sample sees another."""
    template = {**SAMPLING, "max_length": 512}
    run = write_run(model, custom={"train_jsonl": str(mixed)}, template=template, training={"packing_drop_last": False})
    its = ready(run)
    report = compare_packs(read_config(run), its.trainer, its.planned["train"], num_packs=1)

    assert ((0, "mixed", 5),) == report.packs
    assert [] == [verdict.check for verdict in report.verdicts if not verdict.passed]
    worst = {verdict.check: verdict.worst.value for verdict in report.verdicts}
    assert all(worst[check] == 0 for check in ("positions", "labels", "isolation"))
    assert all(worst[check] < 1e-5 for check in ("logits", "sample loss", "step loss", "gradients"))
