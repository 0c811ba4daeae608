"""Batches of reinforcement learning, and the workers that compute them."""

from __future__ import annotations

import attrs

from packplan.core.errors.base import ArgumentError, UserError
from packplan.core.errors.words import counted


@attrs.define(eq=False)
class OverBudgetError(ArgumentError):
    """A sequence of an RL batch is wider than a microbatch may be."""

    index: int
    length: int
    padded: int
    max_tokens: int
    num_over: int
    widest: int

    def _text(self) -> str:
        rounded = f", {self.padded:,} when padded," if self.padded != self.length else ""
        others = f"; {counted(self.num_over, 'sequence')} are too wide" if self.num_over > 1 else ""
        return (
            f"sequence {self.index} has {counted(self.length, 'token')}{rounded} but a microbatch holds "
            f"{self.max_tokens:,} "
            f"(max_tokens_per_microbatch){others}: raise train_mb_tokens and logprob_mb_tokens to at least "
            f"{self.widest:,}"
        )


@attrs.define(eq=False)
class UnevenShardsError(ArgumentError):
    """The workers do not divide an RL batch."""

    num_sequences: int
    num_shards: int

    def _text(self) -> str:
        return (
            f"{counted(self.num_sequences, 'sequence')} of a batch cannot be divided evenly over "
            f"{counted(self.num_shards, 'worker')}: make "
            "the batch a multiple of the workers, allow uneven shards, or use packing or dynamic batching, which "
            "fill up"
        )


@attrs.define(eq=False)
class BatchError(ArgumentError):
    """A batch in memory is none, or does not fit what it is to be used with."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class WholeBatchLossError(ArgumentError):
    """A loss compares sequences that packing and dynamic batching compute apart."""

    loss: str

    def _text(self) -> str:
        return (
            f"the loss {self.loss} compares sequences with each other, so it needs the whole batch at once; sequence "
            "packing and dynamic batching compute it part by part. Set policy.sequence_packing.enabled: false and "
            "policy.dynamic_batching.enabled: false, or, if its parts add up, give it needs_whole_batch = False"
        )


@attrs.define(eq=False)
class WorkerError(UserError):
    """A worker of reinforcement learning raised or died."""

    worker: int
    method: str
    reason: str

    def _text(self) -> str:
        return f"worker {self.worker} failed in {self.method}: {self.reason}"
