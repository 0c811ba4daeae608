"""Real tokens of a padded batch as one packed row, and results of that row as the batch again."""

from __future__ import annotations

from typing import Literal

import attrs
import torch

from packplan.adapters.attention.rows import PackedRow

PADDINGS: tuple[Padding, ...] = ("left of", "between")

Padding = Literal["left of", "between"]
"""Where rows have padding that the states of layers may pass through; on the right, none does."""


@attrs.frozen(eq=False)
class RealTokens:
    """
    Tokens of a padded batch that are no padding, row after row.

    >>> tokens = RealTokens.from_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]))
    >>> tokens.take(torch.tensor([[5, 6, 0], [0, 7, 8]]))
    tensor([[5, 6, 7, 8]])
    >>> tokens.put_back(torch.tensor([[5, 6, 7, 8]]))
    tensor([[5, 6, 0],
            [0, 7, 8]])
    """

    places: torch.Tensor
    """Place of each token in the batch, counted row by row; int64 of shape (tokens,)."""

    shape: tuple[int, int]
    """Rows of the batch, and positions of each."""

    row: PackedRow
    """The packed row; each row of the batch that has a token is a sample of it."""

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> RealTokens:
        """Return the tokens where *mask*, of shape (rows, positions), is not 0."""
        places = mask.flatten().nonzero().flatten()
        begins = (places // mask.shape[1]).diff() != 0
        own = torch.cat([places.new_zeros(min(1, len(places))), begins.cumsum(0)])
        has_holes = bool(((places.diff() != 1) & ~begins).any())
        row = PackedRow(own, places % mask.shape[1] if has_holes else None)
        return cls(places, (mask.shape[0], mask.shape[1]), row)

    def take(self, values: torch.Tensor, *, axis: int = 0) -> torch.Tensor:
        """
        Return the values of the tokens as a batch of one row.

        Args:
            values: Tensor with the batch's rows and positions as its axes *axis* and *axis* + 1.
            axis: Axis of the rows.
        """
        return values.flatten(axis, axis + 1).index_select(axis, self.places).unsqueeze(axis)

    def put_back(self, values: torch.Tensor) -> torch.Tensor:
        """
        Return values of the packed row at their places in the batch, and zeros elsewhere.

        Args:
            values: Shape (1, tokens, …). The result has the shape (rows, positions, …).
        """
        return self.put_back_flat(values[0]).view(*self.shape, *values.shape[2:])

    def put_back_flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of shape (tokens, …) as (rows * positions, …), with zeros elsewhere."""
        rows, positions = self.shape
        return values.new_zeros(rows * positions, *values.shape[1:]).index_copy(0, self.places, values)

    @property
    def paddings(self) -> set[Padding]:
        """Sides of real tokens that have padding."""
        columns = self.places % self.shape[1]
        starts = self.row.first == torch.arange(len(self.places), device=self.places.device)
        sides: dict[Padding, bool] = {
            "left of": bool(columns[starts].any()),
            "between": self.row.columns is not None,
        }
        return {side for side, there in sides.items() if there}

    @property
    def restarting(self) -> torch.Tensor:
        """Positions that begin at 0 with each sample; int64 of shape (1, tokens)."""
        return (torch.arange(len(self.places), device=self.places.device) - self.row.first)[None]
