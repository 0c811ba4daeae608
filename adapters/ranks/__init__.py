"""Ranks over torch.distributed, which know of each other's failures."""
