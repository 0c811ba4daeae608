"""The rollout variant: packs that come as samples come, from data mixed anew each epoch, or answered by the model itself."""

from __future__ import annotations

import logging

import numpy as np

from adapters.packing_trainer import history, was_terminated
from adapters.rollouts import Order, Sampling
from app import wiring, wiring_light
from app.course import batch_of, forced_batches
from app.deadline import Deadline
from app.describe import describe
from app.functions import named_function
from app.materialise import open_mix
from app.planning import Knobs, plan_split, usable_folders
from core.config import RunConfig
from core.errors import DataSetError
from core.fusion import schedule
from core.lengths import IntArray
from core.ports import RankGroup
from core.rewards import REWARDS, Reward
from core.shuffling import shuffled

log = logging.getLogger(__name__)


def run(config: RunConfig, group: RankGroup) -> tuple[int, bool, list[dict[str, float]]]:
    """
    Train from a stream; return the optimizer steps, whether SIGTERM ended it, and what was logged.

    Raises:
        PackplanError: Something the user can mend.
    """
    training = config.training
    wiring.require_isolation(config, packed=config.training.packing)
    batch = batch_of(config, world_size=group.world_size)
    order, paths = _order(config)
    samples = wiring.open_samples(config, train_paths=paths)
    folders = [wiring_light.split_folder(training.output_dir, split) for split in samples if split == "eval"]
    deadline = Deadline(training.packing_wait_timeout_s)
    group.from_rank_zero(lambda _: usable_folders(folders), timeout_s=deadline.left_s())
    arguments = wiring.open_arguments(config, batch.size, batch.accumulation)
    planned = None
    if "eval" in samples:
        knobs = Knobs.of(config, "eval")
        planned = plan_split(
            "eval", knobs, source=samples["eval"], stores=wiring_light.open_stores(config, "eval"), group=group,
            flush_every=training.packing_length_cache_persist_every, deadline=deadline,
        )  # fmt: skip
        if group.rank == 0:
            for level, line in describe(planned, knobs, world_size=group.world_size):
                log.log(level, line)
    group.settle()
    trainer = wiring.build_stream_trainer(
        config, arguments, group=group, samples=samples, planned=planned, order=order, rollout=_rollout(config)
    )
    if group.rank == 0:
        for forced in forced_batches(config):
            log.warning("%s", forced)
        log.info(
            "%d optimizer steps of %d packs over %d ranks; packs come as samples come, so the steps of an epoch are not known",
            training.max_steps,
            batch.accumulation.realised,
            group.world_size,
        )
    trainer.train()
    totals = trainer.totals()
    if group.rank == 0:
        dropped = totals.counts.drops_more_than(training.packing_max_dropped_share)
        log.log(logging.WARNING if dropped else logging.INFO, "the stream has ended: %s", totals)
    steps, terminated = trainer.state.global_step, was_terminated(trainer)
    if terminated and group.rank == 0:
        log.warning("SIGTERM: saved the weights at step %d of %d; a stream starts anew", steps, training.max_steps)
    if steps < training.max_steps and not terminated:
        message = (
            f"training ended after {steps} of {training.max_steps} steps: an epoch had no whole step on all ranks; lower "
            "training.effective_batch_size or training.packing_min_fill_ratio, or add data"
        )
        raise DataSetError(message)
    return steps, terminated, [dict(entry) for entry in history(trainer)]


def _order(config: RunConfig) -> tuple[Order, tuple[str, ...]]:
    """Return the order of samples in an epoch, and the data files that its indices count through."""
    custom, seed = config.custom, config.training.seed
    if custom.fusion_config is None:
        total = len(wiring_light.open_records(custom.train_jsonl))
        return (lambda epoch: shuffled(total, seed=(seed, epoch))), custom.train_jsonl
    mix, records = open_mix(custom.fusion_config)
    sizes = [len(one) for one in records]
    firsts = np.cumsum([0, *sizes])

    def mixed(epoch: int) -> IntArray:
        drawn = schedule(mix, sizes, seed=seed, epoch=epoch)
        indices: IntArray = firsts[drawn.source] + drawn.index
        return indices

    return mixed, tuple(source.jsonl for source in mix.sources)


def _rollout(config: RunConfig) -> tuple[Reward, Sampling] | None:
    """Return how prompts are answered and answers scored, or None if the data are trained as they are."""
    custom = config.custom
    if custom.rollout_reward is None:
        return None
    sampling = Sampling(
        custom.rollout_completions, custom.rollout_keep, custom.rollout_max_new_tokens, custom.rollout_temperature
    )
    return named_function(custom.rollout_reward, REWARDS, key="custom.rollout_reward"), sampling
