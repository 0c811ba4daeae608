"""
Decisions about packs: pure functions and frozen values, free of disk, clock, chance, log and torch.
"""
