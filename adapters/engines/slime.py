"""
slime: steps, ranks and microbatches of a rollout, by `core.shard` (`slime.utils.dp_schedule`).

Not run: the registry has no package of slime. It is written by the contract of
`build_dp_schedule`: all samples of a rollout are in one step, a step has `global_batch_size`
rollouts, trailing rollouts are left out, and a sample over the limit is alone.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from packplan.adapters.engines.hooks import replace
from packplan.core.errors import ArgumentError, counted
from packplan.core.shard import shard_packed
from packplan.core.work import WorkModel

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def install() -> None:
    """Let slime cut by `build_dp_schedule` of this module, in this process."""
    replace("slime.utils.dp_schedule", build_dp_schedule)


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
) -> Schedule:
    """
    Return the samples of each rank, their places in its microbatches, the microbatches of a rank in
    each step, and the rollouts of each step.

    Args:
        args: slime's arguments. `use_dynamic_batch_size` has to be set, with `max_tokens_per_gpu`;
            `balance_data` gives ranks equal work.
        train_parallel_config: `dp_size`, `cp_size`, `vpp_size` and
            `microbatch_group_size_per_vp_stage`.
        total_lengths: Tokens of each sample.
        global_batch_size: Rollouts of a step.
        rollout_indices: Rollout of each sample.

    Raises:
        ArgumentError: Microbatches have a fixed size or no limit, there is no whole step, or a step
            has fewer samples than microbatches. It names what an argument of slime changes.
    """
    if not args.use_dynamic_batch_size:
        raise ArgumentError("batch", "microbatches of a fixed size are slime's own: set --use-dynamic-batch-size")
    if not args.max_tokens_per_gpu:
        raise ArgumentError("batch", "microbatches have no limit of tokens: set --max-tokens-per-gpu")
    samples: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples.setdefault(rollout, []).append(sample)
    rollouts, num_steps = list(samples.values()), len(samples) // global_batch_size
    if not num_steps:
        fact = f"a step takes {counted(global_batch_size, 'rollout')}, but the batch has {len(rollouts):,}"
        raise ArgumentError("batch", f"{fact}: lower --global-batch-size")
    steps = [rollouts[number * global_batch_size :][:global_batch_size] for number in range(num_steps)]
    order = [sample for step in steps for rollout in step for sample in rollout]
    config = train_parallel_config
    sizes = {"hidden_size": getattr(args, "hidden_size", None), "num_hidden_layers": getattr(args, "num_layers", None)}
    try:
        sharding = shard_packed(
            [total_lengths[sample] for sample in order],
            shards=config["dp_size"],
            batch_size=[sum(map(len, step)) for step in steps],
            max_tokens_per_microbatch=args.max_tokens_per_gpu * config["cp_size"],
            microbatch_multiple=config["microbatch_group_size_per_vp_stage"] if config["vpp_size"] > 1 else 1,
            assignment="balanced" if args.balance_data else "round_robin",
            work=WorkModel.estimated(sizes),
            when_long="alone",
            when_short="error",
        )
    except ArgumentError as error:
        if "wanted" not in error.details:
            raise
        fact = f"a step has {counted(error.details['num'], 'sample')}, but its ranks need {error.details['wanted']:,} "
        raise ArgumentError("batch", f"{fact}microbatches: raise --global-batch-size") from error
    partitions, places = [], []
    for worker in sharding:
        held = [members for batch in worker for members in batch.microbatches]
        starts = [0]
        for members in held:
            starts.append(starts[-1] + len(members))
        partitions.append([order[index] for members in held for index in members])
        places.append([list(range(start, stop)) for start, stop in pairwise(starts)])
    return partitions, places, list(sharding.num_microbatches), [global_batch_size] * num_steps
