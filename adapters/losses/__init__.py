"""Losses on packed logits."""

from packplan.adapters.losses.sequences import (
    FusedLoss,
    PackedLoss,
    combined,
    normalisers,
    refuse_whole_batch,
)
