"""
The keys of a run's YAML as classes, the faults that keys have together, advice on keys that are
none, and which of them all ranks share.
"""

from __future__ import annotations

from packplan.core.config.advice import closest, unknown_key
from packplan.core.config.faults import faults
from packplan.core.config.key_faults import REFUSED_TRAINING_KEYS
from packplan.core.config.planning import configured_inputs, plan_policy
from packplan.core.config.ranks import OWN, PATHS, flat_values, rank_differences, run_values
from packplan.core.config.rl import GrpoConfig
from packplan.core.config.rl_faults import rl_faults
from packplan.core.config.run import (
    CustomConfig,
    ModelConfig,
    PathText,
    RunConfig,
    TemplateConfig,
    TrainingConfig,
)

__all__ = [
    "OWN",
    "PATHS",
    "REFUSED_TRAINING_KEYS",
    "CustomConfig",
    "GrpoConfig",
    "ModelConfig",
    "PathText",
    "RunConfig",
    "TemplateConfig",
    "TrainingConfig",
    "closest",
    "configured_inputs",
    "faults",
    "flat_values",
    "plan_policy",
    "rank_differences",
    "rl_faults",
    "run_values",
    "unknown_key",
]
