"""Losses on packed logits."""

from packplan.adapters.losses.sequences import (
    FusedLoss,
    PackedLoss,
    combine_metrics,
    normalisers,
    refuse_whole_batch_loss,
)
