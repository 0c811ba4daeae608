"""Ranks over torch.distributed, which notice each other's failures, and workers on the ranks."""
