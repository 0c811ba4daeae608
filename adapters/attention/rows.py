"""
Which samples lie in the row that a model computes at the moment.

Most models read it off positions that restart; some never hand their positions to their masks, and
layers that carry a state along the row have no mask. `follow_rows` lets a model note its row while
it computes one: inside its forward pass alone, and for layers that are computed again in the
backward pass, as the row that they had.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, wraps
from itertools import pairwise
from typing import Any

import attrs
import torch

from packplan.core.errors import PackplanError


@attrs.frozen(eq=False)
class PackedRow:
    """The samples of a row, one after the other."""

    own: torch.Tensor
    """The sample of each token, counted from 0; int64 of shape (tokens,)."""

    @cached_property
    def first(self) -> torch.Tensor:
        """The first token of each token's sample; int64 of shape (tokens,)."""
        return torch.searchsorted(self.own, self.own)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        starts = torch.searchsorted(self.own, torch.arange(int(self.own[-1]) + 2, device=self.own.device))
        return tuple(stop - start for start, stop in pairwise(starts.tolist()))

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return len(self.own)

    def together(self, batch: Any, head: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  # transformers passes them
        """
        Return whether tokens are of one sample: a mask function as transformers' are.

        Args:
            batch: Index of the batch; there is one.
            head: Index of the head; all have the same mask.
            queries: Places of tokens in the row.
            keys: Places of tokens in the row; of a shape that broadcasts with the queries'.
        """
        return self.own[queries] == self.own[keys]

    def chunks_of(self, size: int) -> Callable[..., torch.Tensor]:
        """
        Return a mask function: whether tokens are of one chunk, counted from their sample's start.
        """

        def together(_: Any, __: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return (queries - self.first[queries]) // size == (keys - self.first[queries]) // size

        return together


_ROW: ContextVar[PackedRow | None] = ContextVar("row")


def row_of(position_ids: torch.Tensor | None) -> PackedRow | None:
    """
    Return the row whose samples begin where positions do not go on by one; None if it is no packed
    row.

    Args:
        position_ids: Shape (1, tokens), or (4, 1, tokens) with the positions of the text first.
    """
    if position_ids is None or position_ids.dim() not in (2, 3) or position_ids.shape[-2] != 1:
        return None
    if position_ids.dim() == 3 and position_ids.shape[0] != 4:
        return None
    text = position_ids.reshape(-1, position_ids.shape[-1])[0]
    return PackedRow(torch.cat([text.new_zeros(1), (text.diff() != 1).cumsum(0)]).long())


def _row_of_call(position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None) -> PackedRow | None:
    """Return the row of a call; PackplanError if it is one whose samples cannot be told."""
    if position_ids is not None and tuple(position_ids.shape[:2]) == (3, 1) and attention_mask is None:
        message = "the positions of a packed row lack their first row, the text's, which tells its samples apart"
        raise PackplanError(message)
    return row_of(position_ids)


def packed_row(tokens: int) -> PackedRow | None:
    """
    Return the row that the model computes, if it is one of so many tokens; None outside of models
    that follow rows.
    """
    row = _ROW.get(None)
    return row if row is not None and row.tokens == tokens else None


def row_of_layers() -> PackedRow | None:
    """
    Return the row that the model computes, for layers and masks that have to know it.

    Raises:
        PackplanError: They are computed outside of their model.
    """
    try:
        return _ROW.get()
    except LookupError:
        message = "a layer that has to know its row is computed outside of its model, which knows the row"
        raise PackplanError(message) from None


def outside_of_models() -> bool:
    """Return whether no model that follows its rows computes at the moment."""
    try:
        _ROW.get()
    except LookupError:
        return True
    return False


@contextmanager
def computing(row: PackedRow | None) -> Iterator[None]:
    """Let layers compute a row, inside."""
    token = _ROW.set(row)
    try:
        yield
    finally:
        _ROW.reset(token)


class _Bound:
    """A checkpointing function that lets layers have their own row when they are computed again."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if outside_of_models():  # a vision tower, which ms-swift's hooks run before the model
            return self._checkpoint(function, *arguments, **options)
        row = row_of_layers()

        def again(*inner: Any, **keywords: Any) -> Any:
            with computing(row):
                return function(*inner, **keywords)

        return self._checkpoint(again, *arguments, **options)


def follow_rows(model: torch.nn.Module) -> None:
    """Let a model note its row while it computes one; see the module."""
    plain, signature = model.forward, inspect.signature(model.forward)
    checkpointed: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]

    @wraps(plain)
    def forward(*arguments: Any, **options: Any) -> Any:
        for module in checkpointed:
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if checkpoint is not None and not isinstance(checkpoint, _Bound):
                module._gradient_checkpointing_func = _Bound(checkpoint)  # noqa: SLF001  # no public way
        given = {**signature.bind_partial(*arguments).arguments, **options}
        with computing(_row_of_call(given.get("position_ids"), given.get("attention_mask"))):
            return plain(*arguments, **options)

    model.forward = forward
