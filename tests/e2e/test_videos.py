"""Videos: lengths as full encodes give them; packs train as their samples alone do."""

from fractions import Fraction
from functools import cache
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from packplan.adapters.ranks.torch_group import OneRank
from tests.records import write_lines
from tools.demo.videos import MadeVideo, made_videos

pytestmark = pytest.mark.slow

SAMPLING = {"video_min_pixels": 3200, "max_length": 256}


def asked(*videos, images=(), text="What moves?", answer="a red bar"):
    """Return a record that shows videos and images."""
    shown = "<video>" * len(videos) + "<image>" * len(images)
    record = {"messages": [{"role": "user", "content": shown + text}, {"role": "assistant", "content": answer}]}
    media = {"videos": list(videos), "images": list(images)}
    return {**record, **{name: held for name, held in media.items() if held}}


def measurer_of(path: Path):
    """Return what measures the training samples of a run, and the encoder that gives them."""
    from packplan.app.wiring.runs import read_config
    from packplan.app.wiring.splits import open_splits

    config = read_config(path)
    split = open_splits(config)["train"]
    return split.source, split.encoder


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """A folder of a few videos, and of frames of one."""
    folder = tmp_path_factory.mktemp("clips")
    MadeVideo(num_frames=50).write(folder / "a.mp4")
    MadeVideo("webm", "libvpx-vp9", rate=Fraction(30000, 1001), size=(96, 54), seed=1).write(folder / "b.webm")
    MadeVideo(turned=90, seed=2).write(folder / "turned.mp4")
    MadeVideo(rate=None, seed=3).write(folder / "vary.mkv")
    (folder / "frames").mkdir()
    for number in range(5):
        Image.new("RGB", (90, 60), (40 * number, 10, 200)).save(folder / "frames" / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def mixed(clips) -> Path:
    """Records of text, images and videos."""
    frames = [f"frames/{number}.png" for number in range(3)]
    kinds = [
        lambda n: asked("a.mp4", text=f"What is in {n}?"),
        lambda n: asked(text=f"say {n}", answer="hello " * (1 + n)),
        lambda _: asked("b.webm", frames, [*frames, "frames/3.png", "frames/4.png"], images=["frames/4.png"]),
        lambda n: asked(images=[f"frames/{n % 5}.png"]),
        lambda _: asked("turned.mp4", answer="a bar that is upright"),
        lambda n: asked(text=f"repeat {n}", answer="yes " * n),
    ]
    return write_lines(clips / "mixed.jsonl", [kinds[number % 6](number) for number in range(18)])


@pytest.fixture(scope="module")
def few(mixed) -> Path:
    """Four records: text, a video, a video that is turned, and two videos with images."""
    path = mixed.with_name("few.jsonl")
    lines = mixed.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[place] for place in (0, 1, 2, 4)))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[list[MadeVideo], list[Path]]:
    """Twenty videos over containers, codecs, rates, durations, sizes, turns, and their files."""
    from benchmarks.measuring import write_videos

    videos = [attrs.evolve(video, num_frames=min(video.num_frames, 420)) for video in made_videos(20)]
    return videos, write_videos(tmp_path_factory.mktemp("made"), videos)


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_containers_give_the_lengths_of_full_encodes(model, demo, made, tmp_path):
    """Over containers, codecs, rates, sizes and turns: exactly, most without decoding."""
    from benchmarks.measuring import differing, video_lengths

    (tmp_path / model).symlink_to(demo / "models" / model)
    videos, paths = made
    quick = video_lengths(tmp_path / model, paths, in_full=False)

    assert [] == differing(paths, quick, video_lengths(tmp_path / model, paths, in_full=True))
    decoded = [video.rate is None for video, one in zip(videos, quick, strict=True) if one.media[0].decoded]
    assert decoded
    assert all(decoded)
    assert len(decoded) == sum(video.rate is None for video in videos)


@pytest.fixture(scope="module")
def measurer(demo, mixed, tmp_path_factory):
    """Return a function that opens what measures the mixed records: once for each sampling."""
    from packplan.app.wiring.splits import open_splits
    from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig

    @cache
    def measures(model: str, sampling: tuple[tuple[str, float], ...]):
        config = RunConfig(
            model=ModelConfig(model=str(demo / "models" / model)),
            template=TemplateConfig(max_length=1024, **dict(sampling)),
            custom=CustomConfig(train_jsonl=(str(mixed),)),
            training=TrainingConfig(output_dir=str(tmp_path_factory.getbasetemp() / "measured")),
        )
        return open_splits(config)["train"].source

    return measures


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"fps": 5, "fps_max_frames": 6, "video_min_pixels": 4000},
        {"fps": 0.5, "fps_min_frames": 8, "video_min_pixels": 3200, "video_max_pixels": 7000},
        {"video_min_pixels": 3200, "video_total_pixels": 20000},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_keys_of_sampling_steer_lengths_and_encodes_alike(model, sampling, measurer):
    """Frames in lists, folders and files, beside images; another key, another fingerprint."""
    plain, steered = (measurer(model, tuple(keys.items())) for keys in ({}, sampling))
    quick = list(steered.measure_many(range(6), in_full=False))

    assert quick == list(steered.measure_many(range(6), in_full=True))
    assert [1, 0, 3, 0, 1, 0] == [one.measurement.videos for one in quick]
    changed = plain.fingerprint().differences(steered.fingerprint())
    assert {f"template.{key}" for key in sampling} == {one.key for one in changed}


def test_a_turned_video_has_the_frames_that_it_shows(tmp_path):
    """Read by PyAV where decord fails; an upright one is decord's, and its frames are the same."""
    from qwen_vl_utils import vision_process

    from packplan.adapters.samples import video_reading

    upright = MadeVideo(seed=7).write(tmp_path / "upright.mp4")
    plain, _, rate = vision_process._read_video_decord({"video": str(upright)})
    assert torch.equal(plain, video_reading._read_video({"video": str(upright)})[0])
    for turned in (90, 180, 270):
        video = MadeVideo(seed=7, turned=turned).write(tmp_path / f"{turned}.mp4")
        frames, _, its_rate = video_reading._read_video({"video": str(video)})
        expected = np.rot90(plain.permute(0, 2, 3, 1).numpy(), turned // 90, axes=(1, 2))
        assert np.array_equal(expected, frames.permute(0, 2, 3, 1).numpy())
        assert rate == its_rate


@pytest.fixture
def ready(demo, few, tmp_path_factory):
    """Return a function that gives a run of a model, ready to train."""
    from packplan.app.sft.train import prepare
    from packplan.app.wiring.runs import read_config

    def prepared(model: str):
        folder = tmp_path_factory.mktemp(model)
        sections = {
            "model": {"model": str(demo / "models" / model)},
            "template": {**SAMPLING, "max_length": 512},
            "custom": {"train_jsonl": str(few)},
            "training": {
                "output_dir": str(folder / "run"),
                "report_to": [],
                "gradient_checkpointing": False,
                "packing_drop_last": False,
            },
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(sections))
        trainer, splits = prepare(config := read_config(folder / "run.yaml"), OneRank())
        return config, trainer, splits["train"]

    return prepared


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_a_pack_with_videos_is_its_samples_alone(ready, model):
    """Positions exactly, logits, losses and gradients to rounding; no sample sees another."""
    from packplan.app.check import compare

    report = compare(*ready(model), num_packs=1)

    assert ((0, "mixed", 4),) == report.packs
    assert [] == [verdict.check for verdict in report.verdicts if not verdict.passed]
    worst = {verdict.check: verdict.worst.value for verdict in report.verdicts}
    assert all(worst[check] == 0 for check in ("positions", "labels", "isolation"))
    assert all(worst[check] < 1e-5 for check in ("logits", "sample loss", "step loss", "gradients"))


def test_a_model_of_text_refuses_videos(write_run, mixed):
    samples, _ = measurer_of(write_run("qwen2", custom={"train_jsonl": str(mixed)}))
    (outcome,) = samples.measure_many(range(1), in_full=False)

    assert "the record has videos, but the model reads text only" in str(outcome)
