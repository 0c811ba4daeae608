"""
A run's samples and stores, gathered for every command that plans, trains or verifies.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import attrs
import numpy as np

from packplan.adapters.exports import export_cached_rows
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.rows import RowsEncoder, sequence_lengths, whole
from packplan.app.planning.split import Alignment, GatheredSplit, PlannedSplit
from packplan.app.wiring.lengths import open_known
from packplan.app.wiring.mixes import mixes_of, recipe_of
from packplan.app.wiring.stores import open_stores
from packplan.app.wiring.training import open_measurer, open_samples
from packplan.app.wiring.works import policy_of
from packplan.core.config import RunConfig
from packplan.core.epochs import EpochRecipe
from packplan.core.errors import ConfigError, DataSetError
from packplan.core.mixes import mixes_faults
from packplan.core.samples import by_source, column, sample_indices


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


def _recipe_of(config: RunConfig, split: str, encoder: SwiftEncoder) -> EpochRecipe | None:
    """Return the recipe of a split's epochs, if it has one and its data allow it."""
    recipe = recipe_of(config, split)
    if recipe is None or recipe.mixes is None:
        return recipe
    sizes = [size for _, size in by_source(encoder.data_files())]
    if len(sizes) != len(recipe.mixes.files):
        mixes_of(config)  # refuses a file without records
        raise ConfigError.at("custom.source_names", "gives several files of the mix one name: name each by itself")
    if faults := tuple(mixes_faults(recipe.mixes, sizes)):
        raise ConfigError(str(config.custom.fusion_config), faults)
    return recipe


def gather(config: RunConfig) -> Gathered:
    """
    Open the data of each split, `train` and perhaps `eval`, and their stores; nothing is written.
    """
    try:
        samples = open_samples(config)
    except DataSetError:
        if config.custom.fusion_schedule is not None:
            mixes_of(config)  # names the source of the mix by its key
        raise
    sources = {name: whole(open_measurer(config, encoder)) for name, encoder in samples.items()}
    splits = {
        name: GatheredSplit(
            name,
            policy_of(config, name),
            sources[name],
            open_stores(config, name),
            Alignment.from_config(config, name),
            config.custom.max_bad_share if config.custom.on_bad_record == "skip" else None,
            config.training.packing_length_cache_persist_every,
            _recipe_of(config, name, encoder),
            open_known(config, sources[name]),
        )
        for name, encoder in samples.items()
    }
    return Gathered(samples, splits)
