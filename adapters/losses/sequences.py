"""
Computes losses on packed logits, sequence by sequence (`PackedLoss`) or all at once (`FusedLoss`).

The data are named fields of a batch of sequences, padded on the right. One dimension of a field may
run along the sequence (`core.shard.inputs`). Entry t in that dimension belongs to token t, which
the logits at t - 1 predict. So the entry of a sequence's first token is never used. The field
`token_mask` has the weight of each token in the loss; a token with weight 0 does not count.

Losses are divided by the number of sequences or tokens in the global batch. So the losses and
metrics of sequences, microbatches and ranks can be summed. Metrics named `…_min` and `…_max` are
combined by minimum and maximum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import attrs
import torch

from packplan.adapters.losses.token_statistics import NO_TARGET, token_statistics
from packplan.core.context_parallel import PackedLayout, cu_seqlens
from packplan.core.errors import ArgumentError
from packplan.core.shard import sequence_dims

Metrics = Mapping[str, Any]

Normalisation = Literal["token", "sequence", "constant"]

DERIVED = frozenset({"entropy", "sequence_tokens", "sequence_log_ratio"})
"""
Fields that `FusedLoss` computes for a loss. `entropy` is the entropy of the token's distribution,
in nats. `sequence_tokens` is the total weight of the sequence's tokens. `sequence_log_ratio` is the
log-probability minus the field `old_log_probabilities`, as a weighted mean over the sequence's
tokens. A loss that reads `sequence_log_ratio` has to name `old_log_probabilities` in its fields
too. No gradient flows through `sequence_log_ratio`.
"""

_PREFERENCES = {"bpo", "cpo", "dpo", "ipo", "kto", "orpo", "preference", "preferences", "rpo", "simpo"}
"""Words in a loss's name which mean that the loss compares answers with each other."""


_EXTREMES = {"_min": (torch.amin, torch.inf), "_max": (torch.amax, -torch.inf)}
"""
For each ending of a metric's name, the reduction over tokens, and the value that stands in for a
token that does not count.
"""


class SequenceLoss(Protocol):
    """Ordinary loss of a padded batch of sequences, written without packing in mind."""

    def __call__(
        self, logits: torch.Tensor, data: Mapping[str, Any], *, num_sequences: float, num_tokens: float
    ) -> tuple[torch.Tensor, Metrics]:
        """
        Return the loss (a scalar tensor) and the metrics by name.

        Args:
            logits: Logits of shape (batch, length, vocabulary).
            data: Fields of the batch.
            num_sequences: Number of sequences in the global batch that have a token that counts.
            num_tokens: Total weight of the tokens in the global batch.
        """


class TokenLoss(Protocol):
    """
    Loss that is a weighted sum over tokens; each term depends on the fields of one token only.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that the loss reads, from the data or from `DERIVED`."""

    @property
    def normalisation(self) -> Normalisation:
        """
        Kind of mean, which is `token`, `sequence` or `constant`.

        `token` is the mean over all tokens. `sequence` is the mean, over sequences, of each
        sequence's mean over tokens. `constant` is the mean, over sequences, of each sequence's sum
        over tokens divided by `divisor`. Tokens are weighted by `token_mask`. A total weight or a
        number of sequences below 1 counts as 1.
        """

    @property
    def divisor(self) -> float:
        """Number by which the normalisation `constant` divides the token sum of each sequence."""

    def __call__(
        self, log_probabilities: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """
        Return the loss of each token, and metrics of each token, all of shape (num_tokens,).

        Args:
            log_probabilities: Log-probability of each token; float32 of shape (num_tokens,).
            fields: The loss's `fields` by name, of shape (num_tokens, …). Log-probabilities and
                fields are 0 for a token that does not count.
        """


def refuse_whole_batch_loss(loss: object) -> None:
    """
    Refuse a loss that cannot be computed on parts of a batch, such as a loss over pairs.

    Raises:
        ArgumentError: The loss's attribute `needs_whole_batch` is true, or the loss lacks this
            attribute and has the name of a preference loss.
    """
    while isinstance(loss, partial):
        loss = loss.func
    name = _loss_name(loss)
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    named_so = not _PREFERENCES.isdisjoint([*words, *map("".join, pairwise(words))])
    if getattr(loss, "needs_whole_batch", named_so):
        fact = (
            f"the loss {name} compares sequences, so it needs the whole batch at once, but microbatches compute it "
            "part by part: use another loss, or set needs_whole_batch = False on a loss that is a sum over sequences"
        )
        raise ArgumentError("whole_batch_loss", fact, {"loss": name})


def _require_separable(_: Any, __: Any, loss: Any) -> None:
    if not callable(loss):
        raise ArgumentError("argument", f"the loss is {loss!r:.40}, but has to be a function or another callable")
    refuse_whole_batch_loss(loss)


def _require_normalisation(_: Any, __: Any, loss: Any) -> None:
    if (found := getattr(loss, "normalisation", None)) not in get_args(Normalisation):
        names = ", ".join(get_args(Normalisation))
        raise ArgumentError("argument", f"the loss has the normalisation {found!r}, but has to have one of {names}")


@attrs.frozen(kw_only=True)
class _SequenceFields:
    """Names of the data's fields, and the dimension of each field that runs along the sequence."""

    input_key: str = "input_ids"
    """Name of the field with the tokens, of shape (num_sequences, width)."""

    input_lengths_key: str = "input_lengths"
    """Name of the field with each sequence's length in tokens; the data may lack it."""

    sequence_dims: Mapping[str, int | None] = MappingProxyType({})
    """
    For each field name, the dimension that runs along the sequence, or None if none does. Fields of
    `core.shard.inputs.TOKEN_FIELDS`, and fields without a dimension of size `width`, need no entry.
    `BatchedData.sequence_dims` has an entry for every field.
    """

    def dims(self, data: Mapping[str, Any], names: Iterable[str]) -> dict[str, int | None]:
        """Return, for each of *names*, the dimension that runs along the sequence, or None."""
        shapes = {name: data[name].shape for name in names if torch.is_tensor(data[name])}
        declared = {name: dim for name, dim in self.sequence_dims.items() if name in shapes}
        return sequence_dims(shapes, input_key=self.input_key, declared=declared)

    def lengths(self, data: Mapping[str, Any], layout: PackedLayout | None) -> list[int] | None:
        """
        Return the lengths in *data*, or None if *data* has none; ArgumentError if those of *layout*
        differ.
        """
        found = [int(length) for length in data.get(self.input_lengths_key, ())]
        if found and layout is not None and found != layout.lengths.tolist():
            raise ArgumentError(
                "argument", f"field {self.input_lengths_key} has other lengths than the row: pass the row's fields"
            )
        return found or None


@attrs.frozen
class PackedLoss(_SequenceFields):
    """Calls an ordinary loss on packed logits, once for each sequence."""

    loss: SequenceLoss = attrs.field(validator=_require_separable)

    def __call__(
        self,
        logits: torch.Tensor,
        data: Mapping[str, Any],
        *,
        layout: PackedLayout,
        num_sequences: float,
        num_tokens: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        Return the sum of all sequences' losses in float64, and the combined metrics by name.

        Args:
            logits: Logits of the whole row; shape (1, num_positions, vocabulary). If ranks share
                the row, gather the logits first, or use `FusedLoss`.
            data: Fields of the unpacked sequences: tensors, lists, or other types whose slices
                select sequences.
            layout: Layout of the sequences in the row.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
        """
        _require_positions(logits, layout.num_positions)
        self.lengths(data, layout)
        lengths, dims = layout.lengths.tolist(), self.dims(data, data)
        widths = (layout.cu_seqlens_padded[1:] - layout.cu_seqlens_padded[:-1]).tolist()
        # The backward pass of one split allocates one gradient of the row; a slice for each
        # sequence would allocate one for each.
        parts = torch.split(
            logits, [n for pair in zip(lengths, widths, strict=True) for n in (pair[0], pair[1] - pair[0])], dim=1
        )
        losses, metrics = [], []
        for number, (part, length) in enumerate(zip(parts[::2], lengths, strict=True)):
            entry = {name: _sequence_entry(value, number, length, dims.get(name)) for name, value in data.items()}
            loss, found = _call_loss(self.loss, part, entry, num_sequences=num_sequences, num_tokens=num_tokens)
            losses.append(loss.double())
            metrics.append(found)
        return torch.stack(losses).sum(), combine_metrics(metrics)


@attrs.frozen
class FusedLoss(_SequenceFields):
    """
    Calls a `TokenLoss` once for all tokens of a packed row or a padded batch.

    A `FusedLoss` that is called without a layout is a `SequenceLoss`.
    """

    loss: TokenLoss = attrs.field(validator=[_require_separable, _require_normalisation])

    def __call__(
        self,
        logits: torch.Tensor,
        data: Mapping[str, Any],
        *,
        num_sequences: float,
        num_tokens: float,
        layout: PackedLayout | None = None,
        cp_rank: int = 0,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        Return the loss and the metrics by name; both are summed in float64. If ranks share the row,
        both cover only this rank's tokens.

        Args:
            logits: Logits of a packed row, or of this rank's part of it; shape (1, num_positions /
                cp_size, vocabulary). Without a layout, the shape is (num_sequences, width,
                vocabulary).
            data: Fields of all unpacked sequences, even if ranks share the row. These are the
                tokens, `token_mask` (both of shape (num_sequences, width)) and the fields of the
                loss. If neither a layout nor lengths are given, `token_mask` has to be 0 at
                padding.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
            layout: Layout of the sequences in the row.
            cp_rank: Rank within the group that shares the row.
            sum_over_ranks: Function that returns a tensor's sum over the group that shares the row.
        """
        lengths = self.lengths(data, layout)
        if layout is None:
            # A padded batch is treated as a row of sequences that are all padded to its width.
            num, width = logits.shape[:2]
            layout = PackedLayout(cu_seqlens(lengths or [width] * num), cu_seqlens([width] * num))
            logits = logits.reshape(1, -1, logits.shape[-1])
        _require_positions(logits, layout.num_positions // layout.cp_size)
        read = [name for name in self.loss.fields if name not in DERIVED]
        given = dict.fromkeys([self.input_key, "token_mask", *read])
        missing = given.keys() - data.keys()
        if missing:
            raise ArgumentError(
                "argument", f"the loss needs {', '.join(sorted(missing))}, but the data have {', '.join(data)}"
            )
        tokens, dims = data[self.input_key], self.dims(data, given)
        predicted = _PredictedTokens.from_layout(layout, cp_rank, tokens.device)
        mask = predicted.target_values(data["token_mask"], 1).double()
        counts = mask > 0
        targets = predicted.target_values(tokens, 1).masked_fill(~counts, NO_TARGET)
        log_probabilities, entropy = token_statistics(
            logits.flatten(0, 1), targets, with_entropy="entropy" in self.loss.fields
        )
        totals = _sequence_weights(data["token_mask"], layout)
        # Fields may have any values at tokens that do not count, and NaN or infinity would reach
        # the gradients.
        fields = {name: _zero_where(predicted.target_values(data[name], dims[name]), ~counts) for name in read}
        fields |= {"entropy": entropy, "sequence_tokens": totals[predicted.sequence]}
        if "sequence_log_ratio" in self.loss.fields:
            log_ratios = mask * (log_probabilities.detach() - fields["old_log_probabilities"])
            sums = sum_over_ranks(torch.zeros_like(totals).index_add(0, predicted.sequence, log_ratios))
            fields["sequence_log_ratio"] = (sums / totals.masked_fill(totals == 0, 1))[predicted.sequence].float()
        losses, metrics = self.loss(log_probabilities, fields)
        if self.loss.normalisation == "token":
            weights = mask / max(num_tokens, 1)
        elif self.loss.normalisation == "constant":
            weights = mask / (self.loss.divisor * max(num_sequences, 1))
        else:
            weights = mask / (totals[predicted.sequence].clamp(min=1) * max(num_sequences, 1))
        return _weighted_sum(losses, weights), {
            name: _reduce_metric(name, values.detach(), weights, counts) for name, values in metrics.items()
        }


def normalisers(token_mask: torch.Tensor) -> tuple[int, float]:
    """
    Return the number of sequences with a token that counts, and the total weight of all tokens.

    Summed over the global batch, the two numbers are a loss's `num_sequences` and `num_tokens`.

    Args:
        token_mask: Weight of each token, 0 at padding; shape (num_sequences, width). Column 0 is
            ignored, since no logits predict a first token.
    """
    weights = token_mask[:, 1:].double().sum(1)
    return int((weights > 0).sum()), float(weights.sum())


def combine_metrics(parts: Sequence[Metrics]) -> dict[str, torch.Tensor]:
    """
    Combine metrics in float64, by minimum (`…_min`), by maximum (`…_max`) or by sum (all others).
    """
    whole = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = torch.stack([torch.as_tensor(part[name]).detach().double() for part in parts if name in part])
        whole[name] = _EXTREMES[name[-4:]][0](values) if name[-4:] in _EXTREMES else values.sum()
    return whole


@attrs.frozen(eq=False)
class _PredictedTokens:
    """Target of each position of a packed row: the token that the logits there predict."""

    sequence: torch.Tensor
    """Index of the sequence at each position; shape (num_positions,)."""

    column: torch.Tensor
    """
    Position of each target in its sequence; 0 at positions without a target; shape
    (num_positions,).
    """

    exists: torch.Tensor
    """Whether each position has a target; bool, shape (num_positions,)."""

    @classmethod
    def from_layout(cls, layout: PackedLayout, cp_rank: int, device: torch.device) -> _PredictedTokens:
        own = layout.positions(cp_rank)
        exists = layout.targets[own] >= 0
        # The target of a position is the next token of the same sequence.
        column = (layout.position_ids[own] + 1) * exists
        arrays = (layout.sequence[own], column, exists)
        return cls(*[torch.as_tensor(array, device=device) for array in arrays])

    def target_values(self, field: torch.Tensor, dim: int | None) -> torch.Tensor:
        """
        Return a field's value for each target; shape (num_positions, …), 0 at positions without a
        target.

        Args:
            field: Values of one field for all sequences.
            dim: Dimension of the field that runs along the sequence; None if none does.
        """
        at = field[self.sequence] if dim is None else field.movedim(dim, 1)[self.sequence, self.column]
        return _zero_where(at, ~self.exists)


def _call_loss(
    loss: SequenceLoss, logits: torch.Tensor, data: Mapping[str, Any], **normalisers: float
) -> tuple[torch.Tensor, Metrics]:
    """Call a loss; ArgumentError if it does not return a scalar tensor and metrics."""
    match loss(logits, data, num_sequences=normalisers["num_sequences"], num_tokens=normalisers["num_tokens"]):
        case (torch.Tensor(ndim=0) as found, Mapping() as metrics):
            return found, metrics
        case other:
            message = (
                f"the loss {_loss_name(loss)} returned {type(other).__name__}, but has to return a scalar tensor and "
                "metrics"
            )
            raise ArgumentError("argument", message)


def _loss_name(loss: object) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _require_positions(logits: torch.Tensor, num_positions: int) -> None:
    if logits.shape[:2] != (1, num_positions):
        fact = f"the layout has {num_positions} positions in 1 row, but the logits have the shape {tuple(logits.shape)}"
        raise ArgumentError("argument", f"{fact}: pass the logits of that row")


def _sequence_entry(value: Any, number: int, length: int, dim: int | None) -> Any:
    """Return a field's slice for sequence *number*, truncated to *length* along *dim*."""
    own = value[number : number + 1]
    return own if dim is None else own.narrow(dim, 0, length)


def _sequence_weights(token_mask: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return each sequence's summed mask, without its first token; shape (num_sequences,)."""
    lengths = torch.as_tensor(layout.lengths.copy(), device=token_mask.device)[:, None]
    inside = torch.arange(1, token_mask.shape[1], device=token_mask.device) < lengths
    return (token_mask[:, 1:].double() * inside).sum(1)


def _zero_where(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(where.view(-1, *[1] * (values.ndim - 1)), 0)


def _weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values.double() * weights).sum()


def _reduce_metric(name: str, values: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if name[-4:] not in _EXTREMES:
        return _weighted_sum(values, weights)
    reduction, identity = _EXTREMES[name[-4:]]
    return reduction(values.double().masked_fill(~counts, identity))
