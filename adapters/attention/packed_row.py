"""
Samples of the row that a model computes, found by position ids or by a padded batch's mask.

In most models, transformers finds samples by positions that restart. Some models never pass
positions to their masks, and layers that carry a state along the row use no mask. With `keep_rows`,
a model keeps its row in a context variable. The variable is set only during the forward pass, and
while the backward pass recomputes layers. With `run_by_sample`, layers that carry a state (linear
attention, Mamba, convolutions over time) run sample by sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from functools import cached_property, partial, wraps
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import attrs
import numpy as np
import torch

from packplan.adapters.attention.shares import RowShare
from packplan.core.errors import PackplanError

T = TypeVar("T")

PADDINGS: tuple[Padding, ...] = ("left of", "between")

_ROW: ContextVar[PackedRow | None] = ContextVar("row")

_BOUNDARIES = ("cu_seq", "max_length", "max_seq", "seq_idx")
"""Prefixes of the names of arguments that describe a row's samples to fast kernels."""


@attrs.frozen(eq=False)
class PackedRow:
    """Consecutive samples of a packed row."""

    sample_ids: torch.Tensor
    """Index of each token's sample, from 0; int64 of shape (tokens,)."""

    columns: torch.Tensor | None = None
    """
    Column of each token in its padded batch, by which attention windows are counted; int64 of shape
    (tokens,). None if the batch had no padding between tokens.
    """

    share: RowShare | None = None
    """This rank's part of the row; None if ranks do not share the row."""

    known_lengths: tuple[int, ...] | None = None
    """
    Number of tokens of each sample, if known from a padded batch. None if the numbers are only on
    the device; reading them then waits for the device.
    """

    @cached_property
    def starts_by_token(self) -> torch.Tensor:
        """Row position at which the sample of each token begins; int64, shape (tokens,)."""
        return torch.searchsorted(self.sample_ids, self.sample_ids)

    @cached_property
    def boundaries(self) -> torch.Tensor:
        """First position of each sample, and the end of the row; int64, shape (samples + 1,)."""
        if self.known_lengths is not None:
            return torch.tensor([0, *accumulate(self.known_lengths)]).to(self.sample_ids.device, non_blocking=True)
        return torch.searchsorted(
            self.sample_ids, torch.arange(int(self.sample_ids[-1]) + 2, device=self.sample_ids.device)
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """
        Number of tokens of each sample. The padding of a row that ranks share counts as one more
        sample.
        """
        if self.known_lengths is not None:
            return self.known_lengths
        return tuple(stop - start for start, stop in pairwise(self.boundaries.tolist()))

    def same_sample(self, batch: Any, head: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  # transformers passes them
        """
        Mask function of transformers: return whether query and key belong to the same sample.

        Args:
            batch: Batch index, always 0.
            head: Head index; all heads have the same mask.
            queries: Token positions in the row.
            keys: Token positions in the row; the shape broadcasts with the shape of *queries*.
        """
        return self.sample_ids[queries] == self.sample_ids[keys]

    def same_chunk(self, size: int) -> Callable[..., torch.Tensor]:
        """Return a mask function for chunks of *size* tokens; each sample begins a new chunk."""
        columns = (
            torch.arange(len(self.sample_ids), device=self.sample_ids.device) if self.columns is None else self.columns
        )
        begins = columns[self.starts_by_token]

        def in_same_chunk(_: Any, __: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            start = begins[queries]
            return (columns[queries] - start) // size == (columns[keys] - start) // size

        return in_same_chunk

    def with_padded_distances(self, mask_function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return *mask_function* with distances that also count padding between tokens."""
        columns = self.columns
        if columns is None:
            return mask_function
        return lambda batch, head, queries, keys: mask_function(batch, head, columns[queries], columns[keys])


Padding = Literal["left of", "between"]
"""Place of padding that can change results: before the real tokens, or between them."""


@attrs.frozen(eq=False)
class RealTokens:
    """
    Tokens of a padded batch, row after row and without padding.

    >>> tokens = RealTokens.from_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]))
    >>> tokens.take(torch.tensor([[5, 6, 0], [0, 7, 8]]))
    tensor([[5, 6, 7, 8]])
    >>> tokens.put_back(torch.tensor([[5, 6, 7, 8]]))
    tensor([[5, 6, 0],
            [0, 7, 8]])
    """

    places: torch.Tensor
    """Index of each token in the flattened batch; int64 of shape (tokens,)."""

    shape: tuple[int, int]
    """Number of rows of the batch, and number of positions in each row."""

    row: PackedRow
    """The packed row, in which each batch row with a token is a sample."""

    mask: torch.Tensor
    """Mask of the batch from which the tokens were read."""

    padding_places: frozenset[Padding]
    """
    Places of padding, which are `left of` if padding precedes real tokens, and `between` if it
    separates them.
    """

    has_sample_numbers: bool
    """Whether the mask has numbers above 1: sample numbers of rows that are packed already."""

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> RealTokens:
        """
        Return the tokens of a batch at which *mask*, of shape (rows, positions), is not 0.

        All fields are computed from one copy of the mask, so this waits for the device only once.
        """
        has_numbers = not mask.is_floating_point() and mask.dtype != torch.bool
        host = (mask if has_numbers else mask != 0).numpy(force=True)
        places = np.flatnonzero(host)
        rows, columns = np.divmod(places, mask.shape[1])
        begins = np.diff(rows, prepend=-1) != 0
        starts = np.flatnonzero(begins)
        lengths = tuple(np.diff(starts, append=len(places)).tolist())
        sides: dict[Padding, bool] = {
            "left of": bool(columns[starts].any()),
            "between": bool((np.diff(places)[~begins[1:]] != 1).any()),
        }
        numbers = torch.from_numpy(np.stack([places, begins.cumsum() - 1, columns]))
        on_device, own, column = numbers.to(mask.device, non_blocking=True)
        row = PackedRow(own, column if sides["between"] else None, known_lengths=lengths)
        padded = frozenset(side for side, there in sides.items() if there)
        return cls(on_device, (mask.shape[0], mask.shape[1]), row, mask, padded, has_numbers and bool((host > 1).any()))

    def take(self, values: torch.Tensor, *, axis: int = 0) -> torch.Tensor:
        """
        Return the values of the tokens as a batch of one row.

        Args:
            values: Tensor whose axes *axis* and *axis* + 1 are the batch's rows and positions.
            axis: Axis of the rows.
        """
        return values.flatten(axis, axis + 1).index_select(axis, self.places).unsqueeze(axis)

    def put_back(self, values: torch.Tensor) -> torch.Tensor:
        """
        Return the values of the packed row at their places in the batch, and zeros elsewhere.

        Args:
            values: Values of shape (1, tokens, …). The result has the shape (rows, positions, …).
        """
        return self.put_back_flat(values[0]).view(*self.shape, *values.shape[2:])

    def put_back_flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of shape (tokens, …) as (rows * positions, …), with zeros elsewhere."""
        rows, positions = self.shape
        return values.new_zeros(rows * positions, *values.shape[1:]).index_copy(0, self.places, values)

    @property
    def restarting_positions(self) -> torch.Tensor:
        """Positions that start at 0 in each sample; int64, shape (1, tokens)."""
        return (torch.arange(len(self.places), device=self.places.device) - self.row.starts_by_token)[None]


def read_row(position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None = None) -> PackedRow | None:
    """
    Return the row of a model's call. A sample begins wherever positions do not increase by 1.

    Args:
        position_ids: Position ids of shape (1, tokens), or of shape (4, 1, tokens) with the text
            positions first.
        attention_mask: Mask of the call, or None. With a mask, text positions may be missing.

    Returns:
        The row, perhaps with a single sample. The result is None if there are no position ids,
        several rows, or padding. It is also None if a call with a mask lacks text positions.

    Raises:
        PackplanError: Multimodal positions lack the row of text positions, and there is no mask.
    """
    if position_ids is None or position_ids.dim() not in (2, 3) or position_ids.shape[-2] != 1:
        return None
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2 and not attention_mask.all():
        return None
    if position_ids.dim() == 3 and position_ids.shape[0] != 4:
        if position_ids.shape[0] == 3 and attention_mask is None:
            message = "position_ids need the text positions as their first row, to find samples: pass 4 rows"
            raise PackplanError(message)
        return None
    text = position_ids.reshape(-1, position_ids.shape[-1])[0]
    return PackedRow(torch.cat([text.new_zeros(1), (text.diff() != 1).cumsum(0)]).long())


def prepend_text_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """
    Return the inputs of ms-swift's trainer with text positions as the first row of `position_ids`.

    transformers separates packed samples only by the row of text positions; without it, samples
    attend to each other. The input `text_position_ids` has the row of text positions. Either
    ms-swift's collator has split this row off the rows of media positions, or `Collator` has added
    it. Inputs with a mask, or without media positions, are returned unchanged.
    """
    positions, text = inputs.get("position_ids"), inputs.get("text_position_ids")
    if positions is None or text is None or "attention_mask" in inputs or len(positions) != 3:
        return inputs
    return {**inputs, "position_ids": torch.cat([text[None], positions])}


def current_row() -> PackedRow | None:
    """Return the row that a model with `keep_rows` is computing; None if the call is not packed."""
    return _ROW.get(None)


def row_inside_model() -> PackedRow | None:
    """
    Return the current row for layers and masks that depend on it; None if the call is not packed.

    Raises:
        PackplanError: The call is outside of the forward pass of a model with `keep_rows`.
    """
    try:
        return _ROW.get()
    except LookupError:
        message = "a layer was called outside of its model, so its row is unknown: call the whole model"
        raise PackplanError(message) from None


@contextmanager
def hold_variable(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value inside this context, then restore its earlier value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def using_row(row: PackedRow | None) -> AbstractContextManager[None]:
    """Make *row* the current row inside this context."""
    return hold_variable(_ROW, row)


def _checkpoint_with_row(
    checkpoint: Callable[..., Any], function: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Apply gradient checkpointing to a layer, and restore its row when the layer is recomputed."""
    try:
        row = _ROW.get()
    except LookupError:  # a vision tower, which ms-swift's hooks run before the model
        return checkpoint(function, *arguments, **options)

    def compute_with_row(*inner: Any, **keywords: Any) -> Any:
        with using_row(row):
            return function(*inner, **keywords)

    return checkpoint(compute_with_row, *arguments, **options)


def restore_rows_on_recompute(modules: Iterable[Any]) -> None:
    """Make modules with gradient checkpointing restore the row when they recompute layers."""
    for module in modules:
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpoint_with_row:
            module._gradient_checkpointing_func = partial(_checkpoint_with_row, checkpoint)  # noqa: SLF001  # has no public setter


def keep_rows(model: Any) -> None:
    """
    Make a model set `current_row` from its arguments in each forward pass.

    The inner models of a model also set `current_row` if they are called directly. Inside a call of
    the outer model, inner models use the outer model's row.
    """
    checkpointed = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    for module in dict.fromkeys((model, model.base_model, model.get_decoder())):
        module.forward = _forward_with_row(module.forward, checkpointed)


def _forward_with_row(original: Callable[..., Any], checkpointed: list[Any]) -> Callable[..., Any]:
    """Return a forward pass that sets the row, unless an outer forward pass has set it."""
    signature = inspect.signature(original)

    @wraps(original)
    def forward(*arguments: Any, **options: Any) -> Any:
        restore_rows_on_recompute(checkpointed)
        if _ROW in copy_context():
            return original(*arguments, **options)
        given = {**signature.bind_partial(*arguments).arguments, **options}
        with using_row(read_row(given.get("position_ids"), given.get("attention_mask"))):
            return original(*arguments, **options)

    return forward


def run_by_sample(model: torch.nn.Module, classes: Collection[str]) -> None:
    """
    Make layers run once for each sample of a packed row, so that no state passes between samples.

    Args:
        model: Model with `keep_rows`.
        classes: Names of the layers' classes.
    """
    for module in model.modules():
        if type(module).__name__ in classes:
            module.forward = _forward_by_sample(module.forward)


def _forward_by_sample(plain: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return a forward pass that splits a row's tensors by sample, and joins the samples' outputs.
    """

    @wraps(plain)
    def forward(*arguments: Any, **options: Any) -> Any:
        row = row_inside_model()
        if row is not None and row.share is not None:
            raise PackplanError("layers of the model carry a state along the row, so ranks cannot share the row")
        if row is None or len(row.lengths) == 1:
            return plain(*arguments, **options)
        options = {name: value for name, value in options.items() if not name.startswith(_BOUNDARIES)}
        samples = zip(_split_by_sample(arguments, row), _split_by_sample(options, row), strict=True)
        with using_row(None):  # each part is a row of one sample
            return _join_outputs([plain(*part, **named) for part, named in samples], row)

    return forward


def _split_by_sample(value: Any, row: PackedRow) -> list[Any]:
    """
    Return the value of an argument for each sample. A tensor whose axis 0 or 1 is the row is split
    into the samples' tokens; any other value is repeated unchanged.
    """
    for axis in (1, 0) if isinstance(value, torch.Tensor) else ():
        if value.dim() > axis and value.shape[axis] == len(row.sample_ids):
            return list(torch.split(value, list(row.lengths), axis))
    if type(value) in (tuple, list) and value:
        return [type(value)(items) for items in zip(*(_split_by_sample(item, row) for item in value), strict=True)]
    if type(value) is dict:
        split = {name: _split_by_sample(item, row) for name, item in value.items()}
        return [{name: items[number] for name, items in split.items()} for number in range(len(row.lengths))]
    return [value] * len(row.lengths)


def _join_outputs(outputs: list[Any], row: PackedRow) -> Any:
    """
    Join the outputs of samples along their token axis. A tensor without a token axis is taken from
    the last sample, and any other value from the first.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        for axis in (1, 0):
            if all(
                one.dim() > axis and one.shape[axis] == length for one, length in zip(outputs, row.lengths, strict=True)
            ):
                return torch.cat(outputs, axis)
        return outputs[-1]
    if type(first) in (tuple, list):
        return type(first)(_join_outputs(list(items), row) for items in zip(*outputs, strict=True))
    return first
