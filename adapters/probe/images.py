"""Probe of a vision tower: whether the images of a row are apart, and equal to each image alone."""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch

from packplan.adapters.attention import native_attention
from packplan.adapters.proof.comparison import compare_values
from packplan.core.equality import ProbeResult

_GRIDS = ((1, 12, 20), (1, 4, 4), (1, 16, 12))
"""Frames, rows and columns of patches: larger and smaller than a tower's windows."""


def sees(config: Any) -> bool:
    """Return whether a model takes images."""
    return getattr(config, "vision_config", None) is not None


def measure_images(model: Any, *, native: str) -> ProbeResult:
    """
    Compare the features of images in one pass with those of each image alone.

    Args:
        model: Model of transformers that takes images, set to pack.
        native: Attention of transformers for images alone.
    """
    error = None
    for images in _input_forms(model):
        try:
            return _compare(model, [_to_model(model, image) for image in images], native)
        except (ValueError, RuntimeError) as found:  # the tower takes another form
            error = found
    raise error or ValueError


def _input_forms(model: Any) -> list[list[dict[str, torch.Tensor]]]:
    """Return alternative forms of the same images, for the model's tower to accept one."""
    parts = [part.get_image_features for part in model.modules() if hasattr(part, "get_image_features")]
    parameters = {name for function in parts for name in inspect.signature(function).parameters}
    vision = model.config.vision_config
    if "image_grid_thw" in parameters:
        return [_by_grid(vision, flat=True), _by_grid(vision, flat=False)]
    return [_in_line(vision)] if "target_sizes" in parameters else [_squares(vision)]


def _compare(model: Any, images: list[dict[str, torch.Tensor]], native: str) -> ProbeResult:
    """Compare the features of some images."""
    together = _features(model, images)
    with native_attention(model, native), torch.no_grad():
        alone = [_features(model, [image])[0] for image in images]
    pixels, isolation = [image["pixel_values"] for image in images], 0.0
    for number, feature in enumerate(together):
        reached = torch.autograd.grad(feature.square().sum(), pixels, retain_graph=True, allow_unused=True)
        sizes = [0.0 if one is None else float(one.abs().max()) for one in reached]
        own = sizes.pop(number)
        isolation = max(isolation, max(sizes) / own if own > 0 else float("inf"))
    return ProbeResult(isolation, max(compare_values([one.detach() for one in together], alone)))


def _by_grid(vision: Any, *, flat: bool) -> list[dict[str, torch.Tensor]]:
    """Return images as rows of patches, flat or as pictures, with their grids."""
    channels: int = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
    depth, side = getattr(vision, "temporal_patch_size", 1), vision.patch_size
    shape = (channels * depth * side**2,) if flat else (channels, side, side)
    drawn = _drawn((math.prod(grid), *shape) for grid in _GRIDS)
    return [
        {"pixel_values": patches, "image_grid_thw": torch.tensor([grid])}
        for patches, grid in zip(drawn, _GRIDS, strict=True)
    ]


def _in_line(vision: Any) -> list[dict[str, torch.Tensor]]:
    """Return images as their patches side by side in one line, with their sizes."""
    side, sizes = vision.patch_size, [grid[1:] for grid in _GRIDS]
    drawn = _drawn((1, vision.num_channels, side, math.prod(size) * side) for size in sizes)
    return [
        {"pixel_values": line, "target_sizes": torch.tensor([size])} for line, size in zip(drawn, sizes, strict=True)
    ]


def _squares(vision: Any) -> list[dict[str, torch.Tensor]]:
    """Return images of the only size that the tower takes."""
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (1, getattr(vision, "num_channels", 3), height, width)
    return [{"pixel_values": pixels} for pixels in _drawn([shape] * len(_GRIDS))]


def _drawn(shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return random pixels, one tensor for each shape."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _to_model(model: Any, image: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an image on the model's device, its pixels in the model's type and with gradients."""
    weight = next(model.parameters())
    here = {key: part.to(weight.device) for key, part in image.items()}
    return {**here, "pixel_values": here["pixel_values"].to(weight.dtype).requires_grad_()}


def _features(model: Any, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
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
