"""
Comparison of random samples and images, computed packed and each alone.

The results are computed by a small copy of a model, or by the model that will be trained, with its
own weights and kernels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch

from packplan.adapters.attention import set_attention, using_native_attention
from packplan.adapters.attention.shared_rows import RowGroups, share_rows, sharing_by
from packplan.adapters.families import trained_config, trained_part
from packplan.adapters.models import evaluation_mode
from packplan.adapters.probe.small_model import SmallModels, error_text
from packplan.adapters.proof.batches import PackedBatch, Sample, places_by_lengths
from packplan.adapters.proof.comparison import (
    Outcome,
    compare_values,
    compute_precision,
    difference_limit,
    experts_may_differ,
    packed_and_alone,
    run_alone,
)
from packplan.core.equality import AttentionChoice, ProbeResult
from packplan.core.errors import ModelError, PackplanError

LOADED_LENGTHS = (17, 3, 29)
"""Number of tokens of each sample in the row that probes a loaded model."""

_SEED = 7
"""Seed of random tokens and images."""

_WHOLE = ": set sequence_parallel_size to 1, which trains whole rows"
"""Remedy in the error about a model whose rows cannot be shared by ranks."""

_IDS = 2000
"""Exclusive limit of drawn token ids. Larger ids may belong to images, or to no token."""


_GRIDS = ((1, 12, 20), (1, 4, 4), (1, 16, 12))
"""
Numbers of frames, rows and columns of patches of each image. Some images are larger and one is
smaller than the windows of vision towers.
"""


@attrs.frozen(eq=False)
class ProbeRow:
    """Samples of random tokens, as one packed row and each alone."""

    packed: PackedBatch
    """The row as the model receives it in training: positions restart, and there is no mask."""

    samples: list[Sample]
    """The samples of the row, each as a batch of its own."""

    @classmethod
    def draw(cls, model: Any, lengths: Sequence[int], *, ids: Sequence[int]) -> ProbeRow:
        """
        Draw random samples for a model.

        Args:
            model: Model of transformers.
            lengths: Number of tokens of each sample.
            ids: Token ids to draw from.
        """
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.tensor(ids)[torch.randint(len(ids), (1, sum(lengths)), generator=generator)]
        drawn = drawn.to(next(model.parameters()).device)
        positions = torch.cat([torch.arange(length, device=drawn.device) for length in lengths])[None]
        if any(hasattr(module, "get_rope_index") for module in model.modules()):  # with those of images
            positions = positions.expand(4, 1, -1)
        inputs = {"input_ids": drawn, "position_ids": positions, "use_cache": False, **draw_token_types(model, drawn)}
        row = PackedBatch(inputs, None, (1, sum(lengths)), places_by_lengths(lengths))
        parts = [drawn[:, span] for _, span in row.places]
        alone = [{"input_ids": own, "attention_mask": torch.ones_like(own), "use_cache": False,
                  **draw_token_types(model, own)} for own in parts]  # fmt: skip
        return cls(row, row.samples(alone))


def draw_token_types(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Return token types as arguments of a model; some models derive attention masks from token types.

    The result is empty for a model without such arguments.

    Args:
        model: Model of transformers.
        ids: Token ids, from which the types are derived; int64 of shape (rows, tokens).
    """
    part = trained_part(model)
    outer, inner = (inspect.signature(one.forward).parameters for one in (part, part.base_model))
    names = [name for name in {**outer, **inner} if name.endswith("type_ids") and (name in outer or "kwargs" in outer)]
    num_types = getattr(part.config.get_text_config(), "type_vocab_size", None) or 2
    return {name: (ids % 4).clamp(max=min(num_types, 2) - 1) for name in names}


def probe_ready_model(
    model: Any, *, native: str, named: str, asked: str = "the loaded model", groups: RowGroups | None = None
) -> ProbeResult:
    """
    Compare a packed row of short samples with these samples alone, on a model that is ready to
    train.

    If ranks share rows of the model, the row is computed once for each number of ranks that may
    share a row.

    Args:
        model: Model of transformers, perhaps with adapters; its mode is restored.
        native: Attention of transformers that computes samples alone.
        named: Value of `model.attn_impl`, used in the message.
        asked: Words for the model in the message.
        groups: Groups of ranks that share rows of the model; all ranks of the groups have to call
            this function.

    Returns:
        The measured result; with *groups*, the result of the largest group.

    Raises:
        ModelError: Samples are not kept apart, their results differ from those of the samples
            alone, or computing the packed row fails.
    """
    config = trained_config(model.config)
    row = ProbeRow.draw(model, LOADED_LENGTHS, ids=ordinary_token_ids(config))
    with evaluation_mode(model):  # dropout would add differences
        with using_native_attention(model, native):
            alone = run_alone(model, row.samples, with_gradients=False)
        for degree in (1,) if groups is None else groups.degrees:
            measured, why_not = _ask_row(model, row, alone, degree)
            if why_not is not None:
                shares = f", whose rows {degree} ranks share," if degree > 1 else ""
                reason = f"{asked}{shares} was tested ({device_and_precision(model)}): {why_not}"
                raise ModelError.for_leak(config.model_type, named, reason + (_WHOLE if shares else ""))
    return measured


def _ask_row(model: Any, row: ProbeRow, alone: Outcome, degree: int) -> tuple[ProbeResult, str | None]:
    """
    Return the result for a row that *degree* ranks share, and the reason against packing, or None.
    """
    try:
        with sharing_by(degree):
            median = experts_may_differ(model)
            measured = packed_and_alone(model, row.packed, row.samples, alone=alone, median=median).worst
    except Exception as error:  # whatever the code of a family raises
        if degree == 1 and isinstance(error, PackplanError):
            raise
        return ProbeResult(math.inf, math.inf), f"it raises {error_text(error)}"
    return measured, measured.reason_against_packing(limit=difference_limit(model))


def build_small_copy(
    model: Any,
    choice: AttentionChoice,
    *,
    groups: RowGroups | None = None,
    kind: type | None = None,
    device: Any = None,
) -> Any:
    """
    Build a small copy of a model, with random weights that are not sharded.

    Args:
        model: Model of transformers, perhaps with adapters.
        choice: Attention of the model, which the copy uses too.
        groups: Groups of ranks that share rows of the copy.
        kind: Class of the copy; None takes a class that can generate text.
        device: Device of the copy; None takes the model's device. The copy of a model on the device
            `meta` is on the CPU.
    """
    weight = next(model.parameters())
    small = SmallModels(trained_config(model.config), kind=kind).build(attention=choice.loaded_backend)
    small.to("cpu" if weight.is_meta else device or weight.device)
    set_attention(small, choice)
    if groups is not None:
        share_rows(small, groups)
    return small


def probe_sharing_copy(
    model: Any, choice: AttentionChoice, *, named: str, groups: RowGroups, device: Any = None
) -> ProbeResult:
    """
    Probe a small copy of a model whose rows ranks share. All ranks of the groups have to call this
    function.

    The copy is probed in place of a model with sharded weights, which no rank can probe by itself.

    Args:
        model: See `build_small_copy`.
        choice: See `build_small_copy`.
        named: See `probe_ready_model`.
        groups: Groups of ranks that share rows.
        device: See `build_small_copy`.

    Raises:
        ModelError: See `probe_ready_model`.
    """
    small = build_small_copy(model, choice, groups=groups, device=device)
    return probe_ready_model(small, native=choice.native, named=named, asked="a small copy of the model", groups=groups)


def device_and_precision(model: torch.nn.Module) -> str:
    """Return device and precision of a model as text, such as `cpu, float32`."""
    weight = next(model.parameters())
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else weight.device.type
    return f"{device}, {compute_precision(model)}"


def ordinary_token_ids(config: Any) -> list[int]:
    """Return the token ids below `_IDS` that are not special tokens of a configuration."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    special = {
        value
        for part in parts
        if part is not None
        for key, value in vars(part).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    return [number for number in range(min(config.get_text_config().vocab_size, _IDS)) if number not in special]


def probe_images(model: Any, *, native: str) -> ProbeResult:
    """
    Compare features of images that are computed in one pass with the features of each image alone.

    Args:
        model: Vision model of transformers, whose attention keeps packed images apart.
        native: Attention of transformers that computes images alone.
    """
    *others, last = _draw_images(model)
    for images in others:
        with suppress(ValueError, RuntimeError):  # the tower takes another form
            return _compare_images(model, images, native)
    return _compare_images(model, last, native)


def _compare_images(model: Any, images: list[dict[str, torch.Tensor]], native: str) -> ProbeResult:
    together = _image_features(model, images)
    with using_native_attention(model, native), torch.no_grad():
        alone = [_image_features(model, [image])[0] for image in images]
    pixels, isolation = [image["pixel_values"] for image in images], 0.0
    for number, feature in enumerate(together):
        reached = torch.autograd.grad(feature.square().sum(), pixels, retain_graph=True, allow_unused=True)
        sizes = [0.0 if one is None else float(one.abs().max()) for one in reached]
        own = sizes.pop(number)
        isolation = max(isolation, max(sizes) / own if own > 0 else float("inf"))
    return ProbeResult(isolation, max(compare_values([one.detach() for one in together], alone)))


def _draw_images(model: Any) -> list[list[dict[str, torch.Tensor]]]:
    """
    Draw random images in each format that the vision tower may take, with the same numbers of
    patches. Pixels require gradients.
    """
    parts = [part.get_image_features for part in model.modules() if hasattr(part, "get_image_features")]
    parameters = {name for function in parts for name in inspect.signature(function).parameters}
    vision, weight = model.config.vision_config, next(model.parameters())
    side: int = getattr(vision, "patch_size", 1)
    grids, generator = torch.tensor(_GRIDS, device=weight.device), torch.Generator().manual_seed(_SEED)
    if "image_grid_thw" in parameters:  # rows of patches, flat or as pictures
        channels: int = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
        depth = getattr(vision, "temporal_patch_size", 1)
        shapes = [[(math.prod(grid), *patch) for grid in _GRIDS]
                  for patch in ((channels * depth * side**2,), (channels, side, side))]  # fmt: skip
        sizes = {"image_grid_thw": grids}
    elif "target_sizes" in parameters:  # the patches of an image side by side in one line
        shapes = [[(1, vision.num_channels, side, math.prod(grid) * side) for grid in _GRIDS]]
        sizes = {"target_sizes": grids[:, 1:]}
    else:  # the only size that the tower takes
        size = vision.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shapes, sizes = [[(1, getattr(vision, "num_channels", 3), height, width)] * len(_GRIDS)], {}
    return [
        [
            {"pixel_values": pixels.to(weight).requires_grad_(), **{key: one[n : n + 1] for key, one in sizes.items()}}
            for n, pixels in enumerate(torch.randn(shape, generator=generator) for shape in form)
        ]
        for form in shapes
    ]


def _image_features(model: Any, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the features of each image; shape (tokens, width)."""
    axes = {"pixel_values": -1 if "target_sizes" in images[0] else 0}
    found = model.get_image_features(
        **{key: torch.cat([image[key] for image in images], axes.get(key, 0)) for key in images[0]}
    )
    features = getattr(found, "pooler_output", found)
    if isinstance(features, torch.Tensor) and len(features) != len(images):
        sizes = torch.tensor([image["image_grid_thw"].prod() for image in images])
        features = torch.split(features, (sizes * len(features) // sizes.sum()).tolist())
    return [one.flatten(0, -2).float() for one in features]
