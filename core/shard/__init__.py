"""RL batches cut into microbatches for data-parallel workers, with metrics of the cost."""

from __future__ import annotations

from packplan.core.shard.metrics import batch_metrics, pooled
from packplan.core.shard.modes import Mode, ShardBatch, Sharding, shard_dynamic, shard_packed, shard_plain

__all__ = ["Mode", "ShardBatch", "Sharding", "batch_metrics", "pooled", "shard_dynamic", "shard_packed", "shard_plain"]
