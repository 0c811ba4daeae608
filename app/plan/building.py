"""
Samples -> lengths and plans, as training would make them, by one process or by all ranks together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial

from packplan.app.planning.log_lines import log_plan
from packplan.app.planning.measure import failures
from packplan.app.planning.measure_slices import measure_slices
from packplan.app.planning.split import GatheredSplit, Planner
from packplan.app.training.schedule import warn_of_ignored
from packplan.app.wiring.stores import open_slice, remove_slices
from packplan.core.config import RunConfig
from packplan.core.errors import DataSetError, counted
from packplan.core.ports import RankGroup

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
        # Which records are left out decides which samples the ranks would share.
        if group.world_size > 1 and split.max_bad_share is None:
            measure_slices(
                split, partial(open_slice, config, split.name),
                group=group, flush_every=planner.flush_every, deadline=planner.deadline,
            )  # fmt: skip
        planned = planner.plan(split, world_size=world_size)
        if group.rank == 0:
            remove_slices(config, split.name)
            log_plan(planned, split.policy)


def list_failures(
    splits: Sequence[GatheredSplit], *, as_json: bool = False, write_good: Callable[[list[int]], None] | None = None
) -> None:
    """
    Print every record that cannot become a sample.

    Args:
        splits: What is looked through.

        as_json: Print one JSON document instead of lines.

        write_good: Takes the other records of the only split.

    Raises:
        DataSetError: There is one.
    """
    found, documents = 0, []
    for split in splits:
        bad: set[int] = set()
        for index, error in failures(split.name, split.source):
            documents.append({"split": split.name, "where": error.where, "reason": error.why})
            bad.add(index)
            if not as_json:
                print(error)
        found += len(bad)
        if write_good is not None:
            write_good([index for index in range(len(split.source)) if index not in bad])
    if as_json:
        total = sum(len(split.source) for split in splits)
        print(json.dumps({"records": total, "failures": documents}, indent=2, ensure_ascii=False))
    if found:
        total = sum(len(split.source) for split in splits)
        message = f"{found:,} of {counted(total, 'record')} cannot become samples: fix or remove what is named above"
        raise DataSetError(message)
    log.info("all records can become samples")
