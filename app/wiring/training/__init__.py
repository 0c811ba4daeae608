"""
Constructs most adapters that need ms-swift or torch; `app.wiring.stores` constructs the others.
"""

from __future__ import annotations

from packplan.app.wiring.stores import read_config
from packplan.app.wiring.training.policies import open_policy, open_workers
from packplan.app.wiring.training.ranks import alone_in_output, joined_ranks, local_ranks
from packplan.app.wiring.training.samples import open_measurer, open_samples
from packplan.app.wiring.training.trainers import (
    build_stream_trainer,
    build_trainer,
    keep_in_step,
    open_arguments,
    open_checkpoint,
    open_comparison,
    without_progress,
)
from packplan.app.wiring.training.verdicts import (
    ask_before_measuring,
    decide_attention,
    model_type_of,
    verdict_of,
)

__all__ = [
    "alone_in_output",
    "ask_before_measuring",
    "build_stream_trainer",
    "build_trainer",
    "decide_attention",
    "joined_ranks",
    "keep_in_step",
    "local_ranks",
    "model_type_of",
    "open_arguments",
    "open_checkpoint",
    "open_comparison",
    "open_measurer",
    "open_policy",
    "open_samples",
    "open_workers",
    "read_config",
    "verdict_of",
    "without_progress",
]
