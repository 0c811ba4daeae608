"""
A run's samples, stores and policies, gathered for every command that plans, trains or verifies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import attrs
import numpy as np

from packplan.adapters.exports.cached_rows import export_cached_rows
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.rows import RowsEncoder, sequence_lengths, whole
from packplan.app.planning.split import Alignment, GatheredSplit, PlannedSplit
from packplan.app.wiring.stores import open_stores
from packplan.app.wiring.training import open_measurer, open_samples
from packplan.app.wiring.works import policy_of
from packplan.core.config import RunConfig
from packplan.core.samples import column, sample_indices


@attrs.frozen
class Gathered:
    """Samples and inputs of planning of a run, by split."""

    samples: Mapping[str, SwiftEncoder]
    """Samples to train and to evaluate on."""

    splits: Mapping[str, GatheredSplit]
    """Inputs of their plans."""


def export_rows(gathered: Gathered, planned: Iterable[PlannedSplit], folder: Path) -> dict[str, int]:
    """
    Write the rows of a command of ms-swift that are samples, with their lengths; return their
    number by split.

    Args:
        gathered: The rows.
        planned: The same, measured.
        folder: Folder to make.
    """
    splits = {}
    for one in planned:
        indices = sample_indices(one.table)
        lengths = sequence_lengths(
            gathered.splits[one.name].source, indices, column(one.table, "length")[indices].astype(np.int64)
        )
        rows = cast("RowsEncoder", gathered.samples[one.name]).rows
        splits[one.name] = (rows if len(rows) == len(lengths) else rows.select(indices), lengths)
    export_cached_rows(splits, folder)
    return {name: len(lengths) for name, (_, lengths) in splits.items()}


def gather(config: RunConfig, *, measuring_ranks: int = 1) -> Gathered:
    """
    Open the data of each split, `train` and perhaps `eval`, and their stores; nothing is written.

    Args:
        config: The run.
        measuring_ranks: Ranks on this machine that measure at the same time, and share its cores.
    """
    samples = open_samples(config)
    splits = {
        name: GatheredSplit(
            name,
            policy_of(config, name),
            whole(open_measurer(config, encoder, measuring_ranks=measuring_ranks)),
            open_stores(config, name),
            Alignment.from_config(config, name),
            config.custom.max_bad_share if config.custom.on_bad_record == "skip" else None,
            config.training.packing_length_cache_persist_every,
        )
        for name, encoder in samples.items()
    }
    return Gathered(samples, splits)
