"""What packs cost to train, in FLOPs of the model's own layers."""

from __future__ import annotations

from core.work.model import VisionWork, WorkModel, causal_pairs

__all__ = ["VisionWork", "WorkModel", "causal_pairs"]
