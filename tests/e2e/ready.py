"""Helpers of tests that measure records, plan them, or train them in this process."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packplan.app.planning.split import MeasuredSplit
from packplan.app.sft import train as way
from packplan.core.errors import RecordError
from packplan.core.ports import LengthSource
from packplan.core.samples.tables import RecordOutcome

IS_CI = "FOUR_RANKS" in os.environ

IN_CI = pytest.mark.skipif(not IS_CI, reason="runs in .ci/run alone, which has the time")
"""Mark of other numbers of ranks, and of more families."""


def prepare(*arguments: Any, **options: Any) -> Any:
    """Return a run that is ready to train."""
    return _facts(*way.prepare(*arguments, **options))


def train(*arguments: Any) -> Any:
    """Return a run that has trained."""
    return _facts(*way.train(*arguments))


def measured(source: LengthSource) -> list[RecordOutcome]:
    """Return the outcome of each record by the shortcut: that of a full encode, also if refused."""
    quick, full = (list(source.measure_many(range(len(source)), in_full=in_full)) for in_full in (False, True))
    refused = {place for place, one in enumerate(quick) if isinstance(one, RecordError)}
    assert refused == {place for place, one in enumerate(full) if isinstance(one, RecordError)}
    assert all(place in refused or one == full[place] for place, one in enumerate(quick))
    for place in refused:
        with pytest.raises(RecordError):
            source.measure_in_full(place)
    return quick


def chats(count: int, first: int = 0) -> list[dict[str, str]]:
    """Return records of several lengths."""
    return [{"query": f"say {n}", "response": "blue circle " * (1 + n % 7)} for n in range(first, first + count)]


def logged_losses(history: Sequence[dict[str, float]], *others: str) -> list[float]:
    """Return the loss of each step of a log, and other values of it."""
    return [entry[key] for entry in history for key in ("loss", *others) if key in entry]


def artefacts_of(run: Path) -> dict[str, bytes]:
    """Return every file that a run's planning left, but its locks."""
    folder = run / "static_packing"
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_refused(outcomes: Sequence[RecordOutcome], says: Iterable[str]) -> None:
    """Check that each record is refused by its line, with its words among few others."""
    for number, (outcome, words) in enumerate(zip(outcomes, says, strict=True), start=1):
        assert isinstance(outcome, RecordError)
        assert f"data.jsonl, line {number}: " in str(outcome)
        assert words in str(outcome)
        assert len(str(outcome)) < 600


def _facts(trainer: Any, splits: dict[str, MeasuredSplit]) -> Any:
    epochs, samples = splits["train"].epochs, {name: split.encoder for name, split in splits.items()}
    return SimpleNamespace(
        trainer=trainer, planned=splits, samples=samples, schedule=trainer.schedule,
        num_steps=trainer.state.global_step, history=list(trainer.state.log_history), terminated=trainer.was_terminated,
        epochs=() if epochs is None else epochs.records,
    )  # fmt: skip
