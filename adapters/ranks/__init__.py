"""Ranks over torch.distributed that notice each other's failures; workers on ranks or on Ray."""
