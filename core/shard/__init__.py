"""Cutting RL batches into microbatches for data-parallel workers."""

from packplan.core.shard.inputs import sequence_dims
from packplan.core.shard.microbatches import shard_dynamic, shard_packed
from packplan.core.shard.sharding import Mode, ShardBatch, Sharding
