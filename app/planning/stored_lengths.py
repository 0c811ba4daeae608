"""Stored lengths of a split, opened without its data, its model, torch or ms-swift."""

from __future__ import annotations

from collections.abc import Iterator

from packplan.core.config import RunConfig, configured_inputs
from packplan.core.errors import NotBuiltError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.ports import LengthStore, StoredLengths


def open_lengths(store: LengthStore) -> StoredLengths:
    """
    Return the lengths of all records of a split.

    Raises:
        NotBuiltError: None are stored, or not all.
        CorruptArtefactError: They are not what was written.
    """
    lengths = store.inspect()
    if lengths is None:
        raise NotBuiltError(store.where, "holds no lengths")
    measured = len(lengths.rows.table)
    if measured < lengths.origin.num_records:
        reason = (
            f"holds the lengths of {measured:,} of {counted(lengths.origin.num_records, 'record')}, since measuring "
            "was interrupted"
        )
        raise NotBuiltError(store.where, reason)
    return lengths


def stale_inputs(config: RunConfig, lengths: StoredLengths) -> Iterator[str]:
    """
    Yield what the configuration alone shows that the stored lengths do not fit; `verify` finds the
    rest.
    """
    inputs = lengths.origin.key.inputs
    asked = configured_inputs(config.template, config.custom, packing_length=config.packing_length)
    for difference in Fingerprint({key: inputs.get(key) for key in asked}).differences(Fingerprint(asked)):
        yield f"the stored lengths are of another configuration, and training refuses them: {difference}"
