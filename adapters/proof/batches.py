"""
Reads a packed batch from any collator: finds where samples begin, and returns each sample alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from packplan.adapters.loaders.packs import PACK
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ArgumentError, counted

_ROW_KEYS = ("attention_mask", "cu_seq", "max_length", "max_seq", "seq_idx", "seq_lengths", "num_items_in_batch")
"""Prefixes of keys of a packed batch that the batch of a single sample does not have."""

_NUMBERING_KEYS = MappingProxyType({"seq_idx": 1, "attention_mask": 2})
"""
Key -> number. If a value of the key is at least this number, the values are sample numbers. An
attention mask of 0 and 1 only marks padding.
"""

Starts = Sequence[int] | Sequence[Sequence[int]]
"""Position of the first token of each sample, or a list of such positions for each row."""


Shape = tuple[int, int]
"""Number of rows of a batch, and number of tokens of each row."""

Place = tuple[int, slice]
"""Row index of a sample, and slice of its tokens in the row."""


@attrs.frozen(eq=False)
class Sample:
    """One sample as a batch by itself, with the targets of its loss."""

    inputs: Mapping[str, Any]
    """Arguments of the model, for a batch of one sample."""

    targets: torch.Tensor
    """
    Target of each token: the id of the next token, or -100 if that token is not supervised; int64,
    shape (tokens,).
    """

    weights: torch.Tensor | None = None
    """Weight of each target in the loss; None takes the mean over supervised targets."""


@attrs.frozen(eq=False)
class PackedBatch:
    """Rows of packed samples, as a collator has made them."""

    inputs: Mapping[str, Any]
    """Arguments of the model, without labels."""

    labels: torch.Tensor | None
    """Labels of the rows, unshifted; int64 of shape (rows, tokens)."""

    shape: Shape
    """Number of rows, and number of tokens of each row."""

    places: tuple[Place, ...]
    """
    Place of each sample: the index of its row, and the slice of its tokens. No place includes
    padding.
    """

    @classmethod
    def read(cls, batch: Mapping[str, Any], starts: Starts | None) -> PackedBatch:
        """
        Read a packed batch, and find where its samples begin.

        Args:
            batch: Arguments of the model for packed rows, perhaps with labels.
            starts: Position of the first token of each sample, or a list of such positions for each
                row. None takes the tokens at which `position_ids` restart. Without position ids,
                each of several rows is a sample.

        Raises:
            ArgumentError: The batch has no packed rows, or its tensors disagree on where samples
                begin.
        """
        inputs = without_labels(batch)
        shape = _read_shape(inputs)
        filled = _find_real_tokens(inputs, shape)
        first = filled & (filled.cumsum(1) == 1)
        begins_by_key = {key: found & filled | first for key, found in _find_begins_by_key(inputs, shape)}
        if starts is not None:
            begins = _mark_starts(starts, filled) | first
        elif "position_ids" in begins_by_key or len(filled) > 1:
            begins = begins_by_key.get("position_ids", first)
        else:
            raise _refusal("has no position_ids that say where its samples begin: pass starts")
        for key, found in begins_by_key.items():
            for row, token in (found != begins).nonzero().tolist():
                by, other = ("starts", key) if begins[row, token] else (key, "starts")
                raise _refusal(f"has a sample that begins at token {token:,} of row {row} by {by}, but not by {other}")
        lengths = torch.bincount(begins.flatten().cumsum(0)[filled.flatten()] - 1).tolist()
        if len(lengths) < 2:
            raise _refusal("has only one sample, so there is nothing to compare: pass a row of several samples")
        places = [
            (row, slice(token, token + length))
            for (row, token), length in zip(begins.nonzero().tolist(), lengths, strict=True)
        ]
        return cls(inputs, batch.get("labels"), shape, tuple(places))

    def _cut_out_sample(self, number: int) -> dict[str, Any]:
        """
        Return sample *number* of the rows as a batch of its own.

        Raises:
            ArgumentError: A tensor of the batch, such as pixels, has no axis of tokens.
        """
        row, span = self.places[number]
        cut: dict[str, Any] = {}
        for key, value in self.inputs.items():
            if key.startswith(_ROW_KEYS):
                continue
            if not isinstance(value, torch.Tensor):
                cut[key] = value
            elif value.shape[-2:] == self.shape:
                cut[key] = value[..., row : row + 1, span]
            elif value.shape[:2] == self.shape:
                cut[key] = value[row : row + 1, span]
            elif value.shape[-2:] == (1, self.shape[1]):  # one row of positions for all rows
                cut[key] = value[..., span]
            else:
                raise _refusal(f"has {key}, which cannot be cut into samples: pass each sample by itself (alone=…)")
        return cut

    def samples(self, alone: Sequence[Mapping[str, Any]] | None = None) -> list[Sample]:
        """
        Return each sample alone, cut out of its row or made by the user's own collator.

        Args:
            alone: A batch for each sample by itself, in the order of the rows. With None, samples
                are cut out of the rows.

        Raises:
            ArgumentError: *alone* has other samples than the rows, samples cannot be cut out, or
                the batch has neither labels nor token ids.
        """
        ids = self.inputs.get("input_ids")
        labels = ids if self.labels is None else self.labels
        if not isinstance(labels, torch.Tensor) or labels.shape != self.shape:
            raise _refusal("has neither labels nor input_ids of shape (rows, tokens), so it has no loss: add labels")
        targets = [next_tokens(labels[place]) for place in self.places]
        if alone is None:
            return [Sample(self._cut_out_sample(number), own) for number, own in enumerate(targets)]
        if len(alone) != len(self.places):
            raise _refusal(f"has {len(self.places)} samples, but alone has {len(alone)}: pass a batch for each")
        for number, (batch, place) in enumerate(zip(alone, self.places, strict=True)):
            own = batch.get("input_ids")
            if ids is not None and own is not None and ids[place].tolist() != own.flatten().tolist():
                raise _refusal(f"has other tokens in sample {number} than alone[{number}]: pass both in the same order")
        return [Sample(without_labels(batch), own) for batch, own in zip(alone, targets, strict=True)]


def shape_text(shape: Shape) -> str:
    """Return the shape of a batch as text."""
    rows, tokens = shape
    return f"{counted(rows, 'row')} of {tokens:,} tokens"


def places_by_lengths(lengths: Iterable[int]) -> tuple[Place, ...]:
    """Return the places of consecutive samples in one row, from their lengths."""
    return tuple((0, slice(*span)) for span in pairwise(accumulate(lengths, initial=0)))


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's arguments in a batch, without labels, pack indices and values of None."""
    return {key: value for key, value in batch.items() if key not in ("labels", PACK) and value is not None}


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the target of each token: the label of the next token, or -100 for the last token."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)


def _read_shape(inputs: Mapping[str, Any]) -> Shape:
    """Return the number of rows, and of tokens in each; ArgumentError without ids or embeddings."""
    for key in ("input_ids", "inputs_embeds"):
        value = inputs.get(key)
        if isinstance(value, torch.Tensor):
            if value.dim() != 2 + (key == "inputs_embeds"):
                raise _refusal(f"has {key} of shape {tuple(value.shape)}: pass rows of shape (rows, tokens)")
            return value.shape[0], value.shape[1]
    raise _refusal("has neither input_ids nor inputs_embeds as a tensor: add one of them")


def _find_real_tokens(inputs: Mapping[str, Any], shape: Shape) -> torch.Tensor:
    """Return the mask of tokens that are not padding; bool of the batch's shape."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.shape != shape:
        return torch.ones(shape, dtype=torch.bool)
    filled = (mask != 0).cpu()
    runs = (filled.int().diff(dim=1, prepend=torch.zeros(len(filled), 1)) == 1).sum(1)
    for row in (runs > 1).nonzero().flatten().tolist():
        raise _refusal(f"has padding between the tokens of row {row} (attention_mask): pad rows only at their ends")
    return filled


def _find_begins_by_key(inputs: Mapping[str, Any], shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield each key whose values show where samples begin, with a bool mask of the batch's shape.
    """
    for key, value in inputs.items():
        begins = torch.zeros(shape, dtype=torch.bool)
        if not isinstance(value, torch.Tensor):
            continue
        if key.startswith("cu_seq"):
            begins.view(-1)[value[value < begins.numel()].long().cpu()] = True
            yield key, begins
        elif key == "position_ids" and value.shape[-1] == shape[1] and (value.dim() == 2 or value.shape[0] == 4):
            begins[:, 1:] = value.reshape(-1, value.shape[-2], shape[1])[0].diff() != 1
            yield key, begins
        elif key in _NUMBERING_KEYS and value.shape == shape and int(value.max()) >= _NUMBERING_KEYS[key]:
            begins[:, 1:] = value.diff() != 0
            yield key, begins


def _mark_starts(starts: Starts, filled: torch.Tensor) -> torch.Tensor:
    """Return *starts* as a bool mask of the batch's shape; ArgumentError if a start is padding."""
    of_rows: Sequence[Any] = starts if starts and isinstance(starts[0], Sequence) else [starts]
    if len(of_rows) != len(filled):
        raise _refusal(
            f"has {counted(len(filled), 'row')}, but starts has {counted(len(of_rows), 'list')}: pass one list per row"
        )
    begins = torch.zeros_like(filled)
    for row, own in enumerate(of_rows):
        for token in own:
            if not (0 <= token < filled.shape[1] and filled[row, token]):
                raise _refusal(f"has no token {token:,} in row {row}: remove it from starts")
            begins[row, token] = True
    return begins


def _refusal(fact: str) -> ArgumentError:
    return ArgumentError("packed_batch", f"the packed batch {fact}")
