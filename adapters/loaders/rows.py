"""
Packs of tokenized rows, as a torch data set and a collator, for any loop that trains on tensors.

A row is a mapping with `input_ids`, perhaps `labels`, and perhaps the media that a processor gives
beside them (`pixel_values`, `image_grid_thw`, …). Item k of the data set is pack k. The collator
joins the rows of a pack into one row of tokens, whose positions start again with every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils.data import Dataset

from packplan.core.errors import ArgumentError, Difference, StaleError, counted
from packplan.core.lengths import IntArray
from packplan.core.surface import Plan

PACK = "packplan_pack"
"""Key of a batch's pack index."""

IGNORED_LABEL = -100
"""Label of a token that no loss counts."""

_TOKENS, _LABELS, _POSITIONS = "input_ids", "labels", "position_ids"

_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""Columns of 0 and 1 by which TRL marks tokens that are learned."""

_BY_TOKEN = {_TOKENS, _LABELS, *_MASKS, "attention_mask", "token_type_ids", "mm_token_type_ids", "shift_labels"}
"""Columns with one value for each token."""

Row = Mapping[str, Any]


@attrs.frozen(eq=False)
class PackOfRows:
    """The rows of one pack."""

    pack: int
    """Pack index in the plan."""

    rows: tuple[Row, ...]


class RowsOfPacks(Dataset[PackOfRows]):
    """Rows of a data set by pack: `len` is the number of packs, and item k is pack k."""

    def __init__(self, rows: Any, plan: Plan) -> None:
        """
        Serve the packs of *plan*.

        Args:
            rows: Tokenized rows by index: a list, a `datasets.Dataset`, a torch data set.
            plan: Plan of the lengths of these rows.

        Raises:
            ArgumentError: The number of rows is not that of the plan's samples, or rows have no
                number, as those of a stream.
        """
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            fact = f"a plan needs rows by index, and a {type(rows).__name__} only yields them one after the other"
            raise ArgumentError("host", fact, {"rows": type(rows).__name__})
        if len(rows) != plan.raw.num_samples:
            fact = f"the plan has {counted(plan.raw.num_samples, 'sample')}, but the data set {len(rows):,} rows"
            raise ArgumentError("host", fact, {"planned": plan.raw.num_samples, "rows": len(rows)})
        self.rows, self.packs, self.lengths = rows, plan.packs, plan.lengths

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, pack: int) -> PackOfRows:
        """Return the rows of pack *pack*; StaleError if one is not as long as it was planned."""
        return PackOfRows(pack, tuple(_planned(self.rows, index, self.lengths) for index in self.packs[pack]))


def _planned(rows: Any, index: int, lengths: IntArray) -> Row:
    """Return row *index*, if it has its planned length."""
    row: Row = rows[index]
    length, planned = _tokens(row[_TOKENS]).numel(), int(lengths[index])
    if length != planned:
        raise StaleError.sample(index, f"row {index}", (Difference("length", planned, length),))
    return row


@attrs.frozen(eq=False)
class PackInputs:
    """
    Collator of packs: returns the inputs of a model for one pack.

    >>> rows = ({"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]})
    >>> batch = PackInputs()([PackOfRows(0, rows)])
    >>> batch["position_ids"].tolist(), batch["labels"].tolist()
    ([[0, 1, 0, 1, 2]], [[-100, 6, -100, 8, 9]])
    """

    positions: Callable[[Row], torch.Tensor] | None = None
    """
    Positions of a row's tokens by its model, of shape (rows, 1, tokens), for models that place
    images. None counts the tokens of each sample from 0.
    """

    def __call__(self, packs: Sequence[PackOfRows]) -> dict[str, Any]:
        """
        Return the inputs of a batch of one pack, its index under `PACK` among them.

        `input_ids` and `labels` are int64 of shape (1, tokens). `position_ids` have this shape too,
        or (1 + rows, 1, tokens) with the tokens' own first. The first token of each sample is not
        learned, since no token of its sample is before it.
        """
        if len(packs) != 1:
            fact = (
                f"a batch is one pack, but the loader collates {len(packs)}: give it PackBatches as its batch_sampler"
            )
            raise ArgumentError("host", fact, {"packs": len(packs)})
        (pack,) = packs
        return {**flatten(pack.rows, positions=self.positions), PACK: pack.pack}


def flatten(rows: Sequence[Row], *, positions: Callable[[Row], torch.Tensor] | None = None) -> dict[str, Any]:
    """
    Return rows as one row of tokens, with positions that start again with every sample.

    Args:
        rows: Rows of one pack, in order; at least one.
        positions: See `PackInputs`.
    """
    own = torch.cat([torch.arange(_tokens(row[_TOKENS]).numel()) for row in rows])[None]
    joined = own if positions is None else torch.cat([own[None], torch.cat([positions(row) for row in rows], -1)])
    tokens = torch.cat([_tokens(row[_TOKENS]) for row in rows])[None]
    labels = torch.cat([_labels(row) for row in rows])[None].masked_fill(own == 0, IGNORED_LABEL)
    return {_TOKENS: tokens, _LABELS: labels, _POSITIONS: joined, **joined_media(rows)}


def learned(labels: torch.Tensor) -> int:
    """Return the number of tokens that a batch teaches, given its labels of shape (1, tokens)."""
    return int((labels[..., 1:] != IGNORED_LABEL).sum())


def _tokens(values: Any) -> torch.Tensor:
    """Return the values of a row's tokens; int64, shape (tokens,)."""
    return torch.as_tensor(values).reshape(-1).long()


def _labels(row: Row) -> torch.Tensor:
    """Return the labels of a row: its own, or its tokens, where its masks let them be learned."""
    labels = _tokens(row[_LABELS] if row.get(_LABELS) is not None else row[_TOKENS])
    for name in _MASKS:
        if row.get(name) is not None:
            labels = labels.masked_fill(_tokens(row[name]) == 0, IGNORED_LABEL)
    return labels


def joined_media(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return the tensors of images and videos that a processor made, joined over the rows."""
    found: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        for name, value in row.items():
            if name in _BY_TOKEN or name == _POSITIONS or value is None or not _is_tensor(value):
                continue
            found.setdefault(name, []).append(torch.as_tensor(value))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _is_tensor(value: Any) -> bool:
    """Return whether a value is an array with a row for each image, video or patch."""
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], (list, tuple)) and not isinstance(value[0], str)
    return getattr(value, "ndim", 0) >= 1
