"""
Constructs most adapters that need ms-swift or torch; `app.wiring.stores` constructs the others.
"""

from __future__ import annotations

from packplan.app.wiring.stores import read_config
from packplan.app.wiring.training.outlines import (
    as_traced,
    of_length,
    open_outline,
    open_step_tracer,
    ranks_in_name,
    weights_of,
)
from packplan.app.wiring.training.ranks import alone_in_output, joined_ranks
from packplan.app.wiring.training.samples import open_measurer, open_samples
from packplan.app.wiring.training.trainers import (
    build_stream_trainer,
    build_trainer,
    identity_of,
    keep_in_step,
    open_arguments,
    open_checkpoint,
    open_comparison,
    open_stream_start,
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
    "as_traced",
    "ask_before_measuring",
    "build_stream_trainer",
    "build_trainer",
    "decide_attention",
    "identity_of",
    "joined_ranks",
    "keep_in_step",
    "model_type_of",
    "of_length",
    "open_arguments",
    "open_checkpoint",
    "open_comparison",
    "open_measurer",
    "open_outline",
    "open_samples",
    "open_step_tracer",
    "open_stream_start",
    "ranks_in_name",
    "read_config",
    "verdict_of",
    "weights_of",
    "without_progress",
]
