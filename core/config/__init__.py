"""
The keys of a run's YAML as classes, the faults that keys have together, and advice on keys that are
none.
"""

from __future__ import annotations

from core.config.advice import closest, unknown_key
from core.config.faults import faults
from core.config.key_faults import REFUSED_TRAINING_KEYS
from core.config.rl import GrpoConfig
from core.config.rl_faults import rl_faults
from core.config.run import (
    CustomConfig,
    ModelConfig,
    PathText,
    RunConfig,
    TemplateConfig,
    TrainingConfig,
)

__all__ = [
    "REFUSED_TRAINING_KEYS",
    "CustomConfig",
    "GrpoConfig",
    "ModelConfig",
    "PathText",
    "RunConfig",
    "TemplateConfig",
    "TrainingConfig",
    "closest",
    "faults",
    "rl_faults",
    "unknown_key",
]
