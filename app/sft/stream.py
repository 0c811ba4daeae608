"""
The rollout variant: packs that come as samples come, from data mixed again each epoch, or answered
by the model itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import numpy as np

from packplan.app.planning.deadline import Deadline
from packplan.app.planning.log_lines import log_plan
from packplan.app.planning.schedule import batch_of, forced_batches
from packplan.app.planning.split import plan_split, require_agreement, require_writable
from packplan.app.sft.outcome import interruption_logged, log_outcome
from packplan.app.wiring.functions import named_function
from packplan.app.wiring.gather import gather
from packplan.app.wiring.inputs import records_cache
from packplan.app.wiring.mixes import open_mix
from packplan.app.wiring.stores import records_of
from packplan.app.wiring.training import alone_in_output, build_stream_trainer, decide_attention, open_arguments
from packplan.core.config import LESS_DROPPED, RunConfig
from packplan.core.errors import DataSetError, counted
from packplan.core.lengths import IntArray
from packplan.core.ports import RankGroup
from packplan.core.rl import REWARDS, Reward, Sampling
from packplan.core.shuffling import shuffled
from packplan.core.stream import Order, schedule

if TYPE_CHECKING:
    from packplan.adapters.trainer.stream import StreamTrainer

log = logging.getLogger(__name__)


def run(config: RunConfig, group: RankGroup) -> tuple[int, bool, list[dict[str, float]]]:
    """
    Train from a stream; return the optimizer steps, whether SIGTERM ended it, and what was logged.

    Raises:
        PackplanError: Something the user can fix.
    """
    trainer = _prepare(config, group)
    with alone_in_output(config, group), interruption_logged(trainer):
        trainer.train()
    steps, terminated = trainer.state.global_step, trainer.was_terminated
    _log_end(config, group, trainer)
    if steps < config.training.max_steps and not terminated:
        message = (
            f"training ended after {steps} of {counted(config.training.max_steps, 'step')}: an epoch had no whole step "
            "on all ranks; lower "
            "training.effective_batch_size or training.packing_min_fill_ratio, or add data"
        )
        raise DataSetError(message)
    if not terminated:
        log_outcome(config, trainer)
    return steps, terminated, [dict(entry) for entry in trainer.history]


def _prepare(config: RunConfig, group: RankGroup) -> StreamTrainer:
    """Decide the attention, plan the evaluation, and build the trainer."""
    training = config.training
    attention = decide_attention(config, isolated=training.packing)
    batch = batch_of(config, world_size=group.world_size)
    order, paths = _order(config)
    gathered = gather(attrs.evolve(config, custom=attrs.evolve(config.custom, train_jsonl=paths)))
    evaluated = gathered.splits.get("eval")
    deadline = Deadline(training.packing_wait_timeout_s)
    require_writable(() if evaluated is None else (evaluated,), group=group, deadline=deadline)
    if group.world_size > 1:
        train = gathered.splits["train"].source
        require_agreement(group, "what the train samples depend on", train.fingerprint().digest)
        require_agreement(group, "the train data", train.data_digest(len(train)))
    arguments = open_arguments(config, batch.size, batch.accumulation)
    planned = None
    if evaluated is not None:
        planned = plan_split(evaluated, group=group, deadline=deadline)
        if group.rank == 0:
            log_plan(planned, evaluated.policy)
    group.settle()
    trainer = build_stream_trainer(
        config,
        arguments,
        attention=attention,
        group=group,
        samples=gathered.samples,
        planned=planned,
        order=order,
        rollout=_rollout(config),
    )
    if group.rank == 0:
        for forced in forced_batches(config):
            log.warning("%s", forced)
        log.info(
            "%s of %s over %s; packs come as samples come, so the steps of an epoch are not known",
            counted(training.max_steps, "optimizer step"),
            counted(batch.accumulation.effective_batch_size, "pack"),
            counted(group.world_size, "rank"),
        )
    return trainer


def _log_end(config: RunConfig, group: RankGroup, trainer: StreamTrainer) -> None:
    """
    Log on rank 0 what became of the samples; every rank calls this, since their numbers are added.
    """
    totals = trainer.totals()
    if group.rank != 0:
        return
    training = config.training
    if totals.counts.drops_more_than(training.packing_max_dropped_share):
        log.warning("the stream has ended: %s. %s", totals, LESS_DROPPED)
    else:
        log.info("the stream has ended: %s", totals)
    if trainer.was_terminated:
        steps = trainer.state.global_step
        log.warning("SIGTERM: saved the weights at step %d of %d; a stream starts again", steps, training.max_steps)


def _order(config: RunConfig) -> tuple[Order, tuple[str, ...]]:
    """
    Return the order of samples in an epoch, and the data files that its indices count through.
    """
    custom, seed = config.custom, config.training.seed
    if custom.fusion_config is None:
        total = len(records_of(config, "train"))
        return (lambda epoch: shuffled(total, seed=(seed, epoch))), custom.train_jsonl
    mix, records = open_mix(custom.fusion_config, cache=records_cache(config))
    sizes = [len(one) for one in records]
    firsts = np.cumsum([0, *sizes])

    def mixed(epoch: int) -> IntArray:
        drawn = schedule(mix, sizes, seed=seed, epoch=epoch)
        indices: IntArray = firsts[drawn.source] + drawn.index
        return indices

    return mixed, tuple(source.jsonl for source in mix.sources)


def _rollout(config: RunConfig) -> tuple[Reward, Sampling] | None:
    """
    Return the reward and the sampling of answers, or None if the data are trained as they are.
    """
    custom = config.custom
    if custom.rollout_reward is None:
        return None
    sampling = Sampling(
        custom.rollout_completions, custom.rollout_keep, custom.rollout_max_new_tokens, custom.rollout_temperature
    )
    return named_function(custom.rollout_reward, REWARDS, key="custom.rollout_reward"), sampling
