"""
Videos: lengths from their containers are those of full encodes, and packs with videos train as
their samples alone do.
"""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from PIL import Image

from adapters.ranks.torch_group import OneRank
from adapters.samples.video import facts
from app.demo.videos import MadeVideo, made_videos
from core.errors import RecordError
from tests.e2e import rank_main
from tests.e2e.test_resume import assert_equal
from tests.processes import finished

pytestmark = pytest.mark.slow

SAMPLING = {"video_min_pixels": 3200, "max_length": 256}


def asked(*videos, images=(), text="What moves?", answer="a red bar"):
    """Return a record that shows videos and images."""
    shown = "<video>" * len(videos) + "<image>" * len(images)
    record = {"messages": [{"role": "user", "content": shown + text}, {"role": "assistant", "content": answer}]}
    media = {"videos": list(videos), "images": list(images)}
    return {**record, **{name: held for name, held in media.items() if held}}


def write(path: Path, records) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


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
        lambda _: asked("b.webm", frames, "frames", images=["frames/4.png"]),
        lambda n: asked(images=[f"frames/{n % 5}.png"]),
        lambda _: asked("turned.mp4", answer="a bar that is upright"),
        lambda n: asked(text=f"repeat {n}", answer="yes " * n),
    ]
    return write(clips / "mixed.jsonl", [kinds[number % 6](number) for number in range(18)])


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_containers_give_the_lengths_of_full_encodes(model, demo, tmp_path):
    """
    Over containers, codecs, rates, durations, sizes and turns: zero tolerance, most without
    decoding.
    """
    from app.bench.measuring.videos import compared, outcomes, write_videos

    (tmp_path / model).symlink_to(demo / "models" / model)
    videos = made_videos(20)
    paths = write_videos(tmp_path, videos)
    quick = outcomes(tmp_path, model, paths, in_full=False)

    assert [] == compared(model, paths, quick, outcomes(tmp_path, model, paths, in_full=True))
    decoded = [made.rate is None for made, one in zip(videos, quick, strict=True) if one.images[0].decoded]
    assert decoded
    assert all(decoded)
    assert len(decoded) == sum(made.rate is None for made in videos)


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
def test_keys_of_sampling_steer_lengths_and_encodes_alike(model, sampling, write_run, mixed):
    """
    Frames in lists, folders and files, several videos and images in a record; another key is
    another fingerprint.
    """
    from app.wiring import training

    plain, steered = (
        training.read_config(write_run(model, custom={"train_jsonl": str(mixed)}, template=keys))
        for keys in ({}, sampling)
    )
    samples = training.open_measurer(steered, training.open_samples(steered)["train"])
    quick = list(samples.measure_many(range(6), in_full=False))

    assert quick == list(samples.measure_many(range(6), in_full=True))
    assert [1, 0, 3, 0, 1, 0] == [one.measurement.videos for one in quick]
    before = training.open_measurer(plain, training.open_samples(plain)["train"]).fingerprint()
    assert {f"template.{key}" for key in sampling} == {one.key for one in before.differences(samples.fingerprint())}


def test_a_turned_video_has_the_frames_that_it_shows(tmp_path):
    """Read by PyAV where decord fails; an upright one is decord's, and its frames are the same."""
    from qwen_vl_utils import vision_process

    from adapters.samples.video import reading

    upright = MadeVideo(seed=7).write(tmp_path / "upright.mp4")
    plain, _, rate = vision_process._read_video_decord({"video": str(upright)})
    assert torch.equal(plain, reading._read({"video": str(upright)})[0])
    for turned in (90, 180, 270):
        video = MadeVideo(seed=7, turned=turned).write(tmp_path / f"{turned}.mp4")
        frames, _, its_rate = reading._read({"video": str(video)})
        expected = np.rot90(plain.permute(0, 2, 3, 1).numpy(), turned // 90, axes=(1, 2))
        assert np.array_equal(expected, frames.permute(0, 2, 3, 1).numpy())
        assert rate == its_rate


@pytest.fixture
def comparison(write_run, mixed):
    """Return a function that compares packs of text, images and videos, after planting a fault."""
    from app.check import compare
    from app.training.prepare import prepare
    from app.wiring import training as wiring

    def run(of: str, plant=lambda _: None):
        config = wiring.read_config(write_run(of, custom={"train_jsonl": str(mixed)}, template=SAMPLING))
        prepared = prepare(config, OneRank())
        plant(prepared.trainer)
        report = compare(config, prepared, num_packs=2)
        return {verdict.check for verdict in report.verdicts if not verdict.passed}, report

    return run


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_a_pack_with_videos_is_its_samples_alone(comparison, model):
    """Positions exactly, logits, losses and gradients to rounding; no sample sees another."""
    failed, report = comparison(model)

    assert set() == failed
    worst = {verdict.check: verdict.worst.value for verdict in report.verdicts}
    assert all(worst[check] == 0 for check in ("positions", "labels", "isolation"))
    assert all(worst[check] < 1e-5 for check in ("logits", "sample loss", "step loss", "gradients"))


def swapped_frames(batch):
    """Exchange the first two frames' patches of a batch's first video."""
    grid, pixels = batch["video_grid_thw"][0], batch["pixel_values_videos"].clone()
    half = pixels.shape[1] // 2
    rows = int(grid[1] * grid[2])
    pixels[:rows] = torch.cat([pixels[:rows, half:], pixels[:rows, :half]], dim=1)
    return {**batch, "pixel_values_videos": pixels}


def shared_layers(batch):
    """Let the first layers of two videos be one video's, so that each sees the other."""
    pixels = batch["pixel_values_videos"].clone()
    return {**batch, "pixel_values_videos": pixels.roll(len(pixels) // 2, 0)}


@pytest.mark.parametrize("tamper", [swapped_frames, shared_layers])
@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_a_swapped_frame_is_found(comparison, model, tamper):
    """As is a frame that a neighbour's video has."""

    def plant(trainer):
        plain = trainer.data_collator

        def collate(items):
            batch = plain(items)
            return tamper(batch) if batch.get("pixel_values_videos") is not None else batch

        trainer.data_collator = collate

    failed, _ = comparison(model, plant)

    assert "logits" in failed


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_that_a_neighbour_sees_are_found(comparison, monkeypatch, model):
    """A tower that attends over all frames of a pack leaks."""

    def plant(trainer):
        visual = next(module.visual for module in trainer.model.modules() if hasattr(module, "visual"))
        plain = visual.forward

        def forward(hidden_states, grid_thw, **kwargs):
            whole = torch.tensor([[1, 2, int(grid_thw.prod(-1).sum()) // 2]])
            return plain(hidden_states, grid_thw if len(grid_thw) == 1 else whole, **kwargs)

        monkeypatch.setattr(visual, "forward", forward)

    failed, _ = comparison(model, plant)

    assert "isolation" in failed


def test_two_ranks_of_which_one_has_videos_end_together(start_ranks, write_run, clips, tmp_path):
    """With evaluation, and loaders whose worker processes decode."""
    records = [asked(*(["a.mp4"] if number < 2 else []), text=f"say {number}") for number in range(6)]
    data = write(clips / "one_rank.jsonl", records)
    training = {
        "packing": True,
        "packing_drop_last": False,
        "effective_batch_size": 2,
        "packing_algorithm": "concatenative",
        "eval_strategy": "epoch",
        "dataloader_num_workers": 1,
    }
    keys = {**SAMPLING, "max_length": 90}
    path = write_run(
        "qwen3_vl", custom={"train_jsonl": str(data), "val_jsonl": str(data)}, template=keys, training=training
    )

    assert [0, 0] == finished(start_ranks(2, path, tmp_path / "out"))
    ranks = rank_main.seen(tmp_path / "out", 2)
    assert 1 == len({(rank["aligned"], rank["steps"]) for rank in ranks})
    losses = [[entry["loss"] for entry in rank["history"] if "loss" in entry] for rank in ranks]
    assert losses[0] == pytest.approx(losses[1])


def test_a_run_with_videos_resumes_to_the_same_weights(execute, write_run, mixed, tmp_path):
    """
    Bit for bit, from the middle of an epoch; frames are decoded in worker processes, and the log
    says how long that took.
    """
    training = {
        "effective_batch_size": 2,
        "packing_drop_last": False,
        "save_strategy": "steps",
        "save_steps": 1,
        "dataloader_num_workers": 1,
    }
    custom = {"train_jsonl": str(mixed)}
    whole = execute(write_run(name="whole", custom=custom, template=SAMPLING, training=training))
    again = tmp_path / "whole" / "checkpoint-1"
    resumed = {**training, "resume_from_checkpoint": str(again), "packing_lengths_from": str(tmp_path / "whole")}
    execute(write_run(name="again", custom=custom, template=SAMPLING, training=resumed))

    assert whole.num_steps > 1
    assert any(entry.get("video_seconds", 0) > 0 for entry in whole.history)
    last = f"checkpoint-{whole.num_steps}"
    assert_equal(tmp_path / "again" / last, tmp_path / "whole" / last)


def bad_videos(folder: Path) -> dict[str, str]:
    """Write videos that cannot be trained; return their names -> what is said of them."""
    whole = MadeVideo(num_frames=80, size=(96, 54)).write(folder / "whole.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    mkv = MadeVideo("mkv", num_frames=80).write(folder / "whole.mkv").read_bytes()
    (folder / "codec.mp4").write_bytes(whole.replace(b"avc1", b"zzz1"))
    MadeVideo(num_frames=10, rate=Fraction(1, 4000)).write(folder / "hours.mp4")
    MadeVideo("mkv", num_frames=10, rate=Fraction(1, 4000)).write(folder / "hours.mkv")
    (folder / "cut.mkv").write_bytes(mkv[: len(mkv) * 2 // 3])
    (folder / "empty.mp4").write_bytes(b"")
    Image.new("RGB", (64, 48)).save(folder / "still.png")
    (folder / "still.mp4").write_bytes((folder / "still.png").read_bytes())
    Image.new("RGB", (64, 48)).save(folder / "moving.gif", save_all=True, append_images=[Image.new("RGB", (64, 48), 9)])
    (folder / "playlist.mp4").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n")
    MadeVideo(num_frames=1).write(folder / "one.mp4")
    MadeVideo(num_frames=300, rate=Fraction(1, 4)).write(folder / "long.mp4")
    MadeVideo(num_frames=2, size=(1616, 8)).write(folder / "flat.mp4")
    MadeVideo(num_frames=30, size=(640, 480)).write(folder / "large.mp4")
    sound(folder / "sound.mp4")
    (folder / "none").mkdir()
    os.mkfifo(folder / "pipe.mp4")
    return {
        "gone.mp4": "gone.mp4 does not exist",
        "cut.mp4": "truncated",
        "cut.mkv": "is truncated: it says 3.2 s",
        "codec.mp4": "is of a codec that is not known here: encode it again, as H.264",
        "hours.mp4": "has 40,000 s, but may have 600: cut it, or raise custom.max_video_s",
        "hours.mkv": "has 40,000 s, but may have 600: cut it, or raise custom.max_video_s",
        "empty.mp4": "cannot be read",
        "still.mp4": "is a still image",
        "moving.gif": "is a GIF",
        "playlist.mp4": "playlist.mp4 cannot be read",
        "one.mp4": "nframes should in interval",
        "long.mp4": "may have 600: cut it, or raise custom.max_video_s",
        "flat.mp4": "aspect ratio",
        "large.mp4": "lower template.fps_max_frames, shrink the video, or raise custom.max_video_bytes",
        "sound.mp4": "has no video, but sound alone",
        "none": "is a folder without frames",
        "pipe.mp4": "is a pipe or a device",
    }


def sound(path: Path) -> None:
    """Write a file of sound alone."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_a_bad_video_is_named_by_its_record_and_nothing_takes_its_place(write_run, tmp_path):
    """From its container as by a full encode, with the same words; the others are measured."""
    from app.wiring import training

    says = bad_videos(tmp_path)
    data = write(tmp_path / "bad.jsonl", [asked(video) for video in [*says, "whole.mp4"]])
    limits = {"max_video_s": 600, "max_video_bytes": 3_000_000}
    config = training.read_config(write_run(custom={"train_jsonl": str(data), **limits}, template=SAMPLING))
    samples = training.open_measurer(config, training.open_samples(config)["train"])

    for in_full in (False, True):
        *bad, good = samples.measure_many(range(len(says) + 1), in_full=in_full)
        assert 1 == good.measurement.videos
        for number, (outcome, said) in enumerate(zip(bad, says.values(), strict=True), start=1):
            assert isinstance(outcome, RecordError)
            assert f"bad.jsonl, line {number}: " in str(outcome)
            assert said in str(outcome)
            assert len(str(outcome)) < 600


@pytest.mark.parametrize("container", ["mp4", "mkv"])
def test_frames_beyond_the_bound_are_refused_by_their_size(monkeypatch, tmp_path, container):
    """A frame of the bound itself is read."""
    video = str(MadeVideo(container).write(tmp_path / f"a.{container}"))
    monkeypatch.setattr(facts, "MAX_PIXELS", 64 * 48)
    assert (64, 48) == attrs.astuple(facts.video_facts(video, max_seconds=600))[1:3]

    monkeypatch.setattr(facts, "MAX_PIXELS", 64 * 48 - 1)

    with pytest.raises(ValueError, match=r"has frames of 64 x 48, but may have 3,071 pixels: shrink it"):
        facts.video_facts(video, max_seconds=600)


def test_a_model_of_text_refuses_videos(write_run, mixed):
    """By the record."""
    from app.wiring import training

    config = training.read_config(write_run("qwen2", custom={"train_jsonl": str(mixed)}))
    samples = training.open_measurer(config, training.open_samples(config)["train"])
    (outcome,) = samples.measure_many(range(1), in_full=False)

    assert "the record has videos, but the model reads text only" in str(outcome)
