"""
Splits a batch of sequences into microbatches, each of which is a packed row or a padded batch.

`BatchedData` is the batch, `ShardedData` is a worker's part of a batch, and `Microbatch` is the
input of one forward pass.

Each field is a tensor whose first dimension has an entry for each sequence, or a list (images,
texts) with an entry for each sequence. A tensor with a value for each token is right-padded along
its sequence dimension. That dimension is known by the field's name, or declared when the batch is
made. Each field has its own padding value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import chain
from types import MappingProxyType
from typing import Any, Self

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packplan.core.batch import IGNORED_LABEL
from packplan.core.context_parallel import PackedLayout, cu_seqlens
from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import IntArray, as_whole_number
from packplan.core.shard import Mode, ShardBatch, Sharding, sequence_dims

Field = Tensor | list[Any]

WEIGHTS = "weights"
"""Name of a shard's field that is 1 for sequences and 0 for filler; float32, shape (batch,)."""


@attrs.frozen(eq=False)
class BatchedData:
    """
    Batch of sequences of different lengths: tensors and lists with an entry for each sequence.

    >>> fields = {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}
    >>> batch = BatchedData.from_fields(fields, lengths=[2, 3])
    >>> batch.select([1, 0])["input_ids"].tolist()
    [[7, 8, 9], [5, 6, 0]]
    >>> batch.select([0]).truncate(2)["input_ids"].tolist()
    [[5, 6]]
    """

    fields: Mapping[str, Field]

    lengths: Tensor
    """Number of tokens in each sequence; int64, shape (batch,)."""

    sequence_dims: Mapping[str, int | None]
    """For each tensor field, the dimension that runs along the sequence, or None."""

    pad_values: Mapping[str, float] = MappingProxyType({})
    """Padding value by field; 0 for fields without an entry."""

    input_key: str = "input_ids"
    """Name of the field with the tokens."""

    input_lengths_key: str | None = None
    """Name of the field with the lengths; None if the batch has no such field."""

    @classmethod
    def from_fields(
        cls,
        fields: Mapping[str, Field],
        *,
        lengths: Sequence[int] | Tensor | None = None,
        sequence_dims: Mapping[str, int | None] = MappingProxyType({}),
        pad_values: Mapping[str, float] | None = None,
        input_key: str = "input_ids",
        input_lengths_key: str = "input_lengths",
    ) -> Self:
        """
        Build a batch from its fields.

        Args:
            fields: Tensors of shape (batch, …), and lists of `batch` entries. The tokens have the
                shape (batch, width).
            lengths: Number of tokens in each sequence. None reads these numbers from the field that
                *input_lengths_key* names.
            sequence_dims: For some fields, the dimension that runs along the sequence, or None. An
                entry is required for a field with a dimension of size `width`, unless it is the
                only one and `core.shard.inputs.TOKEN_FIELDS` has the field's name.
            pad_values: Padding value by field, such as the pad id for tokens and -100 for labels;
                0 for fields without an entry.
            input_key: Name of the field with the tokens.
            input_lengths_key: Name of the field with the lengths; the batch need not have it.

        Raises:
            ArgumentError: Fields have different numbers of entries, a sequence is longer than the
                batch's width, or tokens, lengths, dimensions or padding values are invalid.
            ArgumentError: A row of `attention_mask` is not 1 at the row's first tokens and 0 after
                them.
        """
        if lengths is None and input_lengths_key not in fields:
            message = f"a batch needs lengths: give lengths=…, or the field {input_lengths_key}"
            raise ArgumentError("batch", message)
        message = "lengths has to be a list of whole numbers of at least 1, one for each sequence"
        of_field = fields.get(input_lengths_key)
        checked = _to_int64(of_field if lengths is None else lengths, 1, float("inf"), message)
        if of_field is not None:
            if lengths is not None and _to_int64(of_field, 1, float("inf"), message).tolist() != checked.tolist():
                raise ArgumentError("batch", f"lengths differ from the field {input_lengths_key}: give only one")
            fields = {**fields, input_lengths_key: checked}
        ids = fields.get(input_key)
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise ArgumentError("batch", f"a batch needs the field {input_key}, a tensor of shape (batch, width)")
        for name, field in fields.items():
            sized = field.ndim > 0 if isinstance(field, Tensor) else isinstance(field, Sized)
            if not sized or len(field) != len(checked):
                number = f"{len(field):,}" if sized else "no"
                message = f"field {name} has {number} entries, but the batch has {len(checked):,} sequences"
                raise ArgumentError("batch", message)
        batch = cls(
            MappingProxyType(dict(fields)),
            checked,
            _dims(fields, sequence_dims, input_key),
            _check_pad_values(fields, pad_values or {}),
            input_key,
            None if of_field is None else input_lengths_key,
        )
        if len(checked) and int(checked.max()) > batch.width:
            fact = f"a sequence has {int(checked.max()):,} tokens, but the batch is {batch.width:,} wide"
            raise ArgumentError("batch", f"{fact}: correct lengths")
        _check_mask(batch)
        return batch

    @property
    def width(self) -> int:
        """Number of positions for each sequence in the field of tokens, padding included."""
        return self.tensor(self.input_key).shape[1]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> Field:
        if name not in self.fields:
            raise ArgumentError("batch", f"the batch has no field {name}: its fields are {', '.join(self.fields)}")
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def tensor(self, name: str) -> Tensor:
        """Return the field *name*, which has to be a tensor; ArgumentError if it is not."""
        field = self[name]
        if not isinstance(field, Tensor):
            raise ArgumentError("batch", f"field {name} is a list, but has to be a tensor")
        return field

    def pad_value(self, name: str) -> float:
        """Return the padding value of the field *name*, which is 0 by default."""
        return self.pad_values.get(name, 0)

    def with_fields(self, sequence_dims: Mapping[str, int | None] = MappingProxyType({}), /, **fields: Field) -> Self:
        """
        Return the batch with fields added or replaced, which are checked as in `from_fields`.

        Args:
            sequence_dims: Sequence dimensions of the new fields, as in `from_fields`.
            **fields: Tensors and lists with one entry for each sequence.
        """
        given = {self.input_key: self[self.input_key], **fields}
        new = self.from_fields(
            given,
            lengths=self.lengths,
            sequence_dims=sequence_dims,
            pad_values={name: value for name, value in self.pad_values.items() if name in given},
            input_key=self.input_key,
            input_lengths_key=self.input_lengths_key or "",
        )
        dims = {name: dim for name, dim in self.sequence_dims.items() if name not in fields} | {**new.sequence_dims}
        merged = {**self.fields, **new.fields}
        return attrs.evolve(self, fields=merged, sequence_dims=_dims(merged, dims, self.input_key))

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """
        Return a batch of the sequences at *indices*, in that order; an index may repeat.

        ArgumentError is raised if an index is out of range.
        """
        message = f"indices have to be whole numbers from 0 to below {len(self):,}, the number of sequences"
        places = _to_int64(indices, 0, len(self), message)
        listed = places.tolist()
        fields = {
            name: field[places.to(field.device)] if isinstance(field, Tensor) else [field[place] for place in listed]
            for name, field in self.fields.items()
        }
        return attrs.evolve(self, fields=fields, lengths=self.lengths[places])

    def slice(self, start: int, stop: int) -> Self:
        """Return a batch of sequences *start* to *stop* - 1; its tensors are views."""
        fields = {name: field[start:stop] for name, field in self.fields.items()}
        return attrs.evolve(self, fields=fields, lengths=self.lengths[start:stop])

    def truncate(self, width: int) -> Self:
        """
        Return the batch with each sequence dimension truncated or right-padded to *width*.

        A sequence that is longer than *width* loses its last tokens.
        """
        as_whole_number("width", width)
        lengths = self.lengths.clamp(max=width)
        fields = {
            name: _resize(field, self.sequence_dims[name], width, self.pad_value(name))
            if isinstance(field, Tensor)
            else field
            for name, field in self.fields.items()
        }
        if self.input_lengths_key is not None:
            fields[self.input_lengths_key] = lengths
        return attrs.evolve(self, fields=fields, lengths=lengths)

    def to(self, device: torch.device) -> Self:
        """Return the batch with its tensor fields on a device; `lengths` are not moved."""
        fields = {name: field.to(device) if isinstance(field, Tensor) else field for name, field in self.fields.items()}
        return attrs.evolve(self, fields=fields)

    def shard(self, sharding: Sharding) -> list[ShardedData]:
        """
        Return the part of the batch for each worker, with the additional field `WEIGHTS`.

        ArgumentError is raised if the sharding was made for other lengths.
        """
        if sharding.lengths.tolist() != self.lengths.tolist():
            raise ArgumentError("batch", "the sharding was made from other lengths: make it from this batch's lengths")
        held = []
        for global_batches in sharding:
            weights = torch.cat([torch.tensor(batch.weights) for batch in global_batches]).to(torch.float32)
            mine = self.select(torch.cat([torch.tensor(batch.indices) for batch in global_batches]))
            data = mine.with_fields(**{WEIGHTS: weights})
            held.append(ShardedData(data, sharding.mode, sharding.multiple, global_batches))
        return held


def concatenate(batches: Sequence[BatchedData]) -> BatchedData:
    """
    Return one batch of the sequences of all batches, padded to the width of the widest batch.

    Raises:
        ArgumentError: *batches* is empty, or a batch's fields differ from those of the first batch
            in name, kind, shape or padding.
    """
    if not batches:
        raise ArgumentError("batch", "batches is empty: give at least one batch to concatenate")
    for number, batch in enumerate(batches):
        if other := list(_differences(batches[0], batch)):
            message = (
                f"batch {number} has other fields than batch 0: {'; '.join(other)}: give all batches the same fields, "
                "sequence_dims and pad_values"
            )
            raise ArgumentError("batch", message)
    width = max(batch.width for batch in batches)
    wide = [batch.truncate(width) for batch in batches]
    fields: dict[str, Field] = {}
    for name, field in wide[0].fields.items():
        if isinstance(field, Tensor):
            fields[name] = torch.cat([batch.tensor(name) for batch in wide])
        else:
            fields[name] = [entry for batch in wide for entry in batch[name]]
    return attrs.evolve(wide[0], fields=fields, lengths=torch.cat([batch.lengths for batch in wide]))


def _differences(first: BatchedData, batch: BatchedData) -> Iterator[str]:
    """Yield a description of each field that keeps two batches from being concatenated."""
    for name in dict.fromkeys([*first.fields, *batch.fields]):
        wanted, found = (_describe_field(one, name) for one in (first, batch))
        if wanted != found:
            yield f"{name} is {found}, but in batch 0 it is {wanted}"


def _describe_field(batch: BatchedData, name: str) -> str:
    """Describe a field's type, shape and padding; fields with equal texts can be concatenated."""
    field = batch.fields.get(name)
    if not isinstance(field, Tensor):
        return "absent" if field is None else "a list"
    sizes = ["batch", *map(str, field.shape[1:])]
    if (dim := batch.sequence_dims[name]) is not None:
        sizes[dim] = "width"
    dtype = str(field.dtype).removeprefix("torch.")
    padded = f", padded with {pad}" if (pad := batch.pad_value(name)) else ""
    return f"a tensor of {dtype}, shape ({', '.join(sizes)}){padded}"


@attrs.frozen(eq=False)
class ShardedData:
    """One worker's part of a batch: sequences and filler, which it splits into microbatches."""

    data: BatchedData

    mode: Mode

    multiple: int
    """Each sequence of a packed row is padded to a multiple of this number of tokens."""

    global_batches: tuple[ShardBatch, ...]

    def __iter__(self) -> Iterator[Microbatch]:
        """Yield the microbatches of all global batches."""
        return chain.from_iterable(map(self.microbatches, range(len(self.global_batches))))

    @property
    def digest(self) -> str:
        """SHA-256 of the lengths and tokens, whatever their type, padding and device."""
        ids, lengths = self.data.tensor(self.data.input_key).detach().cpu(), self.data.lengths.cpu()
        tokens = ids[torch.arange(self.data.width) < lengths[:, None]].to(torch.float64)  # holds ids and fractions
        return hashlib.sha256(lengths.numpy().tobytes() + tokens.numpy().tobytes()).hexdigest()

    def microbatches(self, batch: int) -> Iterator[Microbatch]:
        """Yield this worker's microbatches of global batch *batch*, counted from 0."""
        first = sum(len(earlier.indices) for earlier in self.global_batches[:batch])
        cut = self.global_batches[batch]
        for (start, stop), width in zip(cut.boundaries, cut.widths.tolist(), strict=True):
            held = self.data.slice(first + start, first + stop)
            if self.mode == "packed":
                yield pack_row(held, multiple=self.multiple, row_length=width)
            else:
                yield padded_microbatch(held.truncate(width))


@attrs.frozen(eq=False)
class Microbatch:
    """Input of one forward pass: one packed row, or a padded row for each sequence."""

    input_ids: Tensor
    """Tokens; shape (rows, width), padded with `pad_id`."""

    layout: PackedLayout
    """Layout of the sequences in all rows, as if the rows were joined into one."""

    data: BatchedData
    """Unpacked sequences of the microbatch."""

    @property
    def position_ids(self) -> Tensor:
        """Position ids, which restart at 0 for each sequence; shape (rows, width)."""
        return torch.as_tensor(self.layout.position_ids, device=self.input_ids.device).view(self.input_ids.shape)

    @property
    def pad_id(self) -> int:
        """Token id that stands for padding."""
        return int(self.data.pad_value(self.data.input_key))

    @property
    def labels(self) -> Tensor:
        """
        Labels in transformers' form, which are not shifted; shape (rows, width).

        Labels are the field `labels`, or the tokens if there is no such field. At the first token
        of each sequence and at padding, labels are -100.
        """
        name = "labels" if "labels" in self.data else self.data.input_key
        source = self.data.tensor(name)
        flat = source.new_full((self.layout.num_positions,), IGNORED_LABEL)
        counts = self.layout.is_token & (self.layout.position_ids > 0)
        sequence, position = (_pick(of, counts, source) for of in (self.layout.sequence, self.layout.position_ids))
        flat[torch.as_tensor(counts, device=flat.device)] = source[sequence, position]
        return flat.view(self.input_ids.shape)

    @property
    def attention_mask(self) -> Tensor | None:
        """
        Mask that is true at tokens; bool, shape (rows, width), or None for a single row.

        A single row needs no mask. Either the row is packed, and position ids restart with each
        sequence; or the row has one sequence, with padding only after the sequence.
        """
        if len(self.input_ids) == 1:
            return None
        return torch.as_tensor(self.layout.is_token, device=self.input_ids.device).view(self.input_ids.shape)

    @property
    def cu_seqlens(self) -> Tensor:
        """Cumulative token counts of the sequences, from 0; int32, shape (num_sequences + 1,)."""
        return torch.tensor(self.layout.cu_seqlens, dtype=torch.int32)

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """Cumulative position counts with padding, from 0; int32, shape (num_sequences + 1,)."""
        return torch.tensor(self.layout.cu_seqlens_padded, dtype=torch.int32)

    @property
    def max_seqlen(self) -> int:
        """Largest number of positions of a sequence with padding, which varlen kernels need."""
        return int(np.diff(self.layout.cu_seqlens_padded).max())

    def unpacked(self, values: Tensor, *, pad_value: float = 0) -> Tensor:
        """
        Return values with one row for each sequence; shape (num_sequences, width, …).

        Rows are as wide as those of `data`, and values of padding positions are left out.

        Args:
            values: Values of all positions, shape (rows * width, …).
            pad_value: Padding value after the last token of each sequence.

        Raises:
            ArgumentError: The number of values differs from the number of positions.
        """
        if values.shape[:1] != (self.layout.num_positions,):
            shape, positions = tuple(values.shape), counted(self.layout.num_positions, "position")
            raise ArgumentError("batch", f"values have the shape {shape}, but the microbatch has {positions}")
        batch = values.new_full((len(self.data), self.data.width, *values.shape[1:]), pad_value)
        token = self.layout.is_token
        sequence, position = (_pick(of, token, values) for of in (self.layout.sequence, self.layout.position_ids))
        batch[sequence, position] = values[torch.as_tensor(token, device=values.device)]
        return batch


def padded_microbatch(batch: BatchedData) -> Microbatch:
    """Return a padded batch as one microbatch, with a row for each sequence."""
    layout = PackedLayout([0, *batch.lengths.cumsum(0).tolist()], np.arange(len(batch) + 1) * batch.width)
    return Microbatch(batch.tensor(batch.input_key), layout, batch)


def pack_row(batch: BatchedData, *, multiple: int, row_length: int | None = None) -> Microbatch:
    """
    Pack the sequences of a batch into one row.

    Args:
        batch: Batch of at least one sequence.
        multiple: Each sequence is padded to a multiple of this number of tokens.
        row_length: Number of positions to which the row is padded at its end; None adds none.
            Pipeline stages need rows of one length, since they exchange buffers of one shape.

    Raises:
        ArgumentError: The batch is empty, or its sequences need more than *row_length* positions.
    """
    if not len(batch):
        raise ArgumentError("batch", "the batch has no sequences, so no row can be packed: give at least one sequence")
    lengths = batch.lengths.tolist()
    ends = cu_seqlens(lengths, pad_to_multiple_of=multiple)
    if row_length is not None:
        if ends[-1] > row_length:
            message = f"the sequences have {ends[-1]:,} positions in total with padding, but the row has {row_length:,}"
            raise ArgumentError("batch", f"{message}: raise row_length")
        ends[-1] = row_length
    layout = PackedLayout(cu_seqlens(lengths), ends)
    source = batch.tensor(batch.input_key)
    ids = source.new_full((layout.num_positions,), batch.pad_value(batch.input_key))
    sequence, position = (_pick(of, layout.is_token, ids) for of in (layout.sequence, layout.position_ids))
    ids[torch.as_tensor(layout.is_token, device=ids.device)] = source[sequence, position]
    return Microbatch(ids[None], layout, batch)


def _pick(values: IntArray, mask: NDArray[np.bool_], like: Tensor) -> Tensor:
    """Return *values* where *mask* is true, as an index tensor on the device of *like*."""
    return torch.as_tensor(values[mask], device=like.device)


def _dims(fields: Mapping[str, Field], declared: Mapping[str, int | None], input_key: str) -> Mapping[str, int | None]:
    """Return, for each tensor field, the dimension that runs along the sequence, or None."""
    shapes = {name: field.shape for name, field in fields.items() if isinstance(field, Tensor)}
    return MappingProxyType(sequence_dims(shapes, input_key=input_key, declared=declared))


def _check_mask(batch: BatchedData) -> None:
    """Raise an ArgumentError if a row of `attention_mask` is not 1 at its tokens, then 0."""
    mask = batch.fields.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != (len(batch), batch.width):
        return
    tokens = torch.arange(batch.width) < batch.lengths.cpu()[:, None]
    if (wrong := (mask.cpu() != tokens).any(1)).any():
        row = int(wrong.int().argmax())
        ones, length = int(mask[row].sum()), counted(int(batch.lengths[row]), "token")
        if not torch.equal(mask[row].cpu() == 1, torch.arange(batch.width) < ones):
            order = "attention_mask.argsort(1, descending=True, stable=True)"
            fact = f"row {row} of attention_mask is not 1 for its {length}, then 0: move the tokens of each field to "
            raise ArgumentError("batch", f"{fact}the front, by field.gather(1, {order})")
        advice = "give lengths=attention_mask.sum(1)" if ones else "remove the sequence"
        raise ArgumentError("batch", f"row {row} has {length} by lengths, but {ones:,} by attention_mask: {advice}")


def _check_pad_values(fields: Mapping[str, Field], pad_values: Mapping[str, float]) -> Mapping[str, float]:
    """Return *pad_values*; ArgumentError if a field is not a tensor or cannot hold its value."""
    for name, value in pad_values.items():
        field = fields.get(name)
        if not isinstance(field, Tensor):
            message = f"pad_values has {name}, which is not a tensor of the batch: name only fields that are tensors"
            raise ArgumentError("batch", message)
        with suppress(RuntimeError, TypeError):
            if field.new_full((), value).item() == value or field.is_floating_point():
                continue
        kind = str(field.dtype).removeprefix("torch.")
        raise ArgumentError("batch", f"the pad value of {name} is {value!r}, which {kind} cannot represent")
    return MappingProxyType(dict(pad_values))


def _to_int64(values: Any, least: int, below: float, message: str) -> Tensor:
    """
    Return whole numbers as an int64 tensor of shape (num,).

    ArgumentError is raised unless all values are whole numbers, at least *least* and less than
    *below*.
    """
    with suppress(TypeError, ValueError, RuntimeError):
        numbers = torch.as_tensor(values)
        if len(numbers):
            torch.iinfo(numbers.dtype)  # TypeError where numbers are fractions, or true and false
        if numbers.ndim == 1 and all(least <= number < below for number in numbers.tolist()):
            return numbers.to(torch.int64)
    raise ArgumentError("batch", message)


def _resize(field: Tensor, dim: int | None, width: int, pad_value: float) -> Tensor:
    if dim is None:
        return field
    have = field.shape[dim]
    if width <= have:
        return field.narrow(dim, 0, width)
    shape = list(field.shape)
    shape[dim] = width - have
    return torch.cat([field, field.new_full(shape, pad_value)], dim=dim)
