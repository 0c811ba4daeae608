"""Rows of an ms-swift command, with the lengths that `packplan plan build` stores."""

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np

from packplan.adapters.exports import export_cached_rows
from packplan.adapters.loaders.rows import UNKNOWN, RowFacts
from packplan.adapters.progress import progress
from packplan.adapters.samples.dataset_rows import DatasetRowsEncoder, DatasetRowsMeasurer
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.swift.command import open_pipeline, read_command, run_of_arguments
from packplan.adapters.swift.packs import add_row_facts
from packplan.app.opening.stores import artefacts_folder, read_resume_state
from packplan.app.planning.audit import check_images
from packplan.app.planning.split import MeasuredSplit
from packplan.core.config.run import HostCommand, RunConfig
from packplan.core.errors import NotBuiltError, StaleError
from packplan.core.fingerprint import Fingerprint
from packplan.core.samples.tables import BadRecord, column, sample_indices


def open_command_encoders(config: RunConfig, command: HostCommand) -> dict[str, DatasetRowsEncoder]:
    """Open the rows of each split of an ms-swift command, with the command's template."""
    arguments, _ = read_command(command.task, command.words, world_size=command.world_size)
    pipeline = open_pipeline(arguments)
    return {
        split: DatasetRowsEncoder(config, split, template=pipeline.template, rows=rows)
        for split, rows in pipeline.read_rows().items()
    }


def export_rows(splits: Iterable[MeasuredSplit], folder: Path) -> dict[str, int]:
    """
    Write the samples of an ms-swift command with their lengths; return the number of samples of
    each split.

    Args:
        splits: Measured splits of the command.
        folder: Folder to create.
    """
    exported = {}
    for split in splits:
        indices = sample_indices(split.table)
        lengths = column(split.table, "length")[indices, np.newaxis].tolist()
        if split.encoder.records_per_sample > 1:
            halves = cast(DatasetRowsMeasurer, split.source).sequence_lengths
            lengths = [*map(halves, progress(indices.tolist(), desc="measuring halves", unit=" pairs"))]
        exported[split.name] = (cast(DatasetRowsEncoder, split.encoder).rows.select(indices), lengths)
    export_cached_rows(exported, folder)
    return {name: len(lengths) for name, (_, lengths) in exported.items()}


def take_stored_lengths(pipeline: Any, data_sets: Sequence[Any]) -> list[tuple[Any, Sequence[BadRecord]]]:
    """
    Return the data sets of ms-swift's training pipeline with their stored lengths, each with the
    rows that `packplan plan build` left out.

    `plan build` has stored the lengths for the same command. No row is encoded.

    Args:
        pipeline: ms-swift's pipeline under the plugin, with its arguments and template.
        data_sets: Training rows and evaluation rows; either may be None.

    Raises:
        NotBuiltError: The lengths of some rows are not stored.
        StaleError: The stored lengths belong to other rows or arguments, or the checkpoint of a
            resumed run was trained with other lengths.
        PackplanError: Stored files or media are damaged.
    """
    config = run_of_arguments(pipeline.args, pipeline.args.global_world_size)
    template, mode = pipeline.template, pipeline.template.mode
    template.set_mode("train")  # as `plan build` opens it
    try:
        return [*map(partial(_with_stored_lengths, pipeline, config), ("train", "eval"), data_sets)]
    finally:
        template.set_mode(mode)


def _with_stored_lengths(pipeline: Any, config: RunConfig, split: str, rows: Any) -> tuple[Any, Sequence[BadRecord]]:
    """
    Return the rows of a split with their stored lengths, or None if there are no rows. Also return
    the rows that are left out; see `take_stored_lengths`.
    """
    if not rows:
        return None, ()
    encoder = DatasetRowsEncoder(config, split, template=pipeline.template, rows=rows)
    arguments, folder = pipeline.args, artefacts_folder(pipeline.args.packplan_output_dir) / split
    store, source = DiskLengthStore(folder), DatasetRowsMeasurer(encoder)
    bad = store.bad_records()
    data_digest = partial(source.data_digest, without=[one.index for one in bad])
    inputs = source.fingerprint()
    stored = store.read(inputs, len(source), data_digest)
    if len(stored.table) < len(source) or stored.repeatability is None:
        raise NotBuiltError(str(folder), "does not hold the lengths of all rows")
    check_images(source, stored)
    kept = sample_indices(stored.table)
    # Settings decide what rows teach; versions of packages may change before a run is resumed.
    settings = Fingerprint({name: value for name, value in inputs.inputs.items() if not name.startswith("version.")})
    digests = [
        blake2b(f"{settings.digest} {source.digest_and_folder(index)[0]}".encode(), digest_size=16).digest()
        for index in kept.tolist()
    ]
    supervised = column(stored.table, "supervised")[kept].tolist()
    if arguments.resume_from_checkpoint and split == "train":
        saved = read_resume_state(Path(arguments.resume_from_checkpoint))
        found = RowFacts.from_rows((one, 0, UNKNOWN) for one in digests).digest
        if saved is not None and saved.data != found:
            fact = f"the checkpoint was trained with other lengths than those in {folder}"
            raise StaleError("stale_lengths", fact, {"folder": folder})
    if not kept.size:  # ms-swift has none either
        return None, bad
    return add_row_facts(rows.select(kept), column(stored.table, "length")[kept].tolist(), digests, supervised), bad
