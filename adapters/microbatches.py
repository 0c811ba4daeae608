"""
A batch of sequences as tensors, and its microbatches: packed rows, or padded batches of the width that they need.

Rules: every field has one entry per sequence, along the first dimension of a tensor or in a list (images, texts). Tensors
that run along the sequence are right-padded to one width; which dimension that is, is found once, where the batch is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from core.errors import DataSetError
from core.shard import ShardChunk, Sharding

Field = Tensor | list[Any]

WEIGHTS = "weights"
"""Field of a shard: 1, or 0 for filler; float32, shape (batch,)."""


@attrs.frozen(eq=False)
class BatchedData:
    """
    Sequences of unequal length.

    >>> batch = BatchedData.of({"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=[2, 3])
    >>> batch.select([1, 0])["input_ids"].tolist(), batch.select([0]).truncate(2)["input_ids"].tolist()
    ([[7, 8, 9], [5, 6, 0]], [[5, 6]])
    """

    fields: Mapping[str, Field]

    lengths: Tensor
    """Tokens of each sequence; int64, shape (batch,)."""

    sequence_dims: Mapping[str, int]
    """Of each field that runs along the sequence, the dimension that does."""

    @classmethod
    def of(
        cls,
        fields: Mapping[str, Field],
        *,
        lengths: Sequence[int] | Tensor,
        sequence_dims: Mapping[str, int] | None = None,
    ) -> BatchedData:
        """
        Build a batch.

        Args:
            fields: Tensors of shape (batch, …), and lists of `batch` entries; `input_ids` is (batch, width).

            lengths: Tokens of each sequence.

            sequence_dims: Dimensions that run along the sequence, by field; None: the second, wherever it is as long as that of
                `input_ids`.

        Raises:
            DataSetError: A field has another number of entries, or a sequence is longer than the batch is wide.
        """
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
        for name, field in fields.items():
            if len(field) != len(lengths):
                message = f"field {name} has {len(field):,} entries, but the batch has {len(lengths):,} sequences"
                raise DataSetError(message)
        if sequence_dims is None:
            width = _tensor(fields, "input_ids").shape[1]
            sequence_dims = {
                name: 1
                for name, field in fields.items()
                if isinstance(field, Tensor) and field.ndim > 1 and field.shape[1] == width
            }
        batch = cls(MappingProxyType(dict(fields)), lengths, MappingProxyType(dict(sequence_dims)))
        if len(lengths) and int(lengths.max()) > batch.width:
            message = f"a sequence has {int(lengths.max()):,} tokens, but the batch is {batch.width:,} wide"
            raise DataSetError(message)
        return batch

    @property
    def width(self) -> int:
        """Positions of each sequence, padding included."""
        return self.tensor("input_ids").shape[self.sequence_dims["input_ids"]]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> Field:
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def tensor(self, name: str) -> Tensor:
        """Return a field that is a tensor."""
        return _tensor(self.fields, name)

    def with_fields(self, **fields: Field) -> BatchedData:
        """Return the batch with more fields, of one entry per sequence; tensors as wide as the batch run along it."""
        added = {
            name: 1
            for name, field in fields.items()
            if isinstance(field, Tensor) and field.ndim > 1 and field.shape[1] == self.width
        }
        return BatchedData.of(
            {**self.fields, **fields}, lengths=self.lengths, sequence_dims={**self.sequence_dims, **added}
        )

    def select(self, indices: Sequence[int] | Tensor) -> BatchedData:
        """Return the sequences at *indices*, in that order; an index may repeat."""
        places = torch.as_tensor(indices, dtype=torch.int64)
        listed = places.tolist()
        fields = {
            name: field[places.to(field.device)] if isinstance(field, Tensor) else [field[place] for place in listed]
            for name, field in self.fields.items()
        }
        return BatchedData(fields, self.lengths[places], self.sequence_dims)

    def slice(self, start: int, stop: int) -> BatchedData:
        """Return sequences *start* to *stop* - 1, without a copy."""
        fields = {name: field[start:stop] for name, field in self.fields.items()}
        return BatchedData(fields, self.lengths[start:stop], self.sequence_dims)

    def truncate(self, width: int) -> BatchedData:
        """Return the batch *width* positions wide, in every field that runs along the sequence: padding is cut, or added as 0."""
        fields = {
            name: _fitted(field, self.sequence_dims[name], width)
            if isinstance(field, Tensor) and name in self.sequence_dims
            else field
            for name, field in self.fields.items()
        }
        return BatchedData(fields, self.lengths, self.sequence_dims)

    def to(self, device: torch.device) -> BatchedData:
        """Return the batch with its tensors on a device; lengths stay, since they steer the work."""
        fields = {name: field.to(device) if isinstance(field, Tensor) else field for name, field in self.fields.items()}
        return BatchedData(fields, self.lengths, self.sequence_dims)

    def shard(self, sharding: Sharding) -> list[ShardedData]:
        """Return what each worker holds, with its weights."""
        held = []
        for chunks in sharding:
            weights = torch.cat([torch.as_tensor(chunk.weights) for chunk in chunks]).to(torch.float32)
            mine = self.select(torch.cat([torch.as_tensor(chunk.indices) for chunk in chunks]))
            held.append(ShardedData(mine.with_fields(**{WEIGHTS: weights}), chunks))
        return held


def concatenate(batches: Sequence[BatchedData]) -> BatchedData:
    """Return the sequences of all batches, at least one, with the same fields; padded with 0 to the widest."""
    width = max(batch.width for batch in batches)
    wide = [batch.truncate(width) for batch in batches]
    fields: dict[str, Field] = {}
    for name, field in wide[0].fields.items():
        if isinstance(field, Tensor):
            fields[name] = torch.cat([batch.tensor(name) for batch in wide])
        else:
            fields[name] = [entry for batch in wide for entry in batch[name]]
    return BatchedData(fields, torch.cat([batch.lengths for batch in wide]), wide[0].sequence_dims)


@attrs.frozen(eq=False)
class ShardedData:
    """What one worker holds of a batch: the sequences of all its slots, and how they are cut."""

    data: BatchedData

    chunks: tuple[ShardChunk, ...]

    def microbatches(self, number: int) -> Iterator[tuple[BatchedData, int]]:
        """Yield the microbatches of a chunk, each with its width; padded ones are as wide as that, packed ones are not packed yet."""
        first = sum(len(chunk.indices) for chunk in self.chunks[:number])
        chunk = self.chunks[number]
        for (start, stop), width in zip(chunk.boundaries, chunk.widths.tolist(), strict=True):
            yield self.data.slice(first + start, first + stop), width

    def padded(self, number: int) -> Iterator[BatchedData]:
        """Yield the padded microbatches of a chunk, every field that runs along the sequence cut to their width."""
        for microbatch, width in self.microbatches(number):
            yield microbatch.truncate(width)

    def packed(self, number: int, *, multiple: int, row_length: int | None = None) -> Iterator[PackedRow]:
        """Yield the packed rows of a chunk; see `pack_row`."""
        for microbatch, _ in self.microbatches(number):
            yield pack_row(microbatch, multiple=multiple, row_length=row_length)


@attrs.frozen(eq=False)
class PackedRow:
    """A microbatch as one row."""

    input_ids: Tensor
    """Shape (1, row); padding is 0."""

    position_ids: Tensor
    """They restart with each sequence; shape (1, row)."""

    cu_seqlens: Tensor
    """Tokens before each sequence, and in all, without padding; int32, shape (num_sequences + 1,)."""

    cu_seqlens_padded: Tensor
    """Positions before each sequence, and in all; int32, shape (num_sequences + 1,)."""

    data: BatchedData
    """The sequences as they were, unpacked."""

    @property
    def max_seqlen(self) -> int:
        """Positions of the longest sequence, as variable-length attention wants it."""
        return int(self.cu_seqlens_padded.diff().max())

    def unpacked(self, values: Tensor) -> Tensor:
        """
        Return values of the row, sequence by sequence, padded with 0 to the batch's width.

        Args:
            values: Shape (row, …).
        """
        starts, lengths = self.cu_seqlens_padded[:-1], self.data.lengths
        batch = values.new_zeros((len(lengths), self.data.width, *values.shape[1:]))
        for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            batch[number, :length] = values[start : start + length]
        return batch


def pack_row(batch: BatchedData, *, multiple: int, row_length: int | None = None) -> PackedRow:
    """
    Put the sequences of a batch into one row.

    Args:
        batch: What becomes a row.

        multiple: Each sequence is padded to a multiple of it.

        row_length: Positions that the row is padded to, behind its last sequence: stages of a pipeline exchange buffers of one shape.

    Raises:
        DataSetError: The sequences need more than *row_length* positions.
    """
    lengths = batch.lengths
    padded = (lengths + multiple - 1) // multiple * multiple
    total = int(padded.sum())
    if row_length is not None:
        if total > row_length:
            message = f"sequences of {total:,} positions do not fit a row of {row_length:,}: raise the row length"
            raise DataSetError(message)
        padded[-1] += row_length - total
    ends = padded.cumsum(0)
    starts = ends - padded
    row = int(ends[-1])
    source = batch.tensor("input_ids")
    positions = torch.arange(row) - torch.repeat_interleave(starts, padded)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), padded)
    real = positions < lengths[owner]
    ids = source.new_zeros(row)
    ids[real.to(ids.device)] = source[owner[real].to(ids.device), positions[real].to(ids.device)]
    zero = torch.zeros(1, dtype=torch.int64)
    return PackedRow(
        input_ids=ids[None],
        position_ids=positions.to(ids.device)[None],
        cu_seqlens=torch.cat([zero, lengths.cumsum(0)]).to(torch.int32),
        cu_seqlens_padded=torch.cat([zero, ends]).to(torch.int32),
        data=batch,
    )


def _tensor(fields: Mapping[str, Field], name: str) -> Tensor:
    field = fields[name]
    if not isinstance(field, Tensor):
        message = f"field {name} is a list, where a tensor is needed"
        raise DataSetError(message)
    return field


def _fitted(field: Tensor, dim: int, width: int) -> Tensor:
    have = field.shape[dim]
    if width <= have:
        return field.narrow(dim, 0, width)
    shape = list(field.shape)
    shape[dim] = width - have
    return torch.cat([field, field.new_zeros(shape)], dim=dim)
