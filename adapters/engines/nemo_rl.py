"""
NeMo-RL: bins of a global batch, by `core.shard` (`nemo_rl.data.packing`).

Not run: the registry has no package of NeMo-RL. It is written by the contract of
`BatchedDataDict.shard_by_batch_size`: worker r of W takes the bins r, r + W, r + 2W, … and
`bin_count_multiple` is W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from packplan.adapters.engines.hooks import replace
from packplan.core.errors import ArgumentError
from packplan.core.shard import shard_packed


def install() -> None:
    """Let NeMo-RL cut by `get_packer` of this module, in this process alone."""
    replace("nemo_rl.data.packing.algorithms", get_packer)


def get_packer(
    algorithm: Any,
    bin_capacity: int,
    collect_metrics: bool = False,  # noqa: FBT001, FBT002  # NeMo-RL's own arguments, by place
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> BalancedPacker:
    """
    Return a packer whose bins give each worker equal work.

    Args:
        algorithm: Name of an algorithm, or a member of NeMo-RL's enumeration.
        bin_capacity: Tokens of a bin.
        collect_metrics: Not supported.
        min_bin_count: Fewest bins.
        bin_count_multiple: Workers that share the bins in turn.

    Raises:
        ArgumentError: Metrics are asked for.
    """
    if collect_metrics:
        raise ArgumentError("batch", "this packer collects no metrics: see packplan.core.shard.batch_metrics")
    name = str(getattr(algorithm, "value", algorithm)).lower()
    return BalancedPacker(name, bin_capacity, min_bin_count or 1, bin_count_multiple or 1)


@attrs.frozen
class BalancedPacker:
    """Packer of NeMo-RL's kind."""

    algorithm: str
    bin_capacity: int
    min_bin_count: int
    bin_count_multiple: int

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """
        Return the sequences of each bin; ArgumentError, a ValueError, for a sequence over the
        capacity or fewer sequences than bins.
        """
        workers = self.bin_count_multiple
        sharding = shard_packed(
            list(sequence_lengths),
            shards=workers,
            batch_size=len(sequence_lengths),
            max_tokens_per_microbatch=self.bin_capacity,
            algorithm=self.algorithm,
            min_microbatches=-(-self.min_bin_count // workers),
            when_short="error",
        )
        rounds = len(sharding.slots) // workers
        return [sharding.slots[worker * rounds + number] for number in range(rounds) for worker in range(workers)]
