"""Ranks over torch.distributed that detect each other's failures; workers on ranks or on Ray."""
