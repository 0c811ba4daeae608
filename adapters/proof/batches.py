"""A packed batch of any collator: where its samples begin, and each sample alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from packplan.adapters.loaders.rows import IGNORED_LABEL, PACK
from packplan.adapters.proof.comparison import Sample
from packplan.adapters.proof.gradients import Place, Shape
from packplan.core.errors import ArgumentError

_OF_ROWS = ("attention_mask", "cu_seq", "max_length", "max_seq", "seq_idx", "seq_lengths", "num_items_in_batch")
"""Beginnings of keys that tell a packed row's samples apart, and that a sample alone lacks."""

_NUMBERS = MappingProxyType({"seq_idx": 1, "attention_mask": 2})
"""Keys that number samples -> the value from which they do; a mask of 0 and 1 marks padding."""

Starts = Sequence[int] | Sequence[Sequence[int]]
"""First token of each sample, or a list of them for each row."""


@attrs.frozen(eq=False)
class PackedBatch:
    """Rows of samples, as a collator made them."""

    inputs: Mapping[str, Any]
    """Arguments of the model, without labels."""

    labels: torch.Tensor | None
    """Labels of the rows, unshifted; int64 of shape (rows, tokens)."""

    shape: Shape
    """Rows, and tokens of each."""

    places: tuple[Place, ...]
    """Place of each sample: its row, and its tokens there. Padding is in none."""

    @classmethod
    def read(cls, batch: Mapping[str, Any], starts: Starts | None, *, at_least: int = 2) -> PackedBatch:
        """
        Read a batch.

        Args:
            batch: Arguments of the model, of packed rows.
            starts: First token of each sample. None takes those at which positions restart; without
                positions, each of several rows is a sample.
            at_least: Number of samples that the batch has to have. With 1, a row without positions
                may be one sample, or be told apart by another key.

        Raises:
            ArgumentError: It has no packed rows, or its parts disagree on where samples begin.
        """
        inputs = _inputs_of(batch)
        shape = _shape_of(inputs)
        filled = _filled(inputs, shape)
        told = {key: _within(found, filled) for key, found in _told_starts(inputs, shape)}
        if starts is None:
            given = told.get("position_ids") or _without_positions(told, filled, at_least)
            if given is None:
                raise _wrong("has no position_ids of its text, so nothing says where samples begin: give starts")
        else:
            given = _given(starts, filled)
        for key, found in told.items():
            if found != given:
                raise _disagreement(key, found, given)
        places = tuple(
            (row, slice(*one))
            for row, (own, span) in enumerate(zip(given, filled, strict=True))
            for one in pairwise([*own, span.stop])
        )
        if len(places) < at_least:
            raise _wrong("holds one sample, so nothing can leak: give a row of several")
        return cls(inputs, batch.get("labels"), shape, places)

    def _cut(self, number: int) -> dict[str, Any]:
        """
        Return one sample, as a batch that is not packed.

        Raises:
            ArgumentError: A tensor of the batch is not by tokens, as pixels are not.
        """
        row, span = self.places[number]
        cut: dict[str, Any] = {}
        for key, value in self.inputs.items():
            if key.startswith(_OF_ROWS):
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
                raise _wrong(
                    f"has {key}, which is not by tokens: give each sample by itself (alone=…, or a plan and rows)"
                )
        return cut

    def targets(self) -> list[torch.Tensor]:
        """
        Return what each token of each sample has to predict; int64, -100 where none is learned.

        Raises:
            ArgumentError: The batch has neither labels nor token ids.
        """
        values = self.inputs.get("input_ids") if self.labels is None else self.labels
        if not isinstance(values, torch.Tensor) or values.shape != self.shape:
            raise _wrong("has neither labels nor input_ids by token, so it has no loss")
        return [next_tokens(values[place]) for place in self.places]

    def samples(self, alone: Sequence[Mapping[str, Any]] | None = None) -> list[Sample]:
        """
        Return each sample alone: cut out of its row, or as the user's own collator made it.

        Args:
            alone: A batch of each sample by itself, in the order of the rows; None cuts them out.

        Raises:
            ArgumentError: They are other samples than those of the rows, or cannot be cut out; or
                the batch has neither labels nor token ids.
        """
        targets = self.targets()
        if alone is None:
            return [Sample(self._cut(number), own) for number, own in enumerate(targets)]
        if len(alone) != len(self.places):
            raise _wrong(f"has {len(self.places)} samples, but alone has {len(alone)}: none may be dropped or added")
        ids = self.inputs.get("input_ids")
        for number, (batch, place) in enumerate(zip(alone, self.places, strict=True)):
            own = batch.get("input_ids")
            if ids is not None and own is not None and ids[place].tolist() != own.flatten().tolist():
                raise _wrong(f"has other tokens in sample {number} than alone[{number}]: both need one order")
        return [Sample(_inputs_of(batch), own) for batch, own in zip(alone, targets, strict=True)]


def _inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch's arguments of the model, without labels."""
    return {key: value for key, value in batch.items() if key not in ("labels", PACK) and value is not None}


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return what each token has to predict: the next one's label, and nothing for the last."""
    return F.pad(labels[1:], (0, 1), value=IGNORED_LABEL)


def _shape_of(inputs: Mapping[str, Any]) -> Shape:
    """Return the number of rows, and of tokens in each; ArgumentError if there are none."""
    for key in ("input_ids", "inputs_embeds"):
        value = inputs.get(key)
        if isinstance(value, torch.Tensor):
            if value.dim() != 2 + (key == "inputs_embeds"):
                raise _wrong(f"has {key} of shape {tuple(value.shape)}: give rows, of shape (rows, tokens)")
            return value.shape[0], value.shape[1]
    raise _wrong("has neither input_ids nor inputs_embeds as a tensor")


def _filled(inputs: Mapping[str, Any], shape: Shape) -> list[slice]:
    """Return the part of each row that is no padding, by a mask of its tokens."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.shape != shape:
        return [slice(0, shape[1])] * shape[0]
    spans = []
    for row, own in enumerate(mask):
        tokens = own.nonzero().flatten().tolist() or [0]
        span = slice(tokens[0], tokens[-1] + 1)
        if len(tokens) != span.stop - span.start:
            raise _wrong(f"has padding between the tokens of row {row}, by attention_mask: give rows without holes")
        spans.append(span)
    return spans


def _told_starts(inputs: Mapping[str, Any], shape: Shape) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each key that says where samples begin, with what it says of each row."""
    rows, tokens = shape
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        if key.startswith("cu_seq"):
            flat = [int(one) for one in value.flatten().tolist()]
            yield key, [[one - row * tokens for one in flat if row == one // tokens] for row in range(rows)]
        elif key == "position_ids" and value.shape[-1] == tokens and (value.dim() == 2 or value.shape[0] == 4):
            own = value.reshape(-1, value.shape[-2], tokens)[0].expand(rows, tokens)
            yield key, [_changes(one.diff() != 1) for one in own]
        elif key in _NUMBERS and value.shape == shape and int(value.max()) >= _NUMBERS[key]:
            yield key, [_changes(one.diff() != 0) for one in value]


def _changes(differs: torch.Tensor) -> list[int]:
    return [0, *(differs.nonzero().flatten() + 1).tolist()]


def _within(found: list[list[int]], filled: list[slice]) -> list[list[int]]:
    """Return starts without those in padding, and with the first token that is none."""
    return [
        sorted({span.start, *(one for one in own if span.start < one < span.stop)})
        for own, span in zip(found, filled, strict=True)
    ]


def _without_positions(
    told: Mapping[str, list[list[int]]], filled: list[slice], at_least: int
) -> list[list[int]] | None:
    """Return the starts in a batch whose positions do not tell them; None if nothing does."""
    if at_least == 1 and told:
        return next(iter(told.values()))
    return [[span.start] for span in filled] if at_least == 1 or len(filled) > 1 else None


def _given(starts: Starts, filled: list[slice]) -> list[list[int]]:
    """Return the starts of each row as they were given; ArgumentError if they cannot be."""
    of_rows: Sequence[Any] = starts if starts and isinstance(starts[0], Sequence) else [starts]
    if len(of_rows) != len(filled):
        raise _wrong(f"has {len(filled)} rows, but starts are of {len(of_rows)}: give a list for each row")
    found = [[int(one) for one in own] for own in of_rows]
    for own, span in zip(found, filled, strict=True):
        if not own or own[0] != span.start or own[-1] >= span.stop or any(one >= two for one, two in pairwise(own)):
            raise _wrong(
                f"has {span.stop:,} tokens, but starts are {_shown(own)}: they rise from {span.start}, and are below "
                "that"
            )
    return found


def _disagreement(key: str, found: list[list[int]], starts: list[list[int]]) -> ArgumentError:
    """Return the error of borders that disagree, by the first that does."""
    row = next(row for row, (one, two) in enumerate(zip(found, starts, strict=True)) if one != two)
    mine, other = starts[row], found[row]
    number = next(
        (place for place, (one, two) in enumerate(zip(mine, other, strict=False)) if one != two),
        min(len(mine), len(other)),
    )
    own, said = (f"at token {one[number]:,}" if number < len(one) else "nowhere" for one in (mine, other))
    where = f" of row {row}" if len(starts) > 1 else ""
    return _wrong(
        f"begins sample {number}{where} {own} by starts, but {said} by {key}: the model would take other samples"
    )


def _shown(starts: Sequence[int]) -> str:
    return f"{', '.join(map(str, starts[:6]))}{', …' if len(starts) > 6 else ''}" or "none"


def _wrong(fact: str) -> ArgumentError:
    return ArgumentError("packed_batch", f"the packed batch {fact}")
