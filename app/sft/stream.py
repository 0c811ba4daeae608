"""
The trainer variant `rollout`: packs are made during training, while a stream of samples is read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from packplan.app.opening.policies import require_mixes
from packplan.app.opening.ranks import hold_output_lock
from packplan.app.opening.splits import open_splits
from packplan.app.opening.trainers import (
    build_stream_trainer,
    find_stream_start,
    identity_of_run,
    match_checkpoint,
    open_arguments,
    open_checkpoint,
    warn_of_overwriting,
)
from packplan.app.opening.verdicts import decide_attention
from packplan.app.planning.log_lines import attention_row, describe_evaluation, plan_warnings
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.schedule import accumulation_of, forced_batch_lines
from packplan.app.planning.split import PlannedSplit
from packplan.app.sft.train import log_nothing_left, log_outcome, log_termination, logging_interruption
from packplan.core.config.identity import stream_inputs
from packplan.core.config.remedies import DROP_LESS_REMEDY
from packplan.core.config.run import RunConfig
from packplan.core.equality import AttentionChoice
from packplan.core.errors import Difference, RecordError, counted
from packplan.core.fingerprint import Fingerprint, Value
from packplan.core.inspection import format_table
from packplan.core.mixes import draw_in_order
from packplan.core.ports import RankGroup
from packplan.core.samples.tables import DataFile, source_sizes
from packplan.core.shuffling import seeded_permutation
from packplan.core.stream import PACKER_VERSION, RULES_VERSION, Order, StreamProgress, StreamState

if TYPE_CHECKING:
    from packplan.adapters.trainer.streams.trainer import StreamTrainer

log = logging.getLogger(__name__)


def train_stream(config: RunConfig, trainer: StreamTrainer) -> None:
    """
    Train from a stream, with the trainer that `prepare_stream` builds.

    Raises:
        PackplanError: A setting, the data or the model is refused.
    """
    with hold_output_lock(config, trainer.group), logging_interruption(trainer):
        trainer.train()
    _log_end(config, trainer.group, trainer)
    if not trainer.was_terminated:
        log_outcome(config, trainer)


def prepare_stream(config: RunConfig, group: RankGroup) -> StreamTrainer:
    """Choose the attention, find the checkpoint, plan the evaluation, and build the trainer."""
    training = config.training
    warn_of_overwriting(training, group)
    checkpoint = open_checkpoint(config, group, StreamState)
    attention = decide_attention(config, isolated=training.packing)
    splits = open_splits(config)
    order = _make_order(config, splits["train"].encoder.data_files())
    ranks = Ranks(group, timeout_s=training.packing_wait_timeout_s)
    train = splits["train"].source
    for first in splits["train"].encoder.records.first_indices:  # each file's first record is compared with ms-swift
        with suppress(RecordError):
            train.measure_in_full(first)
    inputs, data = train.fingerprint(), train.data_digest(len(train))
    ranks.require_same("the inputs of the train samples", inputs.digest)
    ranks.require_same("the train data", data)
    versions: dict[str, Value] = {"binpacking": PACKER_VERSION, "the rules of packing": RULES_VERSION}
    fixed = {**inputs.inputs, "the train data": data, **stream_inputs(config), **versions}

    identity = identity_of_run(config)

    def resume_state(progress: StreamProgress) -> StreamState:
        order_digest = hashlib.sha256(order(progress.epoch).tobytes()).hexdigest()
        return StreamState(Fingerprint({**fixed, "the order of the epoch": order_digest}), progress, identity)

    def differences(then: StreamState) -> tuple[Difference, ...]:
        return then.differences(resume_state(then.progress))

    if checkpoint is not None:
        checkpoint = match_checkpoint(config, group, checkpoint, differences)
    arguments = open_arguments(config, world_size=group.world_size)
    evaluation = measure_and_plan(splits["eval"], ranks) if "eval" in splits else None
    group.stop_heartbeat()
    arguments.resume_from_checkpoint = checkpoint and checkpoint.folder
    start = find_stream_start(checkpoint, group, arguments)
    trainer = build_stream_trainer(
        config, arguments, splits["train"], evaluation, attention=attention, group=group, order=order, start=start,
        resume_state=resume_state,
    )  # fmt: skip
    if group.rank == 0:
        _log_stream(config, len(train), evaluation, group.world_size, attention)
        _log_start(config, start[0])
    return trainer


def _log_stream(
    config: RunConfig, num_records: int, evaluation: PlannedSplit | None, world_size: int, attention: AttentionChoice
) -> None:
    """Log the table of a stream's run, and its warnings."""
    batch = accumulation_of(config, world_size=world_size).effective_batch_size
    rows = {
        "data": f"{counted(num_records, 'record')}, packed during training",
        "packs": f"of {counted(config.packing_length, 'token')}, in the order of samples; steps of an epoch unknown",
        "training": f"{_run_length_text(config)}; {counted(batch, 'pack')} a step, on {counted(world_size, 'rank')}",
        **({} if evaluation is None else {"eval": describe_evaluation(evaluation)}),
        **attention_row(attention),
    }
    log.info("%s", format_table(config.source, rows))
    for line in plan_warnings(evaluation) if evaluation is not None else ():
        log.warning("eval: %s", line)
    for line in forced_batch_lines(config):
        log.warning("%s", line)


def _log_start(config: RunConfig, progress: StreamProgress) -> None:
    """
    Log the progress from which a resumed stream starts; log nothing if the stream starts from the
    beginning.
    """
    training = config.training
    if not progress.step:
        return
    is_done = progress.epoch >= training.num_train_epochs
    if progress.step >= training.max_steps if training.max_steps > 0 else is_done:
        log_nothing_left(progress.step, f"after {_run_length_text(config)}")
        return
    log.info("resuming after optimizer step %d, in epoch %d", progress.step, progress.epoch)
    if progress.segments:
        log.info("the epoch began on other ranks or loader workers: its remaining samples are assigned again, in order")


def _run_length_text(config: RunConfig) -> str:
    """
    Return the length of a run as text: its number of steps if known, else its number of epochs.
    """
    training = config.training
    if training.max_steps > 0:
        return counted(training.max_steps, "optimizer step")
    return counted(int(training.num_train_epochs), "epoch")


def _log_end(config: RunConfig, group: RankGroup, trainer: StreamTrainer) -> None:
    """
    Log the numbers of trained, dropped and skipped samples, summed over ranks. Every rank has to
    call this function.
    """
    totals = trainer.totals()
    if group.rank != 0:
        return
    training = config.training
    if totals.counts.dropped_more_than(training.packing_max_dropped_share):
        log.warning("the stream has ended: %s. %s", totals, DROP_LESS_REMEDY)
    else:
        log.info("the stream has ended: %s", totals)
    if trainer.was_terminated:
        log_termination(trainer, f"a run of {_run_length_text(config)}")


def _make_order(config: RunConfig, files: Sequence[DataFile]) -> Order:
    """Return the function that gives an epoch's order of samples, as indices over all *files*."""
    trainer = config.training.trainer
    seed, sizes = trainer.get("data_seed", config.training.seed), [size for _, size in source_sizes(files)]
    if config.custom.fusion_config is not None:
        mixes = require_mixes(config, files)
        return lambda epoch: draw_in_order(mixes, sizes, seed=seed, epoch=epoch)
    total = sum(sizes)
    if not trainer.get("train_dataloader_shuffle", True):
        return lambda _: np.arange(total)
    return lambda epoch: seeded_permutation(total, seed=(seed, epoch))
