"""RL batches cut into microbatches for data-parallel workers, with metrics of the cost."""

from packplan.core.shard.inputs import sequence_dims
from packplan.core.shard.metrics import batch_metrics, pooled
from packplan.core.shard.packed import shard_packed
from packplan.core.shard.padded import shard_dynamic, shard_plain
from packplan.core.shard.sharding import Mode, ShardBatch, Sharding
