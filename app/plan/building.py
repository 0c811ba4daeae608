"""
Samples -> lengths and plans, as training would make them, by one process or by all ranks together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from app.planning.deadline import Deadline
from app.planning.log_lines import describe
from app.planning.measure import failures
from app.planning.measure_slices import measure_slices
from app.planning.split import Alignment, plan_split, usable_folders
from app.training.schedule import warn_of_ignored
from app.training.works import policy_of
from app.wiring.stores import open_slice, open_stores, remove_slices, split_folder
from core.config import RunConfig
from core.errors import DataSetError, counted
from core.ports import LengthSource, RankGroup

log = logging.getLogger(__name__)


def build(
    config: RunConfig, group: RankGroup, *, samples: Mapping[str, LengthSource], world_size: int | None = None
) -> None:
    """
    Measure and plan as training would.

    Args:
        config: The run.

        group: The ranks that measure.

        samples: Of each split that is to be built.

        world_size: Ranks to align for; None takes those that measure.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    if group.rank == 0:
        warn_of_ignored(config)
    training = config.training
    deadline = Deadline(training.packing_wait_timeout_s)
    folders = [split_folder(training.output_dir, split) for split in samples]
    group.from_rank_zero(lambda _: usable_folders(folders), **deadline.wait())
    for split, source in samples.items():
        stores, policy = open_stores(config, split), policy_of(config, split)
        flush_every = training.packing_length_cache_persist_every
        if group.world_size > 1:
            measure_slices(
                split, source, stores.lengths, stores.lock, partial(open_slice, config, split),
                group=group, flush_every=flush_every, deadline=deadline,
            )  # fmt: skip
        planned = plan_split(
            split, policy, alignment=Alignment.of(config, split), source=source, stores=stores, group=group,
            flush_every=flush_every, deadline=deadline, world_size=world_size,
        )  # fmt: skip
        if group.rank == 0:
            remove_slices(config, split)
            for level, line in describe(planned, policy):
                log.log(level, line)


def list_failures(samples: Mapping[str, LengthSource]) -> None:
    """Print every record that cannot become a sample; DataSetError if there is one."""
    found = 0
    for split, source in samples.items():
        for error in failures(split, source):
            print(error)
            found += 1
    if found:
        message = (
            f"{found:,} of {counted(sum(map(len, samples.values())), 'record')} cannot become samples: fix or "
            "remove what is named above"
        )
        raise DataSetError(message)
    log.info("all records can become samples")
