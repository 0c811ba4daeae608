"""
Losses on packed logits: an ordinary loss, one sequence after the other, or a loss on tokens, all of
the row at once.

Rules: data are fields of a batch of sequences, padded on the right; a field is sequence-wide if its
second dimension is that of `input_ids`. Entry t of a sequence-wide field speaks of token t, which
the logits at t - 1 predict: the entry of a first token is never used. `token_mask` weighs the
tokens that count. What a loss is divided by, sequences and tokens that count, are those of the
whole global batch; so losses and metrics of parts (sequences, microbatches, ranks) add up, and
metrics named `…_min` and `…_max` combine as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol

import attrs
import torch
from torch.autograd.function import once_differentiable

from packplan.core.context_parallel import PackedLayout
from packplan.core.errors import ArgumentError

NO_TARGET = -1

Metrics = Mapping[str, Any]

_CPU_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 26
"""
Logits in float32 at a time: what a core's cache holds; elsewhere 256 MB, so that a kernel has
enough to do.
"""

_PREFERENCES = {"bpo", "cpo", "dpo", "ipo", "kto", "orpo", "preference", "preferences", "rpo", "simpo"}
"""Words in the names of losses that compare answers with each other."""


class SequenceLoss(Protocol):
    """An ordinary loss, which need not know of packing: its batch may be one sequence."""

    def __call__(
        self, logits: torch.Tensor, data: Mapping[str, Any], *, num_sequences: float, num_tokens: float
    ) -> tuple[torch.Tensor, Metrics]:
        """
        Return the loss, a scalar, and metrics.

        Args:
            logits: Of shape (batch, length, vocabulary).
            data: Fields of the batch.
            num_sequences: Sequences of the global batch that have a token that counts.
            num_tokens: Tokens of the global batch that count.
        """


class TokenLoss(Protocol):
    """A loss of which each token's part depends on that token alone."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that it reads; of a token or of its sequence."""

    @property
    def normalisation(self) -> Literal["token", "sequence"]:
        """Mean over all tokens, or over sequences of the mean over their tokens."""

    def __call__(
        self, log_probabilities: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """
        Return each token's loss and metrics, of shape (num_tokens,).

        Args:
            log_probabilities: Of each token; float32 of shape (num_tokens,).
            fields: Those asked for, of shape (num_tokens, …); log-probabilities and fields are 0
                where a token does not count.
        """


def refuse_whole_batch(loss: object) -> None:
    """
    Check that a loss can be computed part by part, as packing and dynamic batching do.

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


def _checked(_: Any, __: Any, loss: Any) -> None:
    refuse_whole_batch(loss)


@attrs.frozen
class PackedLoss:
    """Runs an ordinary loss on packed logits, unchanged: one sequence at a time."""

    loss: SequenceLoss = attrs.field(validator=_checked)

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
        Return the sum of the sequences' losses, float64, and their metrics together.

        Args:
            logits: Of the whole row; shape (1, num_positions, vocabulary). Of a row that ranks
                share, gather them first, or use `FusedLoss`.
            data: Fields of the sequences, unpacked: tensors, lists, anything that a slice of
                sequences is taken of.
            layout: Where the sequences lie.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
        """
        _check_size(logits, layout.num_positions)
        lengths = layout.lengths.tolist()
        room = (layout.cu_seqlens_padded[1:] - layout.cu_seqlens_padded[:-1]).tolist()
        # One split gives one gradient; a slice of the row for each sequence would give as many as
        # there are sequences.
        parts = torch.split(
            logits, [n for pair in zip(lengths, room, strict=True) for n in (pair[0], pair[1] - pair[0])], dim=1
        )
        width = data["input_ids"].shape[1]
        losses, metrics = [], []
        for number, (part, length) in enumerate(zip(parts[::2], lengths, strict=True)):
            own = {name: _of_one(value, number, length, width) for name, value in data.items()}
            loss, found = _returned(self.loss, part, own, num_sequences=num_sequences, num_tokens=num_tokens)
            losses.append(loss.double())
            metrics.append(found)
        return torch.stack(losses).sum(), combined(metrics)


@attrs.frozen
class PaddedLoss:
    """
    Runs an ordinary loss on a padded batch as a whole, also one that compares its sequences with
    each other.
    """

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
            logits: Of all rows, one after the other; shape (1, num_sequences * width, vocabulary).
            data: Fields of the sequences, padded to one width.
            layout: Where the sequences lie.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
        """
        rows = logits.view(layout.lengths.size, -1, logits.shape[-1])
        loss, metrics = _returned(self.loss, rows, data, num_sequences=num_sequences, num_tokens=num_tokens)
        return loss.double(), combined([metrics])


@attrs.frozen
class FusedLoss:
    """
    Runs a loss on tokens in one pass over a packed row, or over a padded batch, where it is an
    ordinary loss too.
    """

    loss: TokenLoss = attrs.field(validator=_checked)

    def __call__(
        self,
        logits: torch.Tensor,
        data: Mapping[str, Any],
        *,
        num_sequences: float,
        num_tokens: float,
        layout: PackedLayout | None = None,
        cp_rank: int = 0,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        Return the loss, float64, and metrics; sums are in float64.

        Args:
            logits: Of a packed row, or a rank's part of it, of shape (1, num_positions / cp_size,
                vocabulary); without a layout, of shape (num_sequences, width, vocabulary).
            data: Fields of all sequences, unpacked, also where ranks share them: `input_ids` and
                `token_mask` of shape (num_sequences, width), and those of the loss. Without a
                layout, padding has the weight 0.
            num_sequences: See `SequenceLoss`.
            num_tokens: See `SequenceLoss`.
            layout: Where the sequences lie in the row.
            cp_rank: Which part of a row that ranks share.
        """
        if layout is None:
            # A padded batch is a row of sequences that are all as long as the widest.
            layout = PackedLayout.from_lengths([logits.shape[1]] * logits.shape[0])
            logits = logits.reshape(1, -1, logits.shape[-1])
        _check_size(logits, layout.num_positions // layout.cp_size)
        missing = {"input_ids", "token_mask", *self.loss.fields} - data.keys()
        if missing:
            message = f"the loss needs {', '.join(sorted(missing))}, but the data have {', '.join(data)}"
            raise ValueError(message)
        predicted = _Predicted.from_layout(layout, cp_rank, data["input_ids"])
        mask = predicted.values(data["token_mask"]).double()
        counts = mask > 0
        targets = predicted.values(data["input_ids"]).masked_fill(~counts, NO_TARGET)
        log_probabilities = token_log_probabilities(logits.flatten(0, 1), targets)
        # What a token that does not count holds is arbitrary, and what is not finite would reach
        # the gradients.
        fields = {name: _zeroed(predicted.values(data[name]), ~counts) for name in self.loss.fields}
        losses, metrics = self.loss(log_probabilities, fields)
        if self.loss.normalisation == "token":
            weights = mask / max(num_tokens, 1)
        else:
            weights = mask / (
                _tokens_of(data["token_mask"], layout)[predicted.sequence].clamp(min=1) * max(num_sequences, 1)
            )
        return _weighed(losses, weights), {
            name: _reduced(name, values.detach(), weights, counts) for name, values in metrics.items()
        }


def token_log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """
    Return the log-probability of each target.

    Forward and backward, a block of rows at a time is in float32: beside the logits and their
    gradient, no third array of their size is made.

    Args:
        logits: Any floating type; shape (num_rows, vocabulary). Of a row that ranks share, a rank's
            part.
        targets: The token that each row predicts, or `NO_TARGET`; shape (num_rows,).

    Returns:
        float32 of shape (num_rows,); 0 where there is no target.
    """
    found: torch.Tensor = _LogProbabilities.apply(logits, targets)  # type: ignore[no-untyped-call]
    return found


def normalisers(token_mask: torch.Tensor) -> tuple[int, float]:
    """
    Return sequences that have a token that counts, and the weight of all such tokens; sum them over
    the global batch.

    Args:
        token_mask: Of shape (num_sequences, width); 0 at padding.
    """
    weights = token_mask[:, 1:].double().sum(1)
    return int((weights > 0).sum()), float(weights.sum())


def combined(parts: Sequence[Metrics]) -> dict[str, torch.Tensor]:
    """
    Return the metrics of parts together, in float64: the least, the greatest, or the sum, as their
    names say.
    """
    whole = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = torch.stack([torch.as_tensor(part[name]).detach().double() for part in parts if name in part])
        whole[name] = _EXTREMES[name[-4:]][0](values) if name[-4:] in _EXTREMES else values.sum()
    return whole


_EXTREMES = {"_min": (torch.amin, torch.inf), "_max": (torch.amax, -torch.inf)}
"""How metrics of these endings combine, and what they are where no token counts."""


@attrs.frozen(eq=False)
class _Predicted:
    """The token that each row of logits predicts."""

    width: int
    """Positions of a sequence-wide field."""

    sequence: torch.Tensor
    """Number of its sequence; shape (num_rows,)."""

    column: torch.Tensor
    """Position of the target there; 0 where nothing is predicted."""

    exists: torch.Tensor
    """Whether something is predicted."""

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
        """
        Return a field's value for each row, 0 where nothing is predicted; shape (num_rows, …).
        """
        wide = field.ndim > 1 and field.shape[1] == self.width
        return _zeroed(field[self.sequence, self.column] if wide else field[self.sequence], ~self.exists)


class _LogProbabilities(torch.autograd.Function):
    """Log-softmax and gather, in blocks."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        has_target = targets != NO_TARGET
        picked = targets.clamp(min=0)[:, None]
        found = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        for block in _blocks(logits):
            every = torch.log_softmax(logits[block], -1, dtype=torch.float32)
            found[block] = every.gather(1, picked[block])[:, 0]
        ctx.save_for_backward(logits, picked, has_target)
        return found.masked_fill_(~has_target, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, picked, has_target = ctx.saved_tensors
        gradient = -(gradient * has_target)[:, None]
        minus_one = gradient.new_full((1, 1), -1)
        found = torch.empty_like(logits)
        for block in _blocks(logits):
            excess = torch.softmax(logits[block], -1, dtype=torch.float32)
            excess.scatter_add_(1, picked[block], minus_one.expand(len(excess), 1))
            torch.mul(excess, gradient[block], out=found[block])
        return found, None


def _blocks(logits: torch.Tensor) -> list[slice]:
    size = max(1, (_CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


def _returned(
    loss: SequenceLoss, logits: torch.Tensor, data: Mapping[str, Any], **normalisers: float
) -> tuple[torch.Tensor, Metrics]:
    """Return what a loss returns; TypeError if that is not a scalar and metrics."""
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


def _of_one(value: Any, number: int, length: int, width: int) -> Any:
    """Return a field of one sequence alone, without padding."""
    own = value[number : number + 1]
    return own[:, :length] if torch.is_tensor(own) and own.ndim > 1 and own.shape[1] == width else own


def _tokens_of(token_mask: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """
    Return the weight of each sequence's tokens that count; on every rank, of the whole sequence.
    """
    lengths = torch.as_tensor(layout.lengths.copy(), device=token_mask.device)[:, None]
    inside = torch.arange(1, token_mask.shape[1], device=token_mask.device) < lengths
    return (token_mask[:, 1:].double() * inside).sum(1)


def _zeroed(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(where.view(-1, *[1] * (values.ndim - 1)), 0)


def _weighed(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values.double() * weights).sum()


def _reduced(name: str, values: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if name[-4:] not in _EXTREMES:
        return _weighed(values, weights)
    extreme, none = _EXTREMES[name[-4:]]
    return extreme(values.double().masked_fill(~counts, none))
