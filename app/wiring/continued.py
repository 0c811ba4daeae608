"""Runs that continue another one: visits of its samples are read, kept, and left out of plans."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import attrs
import numpy as np

from packplan.adapters.trainer.checkpoints import (
    Checkpoint,
    find_checkpoint,
    find_continued,
    read_resume_state,
    read_visits,
    state_digest,
)
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.split import require_agreement
from packplan.app.wiring.gather import Gathered
from packplan.app.wiring.stores import continued_key, open_continuation
from packplan.core.config import RunConfig
from packplan.core.epochs import EpochRecipe
from packplan.core.errors import ConfigError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.ports import Arrays, RankGroup, ReportProgress
from packplan.core.schedule import Continuation, RecordIds, ResumeState, Visits, carry_over

log = logging.getLogger(__name__)

CONTINUE_KEY = "training.continue_from"
"""Key that names the other run."""


@attrs.frozen
class Continued:
    """A run that continues another one, or none."""

    gathered: Gathered
    """Samples and inputs of planning, whose recipe leaves out what the other run trained."""

    start: Continuation | None = None
    checkpoint: Checkpoint[ResumeState] | None = None
    """Checkpoint of the other run, where training starts from it."""


def continue_run(
    config: RunConfig, gathered: Gathered, *, group: RankGroup, deadline: Deadline, starts: bool
) -> Continued:
    """
    Return a run as it continues `training.continue_from`; every rank calls this.

    What the other run trained is read from its checkpoint once and kept in this run's folder. It is
    read again where the records or the keys of this run changed, or where training starts from a
    checkpoint that was written again.

    Args:
        config: The run.
        gathered: Samples and inputs of planning.
        group: All ranks.
        deadline: Limit of the wait for rank 0.
        starts: Whether training starts from the other run's checkpoint.

    Raises:
        ConfigError: There is no such checkpoint, or this run cannot go on with it.
        StaleError: Copies of a record cannot be told apart.
    """
    if config.training.continue_from is None:
        return Continued(gathered)
    split, ids = gathered.splits["train"], cache(gathered.samples["train"].records.ids)
    kept = open_continuation(config)

    # Rank 0 alone reads the records; that all ranks have the same is compared when they plan.
    @cache
    def key() -> Fingerprint:
        return continued_key(config, records=hashlib.sha256(ids().data).hexdigest())

    def stored(report: ReportProgress) -> Arrays:
        report("reading the records of train")
        key()
        with split.stores.lock.held(**deadline.wait(), report=lambda _: None):
            found, differences = kept.load(key())
        if found is not None and differences:
            log.info("what %s trained is read again: %s", found.checkpoint, "; ".join(map(str, differences)))
        return {} if found is None or differences else _to_arrays(found)

    def keep(begun: Continuation) -> None:
        with split.stores.lock.held(**deadline.wait(), report=lambda _: None):
            kept.save(key(), begun)

    folder = None
    start = _from_arrays(group.from_rank_zero(stored, **deadline.wait()))
    if start is not None and starts:
        folder = find_checkpoint(start.checkpoint, "", group=group, key=CONTINUE_KEY)
        _require_tuner(config, folder)
        if group.any(state_digest(folder) != start.state):
            log.info("%s was written again, so what it trained is read again", folder)
            start = folder = None
    if start is None:
        folder = find_continued(config.training.continue_from, group=group)
        start = _begin(config, folder, ids, keep=keep, group=group, deadline=deadline)
    recipe = EpochRecipe.continuing(split.recipe, start)
    splits = {**gathered.splits, "train": attrs.evolve(split, recipe=recipe)}
    checkpoint = Checkpoint.read(folder, ResumeState) if starts and folder is not None else None
    return Continued(attrs.evolve(gathered, splits=splits), start, checkpoint)


def _begin(
    config: RunConfig,
    folder: Path,
    ids: Callable[[], RecordIds],
    *,
    keep: Callable[[Continuation], None],
    group: RankGroup,
    deadline: Deadline,
) -> Continuation:
    """Read what another run trained up to a checkpoint, keep it, and return it."""
    _require_tuner(config, folder)
    require_agreement(group, "the checkpoint that is continued", state_digest(folder))
    state = read_resume_state(folder, ResumeState)

    def build(_: ReportProgress) -> Arrays:
        found = read_visits(folder)
        if found is None:
            reason = f"is {folder}, which does not hold how often each sample was trained: an earlier version wrote it"
            raise ConfigError.at(CONTINUE_KEY, f"{reason}; to start from its weights alone, set model.model to it")
        visits, before = found
        carried, num_found = carry_over(visits, before=before, now=ids())
        epoch = state.progress.epoch
        if config.training.continue_epoch == "next":
            carried, epoch = carried.in_next_epoch(), epoch + 1
        start = Continuation(
            checkpoint=str(folder.resolve()),
            state=state_digest(folder),
            step=state.progress.step,
            epoch=epoch,
            visits=carried,
            num_found=num_found,
            num_gone=before.size - num_found,
            num_new=carried.total.size - num_found,
        )
        keep(start)
        return _to_arrays(start)

    start = _from_arrays(group.from_rank_zero(build, **deadline.wait()))
    assert start is not None  # noqa: S101  # it was built
    if group.rank == 0:
        log.info(
            "%s is continued at optimizer step %d, in epoch %d: of its %s, %d are here and %d are gone; %d are new",
            folder,
            start.step,
            start.epoch,
            counted(start.num_found + start.num_gone, "record"),
            start.num_found,
            start.num_gone,
            start.num_new,
        )
    return start


def _require_tuner(config: RunConfig, folder: Path) -> None:
    """Refuse a checkpoint of other trained weights; ConfigError by key."""
    wanted, found = config.training.tuner_type, read_resume_state(folder, ResumeState).tuner
    if found != wanted:
        reason = f"is {folder}, whose training.tuner_type is {found}, not {wanted}: set that"
        raise ConfigError.at(CONTINUE_KEY, reason)


def _to_arrays(start: Continuation) -> Arrays:
    facts = attrs.asdict(start, filter=lambda field, _: field.name != "visits")
    text = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    return {"facts": text, "total": start.visits.total, "epoch": start.visits.epoch}


def _from_arrays(arrays: Arrays) -> Continuation | None:
    if not arrays:
        return None
    facts = json.loads(arrays["facts"].tobytes())
    return Continuation(**facts, visits=Visits(arrays["total"], arrays["epoch"]))
