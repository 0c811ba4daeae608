"""Runs that are ready to train, or have trained, as tests ask them."""

from types import SimpleNamespace
from typing import Any

from packplan.app.planning.split import Split
from packplan.app.sft import train as way


def prepare(*arguments: Any, **options: Any) -> Any:
    """Return a run that is ready to train."""
    return _facts(*way.prepare(*arguments, **options))


def train(*arguments: Any) -> Any:
    """Return a run that has trained."""
    return _facts(*way.train(*arguments))


def _facts(trainer: Any, splits: dict[str, Split]) -> Any:
    epochs, samples = splits["train"].epochs, {name: split.encoder for name, split in splits.items()}
    return SimpleNamespace(
        trainer=trainer, planned=splits, samples=samples, schedule=trainer.schedule,
        num_steps=trainer.state.global_step, history=list(trainer.state.log_history), terminated=trainer.was_terminated,
        epochs=() if epochs is None else epochs.records,
    )  # fmt: skip
