"""
Samples -> lengths and plans, as training would make them, by one process or by all ranks together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from app.planning.log_lines import log_plan
from app.planning.measure import failures
from app.planning.measure_slices import measure_slices
from app.planning.split import GatheredSplit, Planner
from app.training.schedule import warn_of_ignored
from app.wiring.stores import open_slice, remove_slices
from core.config import RunConfig
from core.errors import DataSetError, counted
from core.ports import RankGroup

log = logging.getLogger(__name__)


def build(
    config: RunConfig, group: RankGroup, *, splits: Sequence[GatheredSplit], world_size: int | None = None
) -> None:
    """
    Measure and plan as training would.

    Args:
        config: The run.

        group: The ranks that measure.

        splits: What is to be built.

        world_size: Ranks to align for; None takes those that measure.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    if group.rank == 0:
        warn_of_ignored(config)
    planner = Planner.of(config, group)
    planner.require_writable(splits)
    for split in splits:
        if group.world_size > 1:
            measure_slices(
                split, partial(open_slice, config, split.name),
                group=group, flush_every=planner.flush_every, deadline=planner.deadline,
            )  # fmt: skip
        planned = planner.plan(split, world_size=world_size)
        if group.rank == 0:
            remove_slices(config, split.name)
            log_plan(planned, split.policy)


def list_failures(splits: Sequence[GatheredSplit]) -> None:
    """Print every record that cannot become a sample; DataSetError if there is one."""
    found = 0
    for split in splits:
        for error in failures(split.name, split.source):
            print(error)
            found += 1
    if found:
        total = sum(len(split.source) for split in splits)
        message = f"{found:,} of {counted(total, 'record')} cannot become samples: fix or remove what is named above"
        raise DataSetError(message)
    log.info("all records can become samples")
