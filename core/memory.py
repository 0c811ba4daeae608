"""
Memory of a training step on one rank, in bytes: kinds of it, its peak over a traced step, and the
longest packing length that fits.
"""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from math import ceil
from types import MappingProxyType
from typing import Any, Literal, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_FORM = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(iB|B|)")


def parse_bytes(text: str) -> int:
    """
    Return the bytes that a text names: `80GiB` has 2 ** 30 bytes a unit, `80GB` and `80G` 10 ** 9.

    Raises:
        ValueError: It is no positive amount of whole bytes.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 GB"), parse_bytes("24G")
    (85899345920, 1500000000, 24000000000)
    """
    found = _FORM.fullmatch(text)
    amount = Decimal(0)
    if found is not None and (found[2] or found[3] == "B"):
        amount = Decimal(found[1]) * (1024 if found[3] == "iB" else 1000) ** _PREFIXES[found[2]]
    if amount < 1 or amount != int(amount):
        raise ValueError(f"{text!r} is no amount of memory: write 80GiB, 80GB or 24G")
    return int(amount)


def written_bytes(number: float) -> str:
    """
    Return an amount of bytes for people to read, in powers of 1,024.

    >>> written_bytes(85899345920), written_bytes(1500)
    ('80.00 GiB', '1.46 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:,.2f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


Sharding = Literal["ddp", "fsdp2"]

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
"""Ways in which ranks share a model: whole on each, or by FSDP 2."""

_FULL_PRECISION = 4

_STATES: Mapping[str, float] = MappingProxyType(
    {"8bit": 2, "4bit": 1, "adafactor": 0, "lion": 4, "sgd": 0, "adagrad": 4, "rmsprop": 4, "muon": 4}
)
"""Part of an optimizer's name -> bytes of its states for each weight; others are as Adam's."""

_ADAM = 8


def optimizer_bytes(name: str, *, num_trained: int, itemsize: int) -> int:
    """
    Return the bytes of an optimizer's states, by its name alone.

    Args:
        name: Value of `optim`, as `adamw_torch_fused`.
        num_trained: Trained weights.
        itemsize: Bytes of one trained weight, which states follow unless they are quantised.

    >>> optimizer_bytes("adamw_torch", num_trained=10, itemsize=2)
    40
    """
    found = next((size for part, size in _STATES.items() if part in name), _ADAM)
    return math.ceil(num_trained * found * (1 if "bit" in name else itemsize / _FULL_PRECISION))


Kind = Literal["weights", "gradients", "optimizer", "activations", "temporaries"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""
Kinds of memory. Weights include buffers. Activations are the batch, and what the forward pass keeps
for the backward pass; temporaries are everything else of the two passes, and of the update.
"""


@attrs.frozen
class PeakMemory:
    """Memory of one rank at the moment of its peak, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        """Sum of the kinds."""
        return sum(attrs.astuple(self))


@attrs.frozen(eq=False)
class StepTrace:
    """
    Blocks of memory of the passes of one step, in steady state, and the totals of its update.

    Times count births and deaths. The optimizer's memory is no block: it is there throughout.
    """

    births: NDArray[np.int64]
    """Time from which a block is there; shape (num_blocks,)."""

    deaths: NDArray[np.int64]
    """Time from which it is not; shape (num_blocks,)."""

    sizes: NDArray[np.int64]
    """Bytes of each block; shape (num_blocks,)."""

    kinds: NDArray[np.int64]
    """Index of each block's kind in `KINDS`, or -1 for activations and temporaries; same shape."""

    logits: NDArray[np.bool_]
    """Whether a block has the vocabulary's width, as logits and their gradients; same shape."""

    forward_end: int
    """Time at which the forward pass ends."""

    optimizer: int
    """Bytes of the optimizer."""

    update: int
    """Temporary bytes of the optimizer's update, at their peak."""

    buckets: int = 0
    """Bytes of buckets in which ranks sum gradients; they are there throughout."""

    def peak(self, *, fused_loss: bool = False) -> PeakMemory:
        """
        Return the peak over both passes and the update.

        Args:
            fused_loss: Leave out logits, which fused losses never hold as a whole.
        """
        kept = ~self.logits if fused_loss else np.ones(len(self.sizes), dtype=bool)
        kinds, rows = self._kinds(), np.zeros((len(KINDS), 1 + int(self.deaths.max(initial=1))), dtype=np.int64)
        for times, sign in ((self.births, 1), (self.deaths, -1)):
            np.add.at(rows, (kinds[kept], times[kept]), sign * self.sizes[kept])
        held = rows.cumsum(axis=1)
        passes = self._at(held[:, int(held.sum(axis=0).argmax())], self.buckets)
        # What is held when the backward pass has ended is held during the update.
        updating = self._at(held[:, -2], self.buckets + self.update)
        return max(passes, updating, key=lambda one: one.total)

    def _at(self, held: NDArray[np.int64], temporaries: int) -> PeakMemory:
        named = dict(zip(KINDS, held.tolist(), strict=True))
        named["optimizer"] += self.optimizer
        named["temporaries"] += temporaries
        return PeakMemory(**named)

    def _kinds(self) -> NDArray[np.int64]:
        """Return the kind of every block."""
        kept = (self.births <= self.forward_end) & (self.deaths > self.forward_end)
        passing = np.where(kept, KINDS.index("activations"), KINDS.index("temporaries"))
        return np.where(self.kinds < 0, passing, self.kinds)


def candidate_packs(tokens: NDArray[Any], supervised: NDArray[Any], patches: NDArray[Any]) -> tuple[int, ...]:
    """
    Return the packs that may need the most memory: of the most tokens, of the most with a loss, of
    the most patches, and of the largest sum of shares of these.

    Args:
        tokens: Tokens of each pack; shape (num_packs,).
        supervised: Tokens of each pack with a loss; same shape.
        patches: Vision patches of each pack; same shape.

    >>> candidate_packs(*np.array([[9, 8, 8], [1, 2, 3], [0, 0, 0]]))
    (0, 2)
    """
    shares = [one / one.max() for one in (tokens, supervised, patches) if one.any()]
    return tuple(dict.fromkeys(int(one.argmax()) for one in (*shares, np.sum(shares, axis=0))))


MARGIN = 0.1
"""
Share that is added to a peak for a GPU's rounding of blocks, their fragmentation, and the memory of
CUDA and of collectives. It is an assumption, and was not measured on a GPU.
"""

_STEP = 64
"""Lengths are multiples of this many tokens."""


@attrs.frozen
class Longest:
    """Longest packing length that fits, and the check of its line."""

    tokens: int
    """Packing length; 0 if none fits."""

    peak: int
    """Peak at that length, in bytes, without the margin."""

    error: float
    """Deviation of the line from the traced peak at its length, relative to the latter."""

    limited: bool
    """Whether the model's positions end there, and not the memory."""


def with_margin(peak: float) -> int:
    """Return the bytes that a GPU needs for a peak."""
    return ceil(peak * (1 + MARGIN))


def longest_fitting(peak_at: Callable[[int], int], *, start: int, limit: int, most: int) -> Longest:
    """
    Return the longest packing length whose peak fits.

    Memory is nearly linear in tokens. So the line through two lengths names a third one, whose own
    peak corrects it. A length is only returned if its own peak fits.

    Args:
        peak_at: Peak of a full pack of so many tokens, in bytes.
        start: Length to begin with, >= 1.
        limit: Bytes that are there.
        most: Longest length that the model has positions for.

    >>> longest_fitting(lambda tokens: 10 * tokens, start=512, limit=110_000, most=32768).tokens
    9984
    """
    room = limit / (1 + MARGIN)
    known = {one: peak_at(one) for one in {start, _other_length(start, most)}}
    error: float | None = None
    for _ in range(_ATTEMPTS):
        length, expected = _on_line(known, room, most=most)
        if length in known:
            length -= _STEP if known[length] > room else 0
        if length in known or length < 1:
            break
        known[length] = peak_at(length)
        error = expected / known[length] - 1 if error is None else error
        if known[length] <= room < known[length] * (1 + _ENOUGH):
            break
    fitting = [one for one, peak in known.items() if peak <= room and one <= most]
    longest = max(fitting, default=0)
    return Longest(longest, known.get(longest, min(known.values())), error or 0.0, limited=longest == most)


def _other_length(start: int, most: int) -> int:
    """Return the second length of a line: twice the first, which has its images' share, or half."""
    return 2 * start if 2 * start <= most else max(1, start // 2)


_ENOUGH = 0.03
"""Room that may be left at the length that is returned, relative to its peak."""

_ATTEMPTS = 2


def _on_line(known: dict[int, int], room: float, *, most: int) -> tuple[int, float]:
    """
    Return the length at which the line through the two nearest peaks reaches the room, rounded
    down, and the peak of the line there.
    """
    (length, peak), (other, other_peak) = sorted(known.items(), key=lambda one: abs(one[1] - room))[:2]
    slope = (other_peak - peak) / (other - length)
    found = length + (room - peak) / slope if slope > 0 else most
    rounded = most if found >= most else max(_STEP, int(found) // _STEP * _STEP)
    return rounded, peak + slope * (rounded - length)
