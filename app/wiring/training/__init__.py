"""
Constructs most adapters that need ms-swift or torch; `app.wiring.stores` constructs the others.
"""

from packplan.app.wiring.splits import open_encoders, open_measurer, open_splits
from packplan.app.wiring.stores import read_config
from packplan.app.wiring.training.outlines import as_traced, open_step_tracer
from packplan.app.wiring.training.ranks import alone_in_output, joined_ranks
from packplan.app.wiring.training.trainers import (
    build_stream_trainer,
    build_trainer,
    identity_of,
    keep_in_step,
    open_arguments,
    open_checkpoint,
    open_comparison,
    open_follower,
    open_stream_start,
    without_progress,
)
from packplan.app.wiring.training.verdicts import (
    ask_before_measuring,
    decide_attention,
    model_type_of,
    verdict_of,
)
