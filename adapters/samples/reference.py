"""
Compares a sample's encoding with ms-swift's own reading and encoding of the same record.

Measuring compares the first sample of each kind, so that a run trains the same tokens as `swift
sft`.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from datasets import Dataset
from swift.dataset import AutoPreprocessor, RowPreprocessor
from swift.template import Template

from packplan.core.batch import IGNORED_LABEL
from packplan.core.samples.tools import WEIGHTS

log = logging.getLogger(__name__)


def find_difference(
    template: Template,
    record: Any,
    sample: dict[str, Any],
    encoded: Mapping[str, Any],
    *,
    columns: dict[str, str | None],
) -> str:
    """
    Return the first difference from ms-swift's own encode of a record; empty if there is none.

    Args:
        template: Template of ms-swift, unchanged since it was opened.
        record: Record of the data file.
        sample: Messages and media that the run makes of the record. ms-swift's encode uses the
            media and weights of this sample. If ms-swift cannot read the record, the texts of this
            sample are used too.
        encoded: Sample as this run has encoded it.
        columns: New name of each renamed key of the data; None for a key that is ignored.
    """
    try:
        row = _read_by_swift(record, columns) | {name: sample[name] for name in ("images", "videos") if name in sample}
        if len(row["messages"]) == len(sample["messages"]):
            for theirs, ours in zip(row["messages"], sample["messages"], strict=True):
                theirs |= {name: ours[name] for name in WEIGHTS if name in ours}
        expected = template.encode(row, return_length=True)
    except Exception as error:  # noqa: BLE001  # it reads no dense captions, and fails in many ways
        log.debug("ms-swift cannot read the record from its file: %s: %s", type(error).__name__, error)
        expected = template.encode(sample, return_length=True)
    for name, ours, theirs in zip(("token", "label", "weight"), _facts(encoded), _facts(expected), strict=True):
        for position, (one, other) in enumerate(zip_longest(ours, theirs)):
            if one != other:
                near = template.safe_decode(expected["input_ids"][max(position - 8, 0) : position + 8])
                return f"{name} {position:,} of {len(theirs):,} is {one}, but ms-swift has {other}, near {near!r}"
    return ""


def _read_by_swift(record: Any, columns: dict[str, str | None]) -> dict[str, Any]:
    """Return a record as ms-swift reads it from a data file; ms-swift may raise any error."""
    kept = {name: held for name, held in copy.deepcopy(record).items() if columns.get(name, "") is not None}
    named = Dataset.from_dict({name: [None] for name in kept})  # with values, Arrow would convert their types
    named = RowPreprocessor.safe_rename_columns(named, {name: known for name, known in columns.items() if known})
    reader = AutoPreprocessor()._get_preprocessor(named)  # noqa: SLF001  # the public way writes a data set
    names = reader.safe_rename_columns(named, reader.columns).column_names
    batch = {name: [held] for name, held in zip(names, kept.values(), strict=True)}
    read = reader.batched_preprocess(batch, strict=True, ignore_max_length_error=False)
    return {name: held for name, (held,) in read.items() if name in reader.standard_keys and held is not None}


def _facts(encoded: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
    """Return the tokens of an encoded sample, their labels, and the loss weight of each label."""
    labels, weights = encoded["labels"], encoded.get("loss_scale") or ()
    if set(weights) <= {0, 1}:  # labels say the same
        weights = [1] * len(labels)
    trained = [weight * (label != IGNORED_LABEL) for weight, label in zip(weights, labels, strict=True)]
    return encoded["input_ids"], labels, trained
