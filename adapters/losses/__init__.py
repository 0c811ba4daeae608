"""Losses on packed logits."""

from packplan.adapters.losses.sequences import (
    FusedLoss,
    PackedLoss,
    PaddedLoss,
    combined,
    normalisers,
    refuse_whole_batch,
)
from packplan.adapters.losses.token_statistics import NO_TARGET, token_log_probabilities
