"""RL engines of others that cut their batches by `core.shard`: one hook each, a module by name."""
