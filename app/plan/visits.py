"""How often the samples of a run were trained so far, as `show` and the report tell it."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.app.wiring import stores
from packplan.core.config import RunConfig
from packplan.core.ports import StoredLengths
from packplan.core.samples import by_source
from packplan.core.schedule import Visits

_TOLD = 4
"""Numbers of visits that a line tells one by one."""


@attrs.frozen(eq=False)
class SourceVisits:
    """Samples of a source by their visits."""

    name: str

    samples_by_visits: tuple[int, ...]
    """Number of samples with 0, 1, 2, … visits."""


@attrs.frozen(eq=False)
class VisitsView:
    """Visits of the samples of a run, those of the runs before it included."""

    checkpoint: str
    """Folder of the checkpoint that holds them."""

    step: int
    """Optimizer steps of the training up to it."""

    records: NDArray[np.int32]
    """Visits of each record; shape (num_records,)."""

    samples_by_visits: tuple[int, ...]
    """Number of samples with 0, 1, 2, … visits."""

    sources: tuple[SourceVisits, ...]


def view_visits(config: RunConfig, lengths: StoredLengths) -> VisitsView | None:
    """
    Return the visits up to the newest whole checkpoint of a run, or to that of the run which it
    continues; None if nothing was trained, or other data.

    Args:
        config: The run.
        lengths: Stored lengths of `train`.

    Raises:
        CorruptArtefactError: The visits are damaged.
    """
    found = stores.trained_visits(config, data_digest=lengths.origin.data_digest)
    if found is None:
        return None
    checkpoint, step, visits = found
    return _view(checkpoint, step, visits, lengths)


def _view(checkpoint: str, step: int, visits: Visits, lengths: StoredLengths) -> VisitsView | None:
    total, sampled = visits.total, lengths.tokens > 0
    if total.size != sampled.size:
        return None
    sources, first = [], 0
    for name, size in by_source(lengths.origin.files):
        here = slice(first, first + size)
        sources.append(SourceVisits(name, _histogram(total[here][sampled[here]])))
        first += size
    return VisitsView(checkpoint, step, total, _histogram(total[sampled]), tuple(sources))


def _histogram(visits: NDArray[np.int32]) -> tuple[int, ...]:
    return tuple(np.bincount(visits, minlength=1).tolist())


def told_visits(samples_by_visits: tuple[int, ...]) -> str:
    """
    Return in words how many samples were visited how often.

    >>> told_visits((3, 1200, 0, 1))
    'never 3, once 1,200, 3 times 1'
    """
    names = {0: "never", 1: "once", 2: "twice"}
    held = [(times, number) for times, number in enumerate(samples_by_visits) if number]
    told = [f"{names.get(times, f'{times:,} times')} {number:,}" for times, number in held[:_TOLD]]
    if more := sum(number for _, number in held[_TOLD:]):
        told.append(f"more often {more:,}")
    return ", ".join(told) or "none"
