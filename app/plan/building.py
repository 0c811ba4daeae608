"""
Samples -> lengths and plans, as training would make them, by one process or by all ranks together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from packplan.app.planning.bad import ReasonCounts
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.log_lines import log_plan
from packplan.app.planning.measure import failures
from packplan.app.planning.measure_slices import measure_slices
from packplan.app.planning.schedule import warn_of_ignored
from packplan.app.planning.split import GatheredSplit, plan_split, require_writable
from packplan.app.wiring.stores import open_slice, remove_slices
from packplan.core.config import RunConfig
from packplan.core.errors import DataSetError, counted
from packplan.core.ports import RankGroup

log = logging.getLogger(__name__)

MOST_LISTED = 100
"""Failures that are printed one by one, and reasons that they are counted by, at most."""

WriteFailure = Callable[[Mapping[str, str]], None]
"""Function that takes a failure: its split, its place and its reason."""


def build(
    config: RunConfig, group: RankGroup, *, splits: Sequence[GatheredSplit], world_size: int | None = None
) -> None:
    """
    Measure and plan as training would.

    Args:
        config: The run.
        group: The ranks that measure.
        splits: Splits to build.
        world_size: Ranks to align for; None takes those that measure.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    if group.rank == 0:
        warn_of_ignored(config)
    deadline = Deadline(config.training.packing_wait_timeout_s)
    require_writable(splits, group=group, deadline=deadline)
    for split in splits:
        # One process counts how many records are bad, and stops at too many.
        if group.world_size > 1 and split.max_bad_share is None:
            measure_slices(
                split, partial(open_slice, config, split.name),
                group=group, flush_every=split.flush_every, deadline=deadline,
            )  # fmt: skip
        planned = plan_split(split, group=group, deadline=deadline, world_size=world_size)
        if group.rank == 0:
            remove_slices(config, split.name)
            log_plan(planned, split.policy)


def list_failures(
    splits: Sequence[GatheredSplit],
    *,
    as_json: bool = False,
    write_good: Callable[[list[int]], None] | None = None,
    open_file: Callable[[], AbstractContextManager[WriteFailure | None]] = nullcontext,
) -> None:
    """
    Print the first records that cannot become a sample, and count all by reason.

    Args:
        splits: Splits to look through.
        as_json: Print one JSON document instead of lines.
        write_good: Takes the other records of the only split.
        open_file: Opens what takes all failures.

    Raises:
        DataSetError: There is one.
    """
    reasons, first = ReasonCounts(), []
    with open_file() as write:
        for split in splits:
            bad = np.zeros(len(split.source), dtype=bool)
            for index, error in failures(split.name, split.source):
                bad[index] = True
                failure = {"split": split.name, "where": error.where, "reason": error.why}
                if write is not None:
                    write(failure)
                if reasons.total < MOST_LISTED:
                    first.append(failure)
                    if not as_json:
                        print(error)
                reasons.add(error.reason)
            if write_good is not None:
                write_good(np.flatnonzero(~bad).tolist())
        found, total = reasons.total, sum(len(split.source) for split in splits)
        by_reason = reasons.most_common(MOST_LISTED)
    if as_json:
        document = {"records": total, "num_failures": found, "failures": first, "reasons": by_reason}
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif found > MOST_LISTED:
        print(f"… and {found - MOST_LISTED:,} more; all by reason, without what each record says:")
        print("\n".join(f"{count:>12,}  {reason}" for reason, count in by_reason.items()))
    if found:
        named = "what is named above" if found <= MOST_LISTED else "them (--write-failures FILE names all)"
        message = f"{found:,} of {counted(total, 'record')} cannot become samples: fix or remove {named}"
        raise DataSetError(message)
    log.info("all records can become samples")
