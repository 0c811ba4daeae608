"""Parts of weights, gradients and optimizer of each rank, and estimates from sizes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import attrs

Sharding = Literal["ddp", "fsdp2", "zero2", "zero3"]

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
"""Ways in which ranks share a model: whole on each, by FSDP 2, or by ZeRO of DeepSpeed."""

UNMEASURED: frozenset[Sharding] = frozenset({"zero2", "zero3"})
"""Those that are computed from sizes, and were never compared with a measured peak."""

_FULL_PRECISION = 4

_STATES: Mapping[str, float] = MappingProxyType(
    {"8bit": 2, "4bit": 1, "adafactor": 0, "lion": 4, "sgd": 0, "adagrad": 4, "rmsprop": 4, "muon": 4}
)
"""Part of an optimizer's name -> bytes of its states for each weight; others are as Adam's."""

_ADAM = 8


@attrs.frozen
class RankParts:
    """Bytes that one rank holds throughout a step, without activations."""

    weights: int
    gradients: int
    optimizer: int

    buckets: int = 0
    """Buckets in which ranks sum their gradients."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(attrs.astuple(self))


def rank_parts(
    weights: int, trained: int, optimizer: int, *, sharding: Sharding, world_size: int, itemsize: int = _FULL_PRECISION
) -> RankParts:
    """
    Return the parts of one rank.

    Args:
        weights: Bytes of all weights.
        trained: Bytes of the trained ones.
        optimizer: Bytes of the optimizer of all trained weights.
        sharding: Way in which ranks share them.
        world_size: Ranks, >= 1.
        itemsize: Bytes of one trained weight. ZeRO keeps a copy in float32 of smaller ones, and
            the optimizer's states in float32.

    >>> rank_parts(100, 40, 80, sharding="fsdp2", world_size=4)
    RankParts(weights=25, gradients=10, optimizer=20, buckets=0)
    """
    if sharding in UNMEASURED and itemsize < _FULL_PRECISION:
        optimizer = optimizer * _FULL_PRECISION // itemsize + trained * _FULL_PRECISION // itemsize
    share = dict.fromkeys(("weights", "gradients", "optimizer"), world_size)
    if sharding in ("ddp", "zero2"):
        share["weights"] = 1
    if sharding == "ddp":
        share["gradients"] = share["optimizer"] = 1
    return RankParts(
        math.ceil(weights / share["weights"]),
        math.ceil(trained / share["gradients"]),
        math.ceil(optimizer / share["optimizer"]),
        trained if sharding == "ddp" and world_size > 1 else 0,
    )


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


def estimated_activations(
    sizes: Mapping[str, Any], *, tokens: int, supervised: int, patches: int, itemsize: int, checkpointing: bool
) -> int:
    """
    Return a rough estimate of a pack's activations and temporaries in bytes, by the keys of a
    model's configuration. It ignores experts.

    Args:
        sizes: Content of config.json, or of its text part.
        tokens: Tokens of the pack.
        supervised: Tokens with a loss, whose logits and gradients are held in float32.
        patches: Patches of the pack's images and videos.
        itemsize: Bytes of one activation.
        checkpointing: Whether layers are computed again.
    """
    part, seeing = sizes.get("text_config"), sizes.get("vision_config")
    text: Mapping[str, Any] = part if isinstance(part, Mapping) else sizes
    of_layers = partial(_layer_numbers, checkpointing=checkpointing)
    found = tokens * of_layers(text) + (patches * of_layers(seeing) if isinstance(seeing, Mapping) else 0)
    return found * itemsize + 3 * _FULL_PRECISION * supervised * int(text.get("vocab_size") or 0)


def _layer_numbers(sizes: Mapping[str, Any], *, checkpointing: bool) -> int:
    """Return the numbers that the layers of a text model or a vision tower hold for a position."""
    width = int(sizes.get("hidden_size") or sizes.get("embed_dim") or 0)
    layers = int(sizes.get("num_hidden_layers") or sizes.get("depth") or 0)
    inner = int(sizes.get("intermediate_size") or 4 * width)
    # Norms in float32, queries, keys, values and outputs; gate, input and product of the inner one.
    layer = 12 * width + 4 * inner
    return layers * width + layer if checkpointing else layers * layer
