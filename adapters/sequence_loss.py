"""
Losses on packed logits: an ordinary loss on one sequence after the other, or a loss on all tokens
of a row at once.

Rules: data are fields of a batch of sequences, padded on the right. A field is sequence-wide if its
second dimension is that of `input_ids`. Entry t of a sequence-wide field belongs to token t, which
the logits at t - 1 predict. So the entry of a first token is never used. `token_mask` holds the
weights of tokens in the loss.

Losses are divided by the number of sequences or tokens of the whole global batch. So losses and
metrics of parts (sequences, microbatches, ranks) add up. Metrics named `…_min` and `…_max` combine
by minimum and maximum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, Protocol

import attrs
import torch
from torch.autograd.function import once_differentiable

from packplan.core.context_parallel import PackedLayout
from packplan.core.errors import ArgumentError

NO_TARGET = -1

Metrics = Mapping[str, Any]

Normalisation = Literal["token", "sequence", "constant"]

_CPU_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 26
"""Logits in float32 at a time: as many as a core's cache holds, or 256 MB to keep a GPU busy."""

DERIVED = frozenset({"entropy", "sequence_log_ratio", "values"})
"""
Fields that a loss may ask for and no batch has: entropy of the token's distribution, in nats; mean
of the log-ratios of its sequence to `old_log_probabilities`, without a gradient; what a value head
predicts.
"""

_PREFERENCES = {"bpo", "cpo", "dpo", "ipo", "kto", "orpo", "preference", "preferences", "rpo", "simpo"}
"""Words in the names of losses that compare answers with each other."""


class SequenceLoss(Protocol):
    """Ordinary loss that knows nothing of packing; its batch may be one sequence."""

    def __call__(
        self, logits: torch.Tensor, data: Mapping[str, Any], *, num_sequences: float, num_tokens: float
    ) -> tuple[torch.Tensor, Metrics]:
        """
        Return the loss, a scalar, and metrics.

        Args:
            logits: Shape (batch, length, vocabulary).
            data: Fields of the batch.
            num_sequences: Sequences of the global batch with a token that counts.
            num_tokens: Tokens of the global batch that count.
        """


class TokenLoss(Protocol):
    """Loss in which the part of each token depends on that token alone."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that the loss reads, of a token or of its sequence; see also `DERIVED`."""

    @property
    def normalisation(self) -> Normalisation:
        """
        Mean over all tokens, over sequences of the mean over their tokens, or over sequences of
        their sums divided by a constant.
        """

    @property
    def divisor(self) -> float:
        """Tokens by which `constant` divides the sum of a sequence."""

    def __call__(
        self, log_probabilities: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """
        Return the loss of each token, and metrics, of shape (num_tokens,).

        Args:
            log_probabilities: Log-probability of each token; float32 of shape (num_tokens,).
            fields: Requested fields, of shape (num_tokens, …). Log-probabilities and fields are 0
                where a token does not count.
        """


def refuse_whole_batch(loss: object) -> None:
    """
    Refuse a loss that cannot be computed in parts, as packing and dynamic batching do.

    Raises:
        ArgumentError: It says `needs_whole_batch`, or says nothing and is named like a
            preference loss.
    """
    while isinstance(loss, partial):
        loss = loss.func
    name = _name_of(loss)
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    named_so = not _PREFERENCES.isdisjoint([*words, *map("".join, pairwise(words))])
    if getattr(loss, "needs_whole_batch", named_so):
        fact = (
            f"the loss {name} compares sequences with each other, so it needs the whole batch at once, which packing "
            "and dynamic batching compute part by part"
        )
        raise ArgumentError("whole_batch_loss", fact, {"loss": name})


def _require_separable(_: Any, __: Any, loss: Any) -> None:
    refuse_whole_batch(loss)


@attrs.frozen
class PackedLoss:
    """Runs an ordinary loss on packed logits, unchanged, one sequence at a time."""

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
        Return the sum of the sequences' losses, float64, and their combined metrics.

        Args:
            logits: Logits of the whole row; shape (1, num_positions, vocabulary). If ranks share
                the row, gather it first, or use `FusedLoss`.
            data: Fields of the sequences, unpacked: tensors, lists, or other types that can be
                sliced by sequence.
            layout: Layout of the sequences in the row.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
        """
        _check_size(logits, layout.num_positions)
        lengths = layout.lengths.tolist()
        widths = (layout.cu_seqlens_padded[1:] - layout.cu_seqlens_padded[:-1]).tolist()
        # One split gives one gradient; a slice of the row for each sequence would give as many as
        # there are sequences.
        parts = torch.split(
            logits, [n for pair in zip(lengths, widths, strict=True) for n in (pair[0], pair[1] - pair[0])], dim=1
        )
        width = data["input_ids"].shape[1]
        losses, metrics = [], []
        for number, (part, length) in enumerate(zip(parts[::2], lengths, strict=True)):
            entry = {name: _sequence_entry(value, number, length, width) for name, value in data.items()}
            loss, found = _call_loss(self.loss, part, entry, num_sequences=num_sequences, num_tokens=num_tokens)
            losses.append(loss.double())
            metrics.append(found)
        return torch.stack(losses).sum(), combined(metrics)


@attrs.frozen
class PaddedLoss:
    """Runs an ordinary loss on a whole padded batch; the loss may compare sequences."""

    loss: SequenceLoss

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
        Return the loss, float64, and its metrics.

        Args:
            logits: Logits of all rows, one after the other; shape (1, num_sequences * width,
                vocabulary).
            data: Fields of the sequences, padded to one width.
            layout: Layout of the sequences in the rows.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
        """
        rows = logits.view(layout.lengths.size, -1, logits.shape[-1])
        loss, metrics = _call_loss(self.loss, rows, data, num_sequences=num_sequences, num_tokens=num_tokens)
        return loss.double(), combined([metrics])


@attrs.frozen
class FusedLoss:
    """
    Runs a loss on tokens in one pass over a packed row or a padded batch.

    On a padded batch it is an ordinary loss too.
    """

    loss: TokenLoss = attrs.field(validator=_require_separable)

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
        values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        Return the loss, float64, and metrics; sums are in float64.

        Args:
            logits: Logits of a packed row, or of a rank's part of it, of shape (1, num_positions /
                cp_size, vocabulary). Without a layout, of shape (num_sequences, width, vocabulary).
            data: Fields of all sequences, unpacked, even if ranks share them: `input_ids` and
                `token_mask` of shape (num_sequences, width), and the fields of the loss. Without a
                layout, padding has the weight 0.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
            layout: Layout of the sequences in the row.
            cp_rank: Rank within the group that shares the row.
            sum_over_ranks: Function that adds a tensor over the group that shares the row.
            values: Predictions of a value head, of the first two dimensions of the logits.
        """
        if layout is None:
            # A padded batch is a row of sequences that are all as long as the widest.
            layout = PackedLayout.from_lengths([logits.shape[1]] * logits.shape[0])
            logits = logits.reshape(1, -1, logits.shape[-1])
        _check_size(logits, layout.num_positions // layout.cp_size)
        read = [name for name in self.loss.fields if name not in DERIVED]
        missing = {"input_ids", "token_mask", *read} - data.keys()
        if missing:
            raise ValueError(f"the loss needs {', '.join(sorted(missing))}, but the data have {', '.join(data)}")
        predicted = _Predicted.from_layout(layout, cp_rank, data["input_ids"])
        mask = predicted.values(data["token_mask"]).double()
        counts = mask > 0
        targets = predicted.values(data["input_ids"]).masked_fill(~counts, NO_TARGET)
        log_probabilities, entropy = _token_statistics(
            logits.flatten(0, 1), targets, with_entropy="entropy" in self.loss.fields
        )
        # Entries of tokens that do not count are arbitrary, and values that are not finite would
        # reach the gradients.
        fields = {name: _zero_where(predicted.values(data[name]), ~counts) for name in read}
        totals = _sequence_weights(data["token_mask"], layout)
        if "entropy" in self.loss.fields:
            fields["entropy"] = entropy
        if "sequence_log_ratio" in self.loss.fields:
            away = mask * (log_probabilities.detach() - fields["old_log_probabilities"])
            sums = sum_over_ranks(torch.zeros_like(totals).index_add(0, predicted.sequence, away))
            means = sums / totals.masked_fill(totals == 0, 1)
            fields["sequence_log_ratio"] = means[predicted.sequence].to(log_probabilities.dtype)
        if "values" in self.loss.fields:
            if values is None:
                raise ValueError("the loss needs the values that a value head predicts")
            fields["values"] = _zero_where(values.reshape(-1), ~counts)
        losses, metrics = self.loss(log_probabilities, fields)
        if self.loss.normalisation == "token":
            weights = mask / max(num_tokens, 1)
        elif self.loss.normalisation == "constant":
            weights = mask / (self.loss.divisor * max(num_sequences, 1))
        else:
            weights = mask / (totals[predicted.sequence].clamp(min=1) * max(num_sequences, 1))
        return _weighted_sum(losses, weights), {
            name: _reduce(name, values.detach(), weights, counts) for name, values in metrics.items()
        }


def token_log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """
    Return the log-probability of each target.

    Forward and backward passes convert a block of rows at a time to float32. No third array of the
    size of the logits is made beside them and their gradient.

    Args:
        logits: Any floating type; shape (num_rows, vocabulary). If ranks share a row, this rank's
            part.
        targets: Token that each row predicts, or `NO_TARGET`; shape (num_rows,).

    Returns:
        float32 of shape (num_rows,); 0 where there is no target.
    """
    return _token_statistics(logits, targets, with_entropy=False)[0]


def _token_statistics(
    logits: torch.Tensor, targets: torch.Tensor, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities, and the entropy of each row in nats, or nothing of it."""
    found: tuple[torch.Tensor, torch.Tensor] = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        logits, targets, with_entropy
    )
    return found


def normalisers(token_mask: torch.Tensor) -> tuple[int, float]:
    """
    Return the number of sequences with a token that counts, and the total weight of tokens.

    Sum both over the global batch.

    Args:
        token_mask: Weights of tokens, shape (num_sequences, width); 0 at padding.
    """
    weights = token_mask[:, 1:].double().sum(1)
    return int((weights > 0).sum()), float(weights.sum())


def combined(parts: Sequence[Metrics]) -> dict[str, torch.Tensor]:
    """Return the combined metrics of parts, in float64: minimum, maximum or sum, by their names."""
    whole = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = torch.stack([torch.as_tensor(part[name]).detach().double() for part in parts if name in part])
        whole[name] = _EXTREMES[name[-4:]][0](values) if name[-4:] in _EXTREMES else values.sum()
    return whole


_EXTREMES = {"_min": (torch.amin, torch.inf), "_max": (torch.amax, -torch.inf)}
"""Ending of a metric's name -> its reduction, and its value without tokens."""


@attrs.frozen(eq=False)
class _Predicted:
    """Target of each row of logits."""

    width: int
    """Positions of a sequence-wide field."""

    sequence: torch.Tensor
    """Sequence of each row; shape (num_rows,)."""

    column: torch.Tensor
    """Position of the target in its sequence; 0 without a target."""

    exists: torch.Tensor
    """Whether the row has a target."""

    @classmethod
    def from_layout(cls, layout: PackedLayout, cp_rank: int, input_ids: torch.Tensor) -> _Predicted:
        rows = layout.positions(cp_rank)
        targets = layout.targets[rows]
        exists = targets >= 0
        # A position's target is the next one of its own sequence.
        column = (layout.position_ids[rows] + 1) * exists
        arrays = (layout.sequence[rows], column, exists)
        on_device = [torch.as_tensor(array, device=input_ids.device) for array in arrays]
        return cls(input_ids.shape[1], *on_device)

    def values(self, field: torch.Tensor) -> torch.Tensor:
        """Return a field's value for each row, 0 without a target; shape (num_rows, …)."""
        wide = field.ndim > 1 and field.shape[1] == self.width
        return _zero_where(field[self.sequence, self.column] if wide else field[self.sequence], ~self.exists)


class _TokenStatistics(torch.autograd.Function):
    """Log-softmax and gather, and the entropy of each row, in blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        with_entropy: bool,  # noqa: FBT001  # `apply` has no keywords
    ) -> tuple[torch.Tensor, torch.Tensor]:
        has_target = targets != NO_TARGET
        picked = targets.clamp(min=0)[:, None]
        found = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty(len(targets) if with_entropy else 0, dtype=torch.float32, device=logits.device)
        for block in _blocks(logits):
            every = torch.log_softmax(logits[block], -1, dtype=torch.float32)
            found[block] = every.gather(1, picked[block])[:, 0]
            if with_entropy:
                entropy[block] = torch.special.entr(every.exp()).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, picked, has_target, entropy)
        return found.masked_fill_(~has_target, 0), entropy.masked_fill(~has_target, 0) if with_entropy else entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None, of_entropy: torch.Tensor | None) -> tuple[Any, None, None]:
        logits, picked, has_target, entropy = ctx.saved_tensors
        scale, bonus = (None if one is None else (one * has_target)[:, None] for one in (gradient, of_entropy))
        found = torch.empty_like(logits)
        for block in _blocks(logits):
            shares = torch.softmax(logits[block], -1, dtype=torch.float32)
            parts = []
            if bonus is not None:
                # The gradient of the entropy H is -p (log p + H).
                parts.append(bonus[block] * (torch.special.entr(shares) - shares * entropy[block, None]))
            if scale is not None:
                parts.append(shares.mul_(-scale[block]).scatter_add_(1, picked[block], scale[block]))
            found[block] = reduce(torch.add, parts)
        return found, None, None


def _blocks(logits: torch.Tensor) -> list[slice]:
    size = max(1, (_CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


def _call_loss(
    loss: SequenceLoss, logits: torch.Tensor, data: Mapping[str, Any], **normalisers: float
) -> tuple[torch.Tensor, Metrics]:
    """Call a loss; TypeError if its result is not a scalar and metrics."""
    match loss(logits, data, num_sequences=normalisers["num_sequences"], num_tokens=normalisers["num_tokens"]):
        case (torch.Tensor(ndim=0) as found, Mapping() as metrics):
            return found, metrics
        case other:
            message = (
                f"the loss {_name_of(loss)} returned {type(other).__name__}, but has to return a scalar tensor and "
                "metrics"
            )
            raise TypeError(message)


def _name_of(loss: object) -> str:
    name: str = getattr(loss, "__name__", type(loss).__name__)
    return name


def _check_size(logits: torch.Tensor, num_positions: int) -> None:
    if logits.shape[:2] != (1, num_positions):
        message = (
            f"the layout has {num_positions} positions in 1 row, but the logits have the shape {tuple(logits.shape)}"
        )
        raise ValueError(message)


def _sequence_entry(value: Any, number: int, length: int, width: int) -> Any:
    """Return one sequence's entry of a field, without padding."""
    own = value[number : number + 1]
    return own[:, :length] if torch.is_tensor(own) and own.ndim > 1 and own.shape[1] == width else own


def _sequence_weights(token_mask: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return the total weight of each sequence's tokens, the same on every rank."""
    lengths = torch.as_tensor(layout.lengths.copy(), device=token_mask.device)[:, None]
    inside = torch.arange(1, token_mask.shape[1], device=token_mask.device) < lengths
    return (token_mask[:, 1:].double() * inside).sum(1)


def _zero_where(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(where.view(-1, *[1] * (values.ndim - 1)), 0)


def _weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values.double() * weights).sum()


def _reduce(name: str, values: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if name[-4:] not in _EXTREMES:
        return _weighted_sum(values, weights)
    reduction, identity = _EXTREMES[name[-4:]]
    return reduction(values.double().masked_fill(~counts, identity))
