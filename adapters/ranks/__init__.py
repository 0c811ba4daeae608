"""Ranks over torch.distributed that notice each other's failures, and workers on ranks or Ray."""
