"""RL engines of others that cut their batches by `core.shard`, each by one hook."""
