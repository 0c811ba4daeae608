"""Ranks over torch.distributed that learn of each other's failures."""
