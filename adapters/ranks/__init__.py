"""Ranks over torch.distributed that learn of each other's failures, and workers on them."""
