"""
verl: microbatches of a rank's batch, by `core.shard` (`verl.utils.seqlen_balancing`).

Run against verl 0.9.1. Its own function packs by work and then counts up the microbatches until all
keep the limit; this one keeps it at once, in as few microbatches as the packer needs.
"""

import sys
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from packplan.core.errors import ArgumentError, counted
from packplan.core.shard import Sharding, shard_packed


def install() -> None:
    """
    Let verl cut by `rearrange_micro_batches` of this module, in this process; also where another
    module of verl has imported its own by name.
    """
    original = import_module("verl.utils.seqlen_balancing").rearrange_micro_batches
    for name, module in list(sys.modules.items()):
        if name.startswith("verl.") and getattr(module, "rearrange_micro_batches", None) is original:
            vars(module)["rearrange_micro_batches"] = rearrange_micro_batches


def rearrange_micro_batches(  # noqa: PLR0917  # verl's own arguments, by place
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,  # noqa: FBT001, FBT002
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,  # noqa: FBT001, FBT002
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """
    Split the batch of a rank; return its microbatches, and the rows of each.

    Args:
        batch: TensorDict with `attention_mask` (batch, width), or `input_ids` as a nested tensor.
        max_token_len: Tokens of a microbatch.
        dp_group: Ranks that agree on the number of microbatches; None for this one alone.
        num_batches_divided_by: Divisor of the number of microbatches.
        same_micro_num_in_dp: Whether the ranks of *dp_group* agree.
        min_num_micro_batch: Fewest microbatches.
        use_dynamic_bsz_balance: Whether microbatches come in the order of their work, lighter ones
            at both ends.
        force_group_size: Neighbouring rows that stay in one microbatch.

    Raises:
        ArgumentError: On all ranks, if one has no rows, or rows that do not fit: over the limit
            together, which it names, or too few for the number of microbatches.
    """
    from verl.utils.seqlen_balancing import calculate_workload  # an engine, not a dependency
    from verl.utils.tensordict_utils import index_select_tensor_dict

    tokens = _lengths(batch)
    synced = dp_group if same_micro_num_in_dp and dist.is_initialized() else None
    fault = _fault(tokens, force_group_size, max_token_len)
    # Ranks raise together, or the others would wait for one in a collective.
    if _largest(int(fault is not None), synced):
        raise ArgumentError("batch", fault or "another rank has rows that do not fit a microbatch, and names them")
    lengths, works = (of.view(-1, force_group_size).sum(1).numpy() for of in (tokens, calculate_workload(tokens)))
    # Rows without a token take no room: at this scale all of them together are less than a token.
    scale = 1 + int((lengths == 0).sum())

    def cut(least: int) -> Sharding:
        return shard_packed(
            np.maximum(lengths * scale, 1),
            shards=1,
            batch_size=lengths.size,
            max_tokens_per_microbatch=max_token_len * scale + scale - 1,
            microbatch_multiple=num_batches_divided_by or 1,
            min_microbatches=least,
            work=works,
        )

    sharding = cut(min_num_micro_batch or 1)
    agreed = _largest(sharding.num_microbatches[0], synced)
    fewest = -_largest(-lengths.size, synced)
    if agreed > fewest:
        fact = f"ranks need {agreed:,} microbatches each, but one has {counted(fewest, 'unit')} of {force_group_size:,}"
        raise ArgumentError("batch", f"{fact} rows that stay together: give more rows to a step")
    if agreed > sharding.num_microbatches[0]:
        sharding = cut(agreed)
    order = list(range(agreed))
    if use_dynamic_bsz_balance:
        falling = np.argsort(-sharding.works, kind="stable").tolist()
        order = [*falling[::2][::-1], *falling[1::2]]
    held = [
        [item * force_group_size + row for item in sharding.slots[number] for row in range(force_group_size)]
        for number in order
    ]
    return [index_select_tensor_dict(batch, rows) for rows in held], held


def _lengths(batch: Any) -> torch.Tensor:
    """Return the tokens of each row; int64, shape (batch,), on the CPU."""
    ids = batch["input_ids"]
    lengths: torch.Tensor = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    return lengths.long().cpu()


def _largest(number: int, group: dist.ProcessGroup | None) -> int:
    """Return the largest number of the ranks of a group, or of this one alone."""
    if group is None:
        return number
    from verl.utils.device import get_device_name

    of_all = torch.tensor([number], device=get_device_name())
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group)
    return int(of_all.item())


def _fault(tokens: torch.Tensor, group_size: int, limit: int) -> str | None:
    """
    Return why rows give no microbatches; None if they do.

    Args:
        tokens: Tokens of each row, shape (batch,).
        group_size: Neighbouring rows that stay together.
        limit: Tokens of a microbatch.
    """
    if not len(tokens) or len(tokens) % group_size:
        return f"{counted(len(tokens), 'row')} cannot be cut into units of {group_size:,} (force_group_size)"
    widest, unit = tokens.view(-1, group_size).sum(1).max(0)
    if widest <= limit:
        return None
    first = int(unit) * group_size
    rows = f"row {first:,} has" if group_size == 1 else f"rows {first:,} to {first + group_size - 1:,} together have"
    return f"{rows} {int(widest):,} tokens, but a microbatch holds {limit:,} (max_token_len)"
