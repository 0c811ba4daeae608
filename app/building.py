"""Samples -> lengths and plans, as training would make them, by one process or by all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from app import wiring_light
from app.course import warn_of_ignored
from app.deadline import Deadline
from app.describe import describe
from app.measuring import failures
from app.planning import Knobs, plan_split, usable_folders
from app.slices import measure_slices
from core.config import RunConfig
from core.errors import DataSetError
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
        PackplanError: Something the user can mend, or something stored that is damaged.
    """
    if group.rank == 0:
        warn_of_ignored(config)
    training = config.training
    deadline = Deadline(training.packing_wait_timeout_s)
    folders = [wiring_light.split_folder(training.output_dir, split) for split in samples]
    group.from_rank_zero(lambda _: usable_folders(folders), timeout_s=deadline.left_s())
    for split, source in samples.items():
        stores, knobs = wiring_light.open_stores(config, split), Knobs.of(config, split)
        flush_every = training.packing_length_cache_persist_every
        if group.world_size > 1:
            open_slice = partial(wiring_light.open_slice, config, split)
            measure_slices(
                split, source, stores.lengths, stores.lock, open_slice,
                group=group, flush_every=flush_every, deadline=deadline,
            )  # fmt: skip
        planned = plan_split(
            split, knobs, source=source, stores=stores, group=group,
            flush_every=flush_every, deadline=deadline, world_size=world_size,
        )  # fmt: skip
        if group.rank == 0:
            wiring_light.remove_slices(config, split)
            for level, line in describe(planned, knobs, world_size=world_size or group.world_size):
                log.log(level, line)


def list_failures(samples: Mapping[str, LengthSource]) -> None:
    """Print every record that cannot become a sample; DataSetError if there is one."""
    found = 0
    for split, source in samples.items():
        for error in failures(split, source):
            print(error)
            found += 1
    if found:
        message = f"{found:,} of {sum(map(len, samples.values())):,} records cannot become samples: mend or remove them"
        raise DataSetError(message)
    log.info("all records can become samples")
