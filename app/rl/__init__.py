"""`packplan rl`: reinforcement learning in sharded microbatches."""
