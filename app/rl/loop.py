"""
Reinforcement learning step by step: rollouts, rewards, advantages, log-probabilities, update; each
in sharded microbatches.

Every rank of torchrun runs this, or one driver of Ray actors: `core.ports.Workers` is all it knows
of them (ADR 0024).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from packplan.adapters.losses import normalisers
from packplan.adapters.microbatches import BatchedData
from packplan.adapters.progress import progress
from packplan.adapters.workers.media import MEDIA, MEDIA_WORK, media_of
from packplan.app.planning.split import table_works
from packplan.app.rl.checkpoints import Checkpoints, is_first_rank
from packplan.app.wiring.stores import open_policy_folder
from packplan.app.wiring.works import trained_work
from packplan.core.config import GrpoConfig, RunConfig
from packplan.core.errors import ConfigError, RecordError, counted
from packplan.core.ports import Arrays, Workers
from packplan.core.rl import assign_prompts, batch_advantages, generalised_advantages, group_advantages, standardised
from packplan.core.samples import Table, to_row
from packplan.core.shard import Sharding, batch_metrics, pooled, shard_dynamic, shard_packed, shard_plain
from packplan.core.shuffling import shuffled
from packplan.core.work import WorkModel

if TYPE_CHECKING:
    from packplan.adapters.samples.encoder import SwiftEncoder

log = logging.getLogger(__name__)


_OVER_CHUNKS: Mapping[str, Callable[[list[float]], float]] = {"_min": min, "_max": max}
"""Reduction of metrics with these endings over a step's updates; others are averaged."""


def run(config: RunConfig, workers: Workers, samples: SwiftEncoder) -> list[dict[str, Any]]:
    """
    Train a policy; return what was logged of each step.

    Args:
        config: The run.
        workers: They hold the policy.
        samples: The prompts, with their records' own answers.

    Raises:
        PackplanError: Something the user can fix; RunError, if a worker dies.
    """
    shards = workers.num_workers // config.policy.ranks_per_shard
    is_first = is_first_rank()
    folder = open_policy_folder(config)
    prompts, measured = _encoded_prompts(config, samples, shown=is_first)
    work, estimated = trained_work(config)
    media_work = table_works(work, measured).images
    if estimated and is_first:
        log.warning("work counts tokens and squares of lengths, for %s", estimated)
    checkpoints = Checkpoints.from_run(config, workers, samples, prompts)
    first = checkpoints.resume() if config.training.resume_from_checkpoint else 0
    history: list[dict[str, Any]] = []
    warned = not config.policy.dynamic_batching.enabled
    started = time.perf_counter()
    steps = zip(range(config.grpo.num_steps), _drawn(config, len(prompts)), strict=False)
    for step, drawn in islice(steps, first, None):
        figures: dict[str, Any] = {"step": step + 1}
        if config.grpo.engine_command and (not history or not step % (1 + config.grpo.max_staleness)):
            begun = time.perf_counter()
            run_on_all(workers, "update_engine", [str(folder.engine(step))] * shards, config, version=step)
            if is_first:
                folder.remove_engines(but=step)
            figures["engine_s"] = time.perf_counter() - begun
        asked = _asked(samples, prompts, media_work, drawn)
        figures |= _step(config, workers, asked, work, shards=shards, step=step, is_first_step=step == first)
        history.append(figures)
        if is_first:
            left_s = (time.perf_counter() - started) / (step + 1 - first) * (config.grpo.num_steps - step - 1)
            folder.append(_finite(history[-1]))
            _log(history[-1], num_steps=config.grpo.num_steps, left_s=left_s)
            warned = warned or _warn_of_rounding(config, history[-1]["train"])
        checkpoints.save(step + 1)
    run_on_all(workers, "save", [str(folder.policy)] * shards, config)
    if is_first:
        folder.remove_engines()
        log.info("the policy is in %s, what was logged in %s", folder.policy, folder.log)
    return history


def cut(
    config: RunConfig,
    lengths: NDArray[np.int64],
    *,
    work: WorkModel,
    shards: int,
    batch_size: int | None = None,
    media_work: NDArray[np.float64] | None = None,
    training: bool,
) -> Sharding:
    """
    Cut a batch into microbatches as `policy.` says.

    Args:
        config: The run.
        lengths: Tokens of each sequence.
        work: Work model of a sequence.
        shards: Data-parallel workers.
        batch_size: Sequences of an optimizer step; None: all.
        media_work: FLOPs of each sequence's images and videos; None: there are none.
        training: Whether gradients are computed, or log-probabilities alone.
    """
    policy = config.policy
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    workers: dict[str, Any] = {
        "shards": shards, "batch_size": batch_size or len(lengths), "work": work, "media_work": media_work,
    }  # fmt: skip

    def of_phase(train: int, logprob: int | None) -> int:
        return train if training or logprob is None else logprob

    if packing.enabled:
        return shard_packed(
            lengths,
            **workers,
            max_tokens_per_microbatch=of_phase(packing.train_mb_tokens, packing.logprob_mb_tokens),
            sequence_length_pad_multiple=packing.sequence_length_round,
            algorithm=packing.algorithm,
            assignment=packing.assignment,
            microbatch_order=packing.microbatch_order,
            row_width=packing.row_width,
            seed=config.training.seed,
            # Workers sum their gradients once, after the global batch; with FSDP, in each.
            meeting="step" if policy.sharding == "none" else "microbatch",
        )
    if dynamic.enabled:
        return shard_dynamic(
            lengths,
            **workers,
            max_tokens_per_microbatch=of_phase(dynamic.train_mb_tokens, dynamic.logprob_mb_tokens),
            sequence_length_round=dynamic.sequence_length_round,
        )
    size = of_phase(policy.train_micro_batch_size, policy.logprob_batch_size)
    return shard_plain(lengths, **workers, micro_batch_size=size, allow_uneven=True)


def _warn_of_rounding(config: RunConfig, figures: Mapping[str, float]) -> bool:
    """Warn if dynamic batching computes more than padding would; return whether it does."""
    if figures["computed_share"] <= 1:
        return False
    log.warning(
        "dynamic batching computes %s positions, but padding every answer to the longest %s: lower "
        "policy.dynamic_batching.sequence_length_round (%d), to which widths are rounded up",
        f"{figures['computed_tokens']:,.0f}", f"{figures['computed_tokens'] / figures['computed_share']:,.0f}",
        config.policy.dynamic_batching.sequence_length_round,
    )  # fmt: skip
    return True


def run_on_all(workers: Workers, method: str, shards: list[Any], config: RunConfig, **options: Any) -> list[Arrays]:
    """
    Call a method on all workers, those that share rows or layers with the same shard; return one
    result for each shard.

    Args:
        workers: They hold the policy.
        method: Name of the method; it takes a shard and the options.
        shards: One for each group of workers that share rows or layers.
        config: The run; it says how many workers do.
        options: Options that all workers share.
    """
    size = config.policy.ranks_per_shard
    held = [shard for shard in shards for _ in range(size)]
    return workers.run_all_workers_sharded_data(method, held, **options)[::size]


def _step(
    config: RunConfig,
    workers: Workers,
    asked: BatchedData,
    work: WorkModel,
    *,
    shards: int,
    step: int,
    is_first_step: bool,
) -> dict[str, Any]:
    """Answer prompts, learn from the answers, and return the step's figures."""
    started = time.perf_counter()
    batch, rewards, figures = _roll_out(config, workers, asked, shards=shards, step=step)
    answered = time.perf_counter()
    lengths = batch.lengths.numpy()
    batch_size = config.policy.train_global_batch_size or len(batch)
    cut_into = partial(cut, config, lengths, work=work, media_work=batch.tensor(MEDIA_WORK).numpy(), shards=shards)
    logprob = cut_into(training=False)
    fields = {f"old_{name}": field for name, field in _predicted(config, workers, batch, logprob).items()}
    fields["engine_log_probabilities"] = _drawn_with(
        batch, fields["old_log_probabilities"], needed=is_first_step and config.grpo.importance_correction != "none"
    )
    if config.grpo.kl_coefficient:
        of_reference = _predicted(config, workers, batch, logprob, of_reference=True)
        fields["reference_log_probabilities"] = of_reference["log_probabilities"]
    values = fields["old_values"].numpy() if "old_values" in fields else None
    batch = batch.with_fields(**fields, **_advantages(config.grpo, rewards, batch.tensor("token_mask"), values))
    scored = time.perf_counter()
    sharding = cut_into(batch_size=batch_size, training=True)
    counts = [
        normalisers(batch.tensor("token_mask")[start : start + batch_size])
        for start in range(0, len(batch), batch_size)
    ]
    trained = run_on_all(
        workers, "train", batch.shard(sharding), config,
        num_sequences=[sequences for sequences, _ in counts], num_tokens=[tokens for _, tokens in counts],
    )[0]  # fmt: skip
    ended = time.perf_counter()
    return {
        "reward": float(rewards.mean()),
        "reward_deviation": float(rewards.std()),
        "answer_tokens": float(batch.tensor("token_mask").sum() / len(batch)),
        **figures,
        **{name: _OVER_CHUNKS.get(name[-4:], fmean)(values.tolist()) for name, values in trained.items()},
        "train": _figures(sharding),
        "logprob": _figures(logprob),
        "generate_s": answered - started,
        "logprob_s": scored - answered,
        "train_s": ended - scored,
    }


def _encoded_prompts(config: RunConfig, samples: SwiftEncoder, *, shown: bool) -> tuple[list[list[int]], Table]:
    """
    Return the tokens of all prompts, and their measurements; RecordError if one leaves no room for
    an answer, or cannot be encoded.
    """
    room = config.packing_length - config.grpo.max_new_tokens
    prompts: list[list[int]] = []
    rows = []
    indices = range(len(samples))
    for index in progress(indices, desc="prompts", leave=False) if shown else indices:
        encoded = samples.prompt(index)
        media_of(encoded)  # refused here, and not in a later step
        prompts.append(list(encoded["input_ids"]))
        rows.append(to_row(samples.measured(index, {**encoded, "labels": []})))
        if len(prompts[-1]) > room:
            reason = (
                f"the prompt has {counted(len(prompts[-1]), 'token')}, and an answer may have "
                f"{config.grpo.max_new_tokens:,} "
                f"(grpo.max_new_tokens), but a sequence holds {config.packing_length:,} (template.max_length): raise "
                "that, or leave the record out"
            )
            raise RecordError(str(samples.records.where(index)), reason)
    return prompts, np.array(rows, dtype=np.int32)


def _drawn(config: RunConfig, num_prompts: int) -> Iterator[NDArray[np.int64]]:
    """
    Yield the prompts of each step, in another order each epoch; what an epoch leaves over comes
    first in the next.
    """
    size, epoch = config.grpo.num_prompts_per_step, 0
    waiting = np.zeros(0, dtype=np.int64)
    while True:
        while waiting.size < size:
            waiting = np.concatenate([waiting, shuffled(num_prompts, seed=[config.training.seed, epoch])])
            epoch += 1
        yield waiting[:size]
        waiting = waiting[size:]


def _asked(
    samples: SwiftEncoder, prompts: Sequence[Sequence[int]], media_work: NDArray[np.float64], drawn: NDArray[np.int64]
) -> BatchedData:
    """Return the drawn prompts as a batch, with their media and their records' own answers."""
    indices = drawn.tolist()
    fields: dict[str, Any] = {
        "input_ids": _padded([prompts[index] for index in indices]),
        "answers": [samples.answer(index) for index in indices],
        "records": [str(samples.records.where(index)) for index in indices],
        "prompts": torch.tensor(indices),
        # An epoch may end within a step, and a prompt come twice.
        "repeats": torch.tensor([indices[:place].count(index) for place, index in enumerate(indices)]),
        MEDIA_WORK: torch.as_tensor(media_work[drawn]),
    }
    if samples.sees_images:
        # Encoded again: the pixels of all prompts together may exceed the memory.
        fields[MEDIA] = [media_of(samples.prompt(index)) for index in indices]
    return BatchedData.from_fields(fields, lengths=[len(prompts[index]) for index in indices])


def _roll_out(
    config: RunConfig, workers: Workers, asked: BatchedData, *, shards: int, step: int
) -> tuple[BatchedData, NDArray[np.float64], dict[str, Any]]:
    """
    Answer prompts on the workers; return prompts with answers, their rewards, and figures to log.

    The answers to one prompt are next to each other; `token_mask` is 1 on an answer. Rewards have
    the shape (num_answers,).
    """
    # Records' own answers foretell the length of others; a token has about four characters.
    expected = asked.lengths.numpy() + [len(str(answer)) // 4 for answer in asked["answers"]]
    assigned = assign_prompts(expected, shards=shards)
    asked_in_turn = asked.select(torch.from_numpy(assigned))
    sharding = shard_plain(
        asked_in_turn.lengths.numpy(), shards=shards, batch_size=len(asked),
        micro_batch_size=config.policy.generation_batch_size, allow_uneven=True,
    )  # fmt: skip
    results = run_on_all(
        workers, "generate", asked_in_turn.shard(sharding), config, seed=config.training.seed, step=step
    )
    back = sharding.restore[assigned.argsort()]
    found = {name: np.concatenate([result[name] for result in results])[back] for name in results[0]}
    rows: dict[str, list[list[float]]] = {"input_ids": [], "token_mask": [], "engine_log_probabilities": []}
    for place, number in np.ndindex(found["completion_lengths"].shape):
        length, end = int(asked.lengths[place]), int(found["completion_lengths"][place, number])
        tokens, logs = (found[name][place, number, :end] for name in ("completions", "engine_log_probabilities"))
        rows["input_ids"].append(asked.tensor("input_ids")[place, :length].tolist() + tokens.tolist())
        rows["token_mask"].append([0.0] * length + [1.0] * end)
        rows["engine_log_probabilities"].append([0.0] * length + logs.tolist())
    followed = asked.select(torch.arange(len(asked)).repeat_interleave(config.grpo.num_generations_per_prompt))
    fields: dict[str, Any] = {name: _padded(lists) for name, lists in rows.items()}
    fields |= {name: followed[name] for name in (MEDIA, MEDIA_WORK) if name in asked}
    batch = BatchedData.from_fields(fields, lengths=[len(row) for row in rows["input_ids"]])
    lag = step - found["versions"]
    if lag.max() > config.grpo.max_staleness:
        reason = f"is {config.grpo.max_staleness}, but the engine's weights are {lag.max()} steps old"
        raise ConfigError.at("grpo.max_staleness", reason)
    figures = {"stale_answers": int((lag > 0).sum()), "lag_max": int(lag.max()),
               "reencoded_answers": int((~found["exact"]).sum())}  # fmt: skip
    return batch, found["rewards"].ravel(), figures


def _padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _predicted(
    config: RunConfig, workers: Workers, batch: BatchedData, sharding: Sharding, **options: bool
) -> dict[str, torch.Tensor]:
    """
    Return every token's log-probability, and its value if the policy has a value head, in the order
    of the batch; shape of `input_ids`.
    """
    results = run_on_all(workers, "log_probabilities", batch.shard(sharding), config, **options)
    return {
        name: torch.as_tensor(np.concatenate([result[name] for result in results])[sharding.restore])
        for name in results[0]
    }


def _drawn_with(batch: BatchedData, old: torch.Tensor, *, needed: bool) -> torch.Tensor:
    """
    Return the log-probability that each token was drawn with: the policy's where the engine gives
    none. ConfigError if they are needed and it gives none at all.
    """
    drawn = batch.tensor("engine_log_probabilities")
    if needed and drawn[batch.tensor("token_mask") > 0].isnan().all():
        reason = "needs the probabilities of draws, but the engine gives none: set it to none"
        raise ConfigError.at("grpo.importance_correction", reason)
    return torch.where(drawn.isnan(), old, drawn)


def _advantages(
    grpo: GrpoConfig, rewards: NDArray[np.float64], token_mask: torch.Tensor, values: NDArray[np.float32] | None
) -> dict[str, torch.Tensor]:
    """Return the advantages of answers, or of their tokens with the returns that values learn."""
    found: dict[str, NDArray[np.float64]] = {}
    if values is not None:
        mask = token_mask.numpy() > 0
        found["advantages"], found["returns"] = generalised_advantages(
            rewards, values.astype(np.float64), mask, discount=grpo.discount, trace_decay=grpo.gae_lambda
        )
        if grpo.scale_rewards:
            found["advantages"] = standardised(found["advantages"], mask)
    elif grpo.baseline == "batch":
        found["advantages"] = batch_advantages(rewards, scale=grpo.scale_rewards)
    else:
        found["advantages"] = group_advantages(
            rewards, group_size=grpo.num_generations_per_prompt, scale=grpo.scale_rewards,
            leave_one_out=grpo.baseline == "leave_one_out",
        )  # fmt: skip
    return {name: torch.as_tensor(field, dtype=torch.float32) for name, field in found.items()}


def _figures(sharding: Sharding) -> dict[str, Any]:
    """
    Return the figures of a phase: pooled over its global batches, by global batch, and by
    microbatch.
    """
    global_batches = batch_metrics(sharding)
    together = pooled(global_batches)
    return {
        **together.logs(),
        "imbalances": together.imbalances,
        "chunks": [dict(batch.logs()) for batch in global_batches],
    }


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures of a step for JSON: those that are no number as null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in entry.items()
    }


def _log(entry: Mapping[str, Any], *, num_steps: int, left_s: float) -> None:
    """Log the most telling of a step's figures, and the time left."""
    trained = entry["train"]
    log.info(
        "step %d/%d, %.0f s left: reward %.3f, loss %+.4f, %.1f tokens an answer; computed %.0f %% of what padding "
        "would, "
        "utilisation %.3f, work imbalance %.3f, of microbatches %.3f",
        entry["step"], num_steps, left_s, entry["reward"], entry["loss"], entry["answer_tokens"],
        100 * trained["computed_share"], trained["utilisation"], trained["work_imbalance"],
        trained["microbatch_imbalance"],
    )  # fmt: skip
