"""A run that continues another one with other data and packs trains what that one left."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from packplan.adapters.config.run import load_mixes
from packplan.app import sft
from packplan.app.plan import __main__ as plan_command
from packplan.core.errors import ConfigError, PlanError, StaleError
from packplan.core.mixes import select
from tests.e2e import rank_main
from tests.processes import finished

pytestmark = pytest.mark.slow

KEYS = {
    "num_train_epochs": 2, "effective_batch_size": 2, "packing_drop_last": False, "lr_scheduler_type": "constant",
    "save_strategy": "steps", "save_steps": 1, "learning_rate": "1e-2",
}  # fmt: skip

NUM_OLD, NUM_NEW = 30, 10


@pytest.fixture
def write(write_run, tmp_path):
    """
    Return a function that writes a run over thirty records, or over these and some new ones before
    them.
    """

    def lines(first: int, last: int) -> str:
        turns = (
            [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "blue circle " * (1 + n % 7)}]
            for n in range(first, last)
        )
        return "".join(json.dumps({"messages": one}) + "\n" for one in turns)

    (tmp_path / "old.jsonl").write_text(lines(0, NUM_OLD))
    (tmp_path / "new.jsonl").write_text(lines(NUM_OLD, NUM_OLD + NUM_NEW))

    def run(name: str, *files: str, max_length: int = 128, custom: dict | None = None, **keys) -> Path:
        data = {"train_jsonl": [str(tmp_path / f"{one}.jsonl") for one in files or ["old"]], **(custom or {})}
        return write_run(
            "qwen2", name=name, template={"max_length": max_length}, custom=data, training={**KEYS, **keys}
        )

    return run


def shown(capsys, path: Path, *options: str) -> dict:
    """Return what `show --json` says of a run."""
    capsys.readouterr()
    assert 0 == plan_command.main(["show", str(path), "--json", *options])
    return json.loads(capsys.readouterr().out)


def visits_in(checkpoint: Path) -> np.ndarray:
    """Return the visits of each record in a checkpoint."""
    return np.load(checkpoint / "packplan_visits.npy")


@pytest.fixture
def served(monkeypatch) -> list[int]:
    """Samples of each pack that this process trains on, as they are fetched."""
    from packplan.adapters.trainer import packed_dataset

    samples: list[int] = []
    plain = packed_dataset.PackedDataset.encoded

    def noted(dataset, position, indices):
        samples.extend(indices)
        return plain(dataset, position, indices)

    monkeypatch.setattr(packed_dataset.PackedDataset, "encoded", noted)
    return samples


def losses(result: sft.Result) -> list[float]:
    """Return the loss of each step, those before the run included."""
    return [entry["loss"] for entry in result.history if "loss" in entry]


def test_the_rest_of_an_epoch_on_two_ranks_with_more_data_and_other_packs(  # noqa: PLR0917  # fixtures
    write, execute, start_ranks, served, capsys, tmp_path
):
    """
    What was trained in the epoch is not trained in it again; all else is, the new records too. The
    visits of both runs are those that were fetched, also after the second run was resumed and the
    first deleted. The weights are those of the first run.
    """
    fresh = execute(write("first", max_length=64, max_steps=4))
    before = Counter(served)
    first = tmp_path / "first" / "checkpoint-4"
    assert [before[n] for n in range(NUM_OLD)] == visits_in(first)[0].tolist() == visits_in(first)[1].tolist()
    alike = {"continue_from": str(tmp_path / "first"), "packing_algorithm": "ordered", "effective_batch_size": 4}

    second = write("second", "new", "old", max_steps=6, **alike)
    assert [0, 0] == finished(start_ranks(2, second, tmp_path / "out"))

    ranks = rank_main.seen(tmp_path / "out", 2)
    fetched = Counter(sample for one in ranks for pack in one["samples"] for sample in pack)
    old = {NUM_NEW + sample: times for sample, times in before.items()}
    assert not old.keys() & fetched.keys()
    assert set(range(NUM_NEW + NUM_OLD)) - old.keys() > fetched.keys()
    visits = Counter(old) + fetched
    found = visits_in(tmp_path / "second" / "checkpoint-6")
    assert [visits[n] for n in range(NUM_NEW + NUM_OLD)] == found[0].tolist() == found[1].tolist()
    loss = [entry["loss"] for entry in ranks[0]["history"] if "loss" in entry]
    assert losses(fresh) == loss[:4]
    assert max(loss[4:]) < 0.8 * loss[0]

    shutil.rmtree(tmp_path / "first")
    served.clear()
    third = write("second", "new", "old", resume_from_checkpoint="last", **alike)
    result = execute(third)

    visits += Counter(served)
    now = [visits[sample] for sample in range(NUM_NEW + NUM_OLD)]
    assert {2, 3} >= {*now}, "each sample once an epoch, and perhaps a repeated pack"
    assert now == visits_in(tmp_path / "second" / f"checkpoint-{result.num_steps}")[0].tolist()
    document = shown(capsys, third)["splits"]["train"]["visits"]
    assert result.num_steps == document["step"]
    assert np.bincount(now).tolist() == document["samples_by_visits"]
    by_source = [np.bincount(part).tolist() for part in (now[:NUM_NEW], now[NUM_NEW:])]
    assert by_source == [one["samples_by_visits"] for one in document["sources"]]
    assert now[0] == shown(capsys, third, "--sample", "0")["visits"]
    assert 0 == plan_command.main(["verify", str(third)])
    assert 0 == plan_command.main(["report", str(third), "-o", str(tmp_path / "page.html")])
    assert "samples trained" in (tmp_path / "page.html").read_text()


def test_the_next_epoch_then_a_mix_in_a_chain_of_runs(  # noqa: PLR0917  # fixtures
    write, execute, served, capsys, tmp_path, caplog
):
    """
    `next` begins with a whole epoch, and steps count on. A third run takes what the second one left
    of its epoch, now drawn by a mix, and its visits are those of all three.
    """
    execute(write("first", max_steps=3, max_length=64))
    visits = Counter(served)
    served.clear()
    second = write("second", continue_from=str(tmp_path / "first"), continue_epoch="next", max_steps=9)
    with caplog.at_level("INFO", logger="packplan"):
        result = execute(second)
    assert "of its 30 records, 30 are here and 0 are gone; 0 are new" in caplog.text
    assert (3, 1) == (result.schedule.start.step, result.schedule.start.epoch)
    in_epoch = Counter(served)
    assert len(in_epoch) < NUM_OLD, "the second run ends in the middle of the epoch"
    assert 1 == max(in_epoch.values())
    visits += in_epoch
    found = visits_in(tmp_path / "second" / "checkpoint-9")
    assert [[counts[n] for n in range(NUM_OLD)] for counts in (visits, in_epoch)] == found.tolist()

    mix = {"by": "samples", "sources": [
        {"jsonl": str(tmp_path / "old.jsonl"), "ratio": 1}, {"jsonl": str(tmp_path / "new.jsonl"), "ratio": 0.5},
    ]}  # fmt: skip
    (tmp_path / "mix.yaml").write_text(json.dumps(mix))
    custom = {"fusion_config": str(tmp_path / "mix.yaml"), "fusion_schedule": "planned", "train_jsonl": None}
    served.clear()
    third = write("third", custom=custom, continue_from=str(tmp_path / "second" / "checkpoint-9"))
    assert 0 == plan_command.main(["build", str(third)])
    carried = shown(capsys, third)["splits"]["train"]["visits"]
    assert (9, NUM_OLD + NUM_NEW) == (carried["step"], sum(carried["samples_by_visits"]))
    result = execute(third)

    (record,) = result.epochs
    here = Counter(served)
    assert not here.keys() & in_epoch.keys()
    sizes = [NUM_OLD, NUM_NEW]
    drawn = select(load_mixes(tmp_path / "mix.yaml"), [1] * sum(sizes), sizes, seed=42, epoch=1)
    assert [*here.keys() & {*range(NUM_OLD)}], "the mix draws what the second run left"
    assert sorted({*drawn.tolist()} - in_epoch.keys()) == sorted(here)
    assert record.num_samples == len(here) == here.total()
    visits += here
    found = visits_in(tmp_path / "third" / f"checkpoint-{result.num_steps}")
    assert [visits[n] for n in range(NUM_OLD + NUM_NEW)] == found[0].tolist()
    assert not found[1].any(), "the epoch is over"


def test_runs_that_cannot_be_continued_are_refused_by_key(write, execute, tmp_path):
    """
    Before anything is measured: another tuner, no checkpoint, copies that cannot be told apart,
    and an epoch of which nothing is left.
    """
    lines = (tmp_path / "old.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "twice.jsonl").write_text("".join(lines[:12] + lines[:12]))
    execute(write("first", "twice", max_steps=3))
    checkpoint = tmp_path / "first" / "checkpoint-3"
    total = visits_in(checkpoint)[0]
    assert np.any(total[:12] != total[12:])

    def refused(kind: type[Exception], match: str, *files: str, of: Path = checkpoint, **keys) -> None:
        path = write("second", *files, continue_from=str(of), **keys)
        with pytest.raises(kind, match=match):
            execute(path)
        shutil.rmtree(tmp_path / "second", ignore_errors=True)

    refused(ConfigError, "training.continue_from.*tuner_type is full, not lora", "twice", tuner_type="lora")
    refused(ConfigError, "training.continue_from.*no such folder", "twice", of=tmp_path / "nowhere")
    refused(StaleError, "was there 2 times, not each trained equally often, and is there 1 time now", "old")
    trained = [line for line, times in zip(lines, total[:12] + total[12:], strict=False) if times == 2]
    assert trained, "some record was trained in both of its copies"
    (tmp_path / "trained.jsonl").write_text("".join(trained))
    refused(PlanError, "has trained all .* of epoch 0", "trained")


def test_what_a_run_starts_from_is_read_once_and_again_where_it_changed(  # fixtures
    write, execute, tmp_path, caplog, monkeypatch
):
    """
    A run that was built goes on from the checkpoint that was then the newest. Other data, or the
    checkpoint written again, are read again; a resume of the changed run is refused.
    """
    execute(write("first", max_steps=3))
    second = write("second", continue_from=str(tmp_path / "first"), max_steps=5)
    assert 0 == plan_command.main(["build", str(second)])
    monkeypatch.setattr(logging.getLogger("packplan"), "propagate", True)  # which the command turned off
    execute(write("first", max_steps=4, resume_from_checkpoint="last"))
    with pytest.raises(ConfigError, match=r"training.continue_from.*tuner_type is full, not lora"):
        execute(write("second", continue_from=str(tmp_path / "first"), max_steps=5, tuner_type="lora"))
    write("second", continue_from=str(tmp_path / "first"), max_steps=5)

    assert 3 == execute(second).schedule.start.step

    execute(write("first", max_steps=3, seed=7))
    with caplog.at_level("INFO", logger="packplan"):
        assert 4 == execute(second).schedule.start.step
    assert "checkpoint-3 was written again" in caplog.text

    keys = {"continue_from": str(tmp_path / "first"), "resume_from_checkpoint": "last"}
    with caplog.at_level("INFO", logger="packplan"), pytest.raises(StaleError, match="plan: stored"):
        execute(write("second", "old", "new", **keys))
    assert "checkpoint-4 trained is read again: records" in caplog.text
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"training.continue_from.*no such folder"):
        execute(write("second", **keys))


def test_a_run_that_has_all_its_epochs_behind_it_trains_nothing(write, execute, tmp_path, caplog):
    """The log says which keys to raise."""
    execute(write("first", max_steps=2))
    keys = {"continue_from": str(tmp_path / "first"), "continue_epoch": "next", "num_train_epochs": 1}

    assert 2 == execute(write("second", **keys)).num_steps

    assert "nothing is left to train; raise training.num_train_epochs" in caplog.text
