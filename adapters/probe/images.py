"""Images of a row: whether a model's tower keeps them apart, and gives what each gives alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers  # isort: skip

import torch

from adapters.attention import native_attention
from core.equality import Measured

_GRIDS = ((1, 12, 20), (1, 4, 4), (1, 16, 12))
"""Patches of images, by frames, rows and columns: larger and smaller than a tower's windows."""

_IMAGES = 3


def sees(config: Any) -> bool:
    """Return whether a model takes images."""
    return getattr(config, "vision_config", None) is not None


def measure_images(model: Any, *, native: str) -> Measured:
    """
    Compare the features of images in one pass with those of each alone.

    Args:
        model: Of transformers, as it is to pack; one that takes images.

        native: The attention of transformers that images alone are computed by.
    """
    by_grid = "image_grid_thw" in inspect.signature(model.get_image_features).parameters
    images = list(_by_grid(model.config.vision_config) if by_grid else _squares(model.config.vision_config))
    together = _features(model, images)
    with native_attention(model, native), torch.no_grad():
        alone = [_features(model, [image])[0] for image in images]
    isolation = 0.0
    for number, feature in enumerate(together):
        pixels = [image["pixel_values"] for image in images]
        reached = torch.autograd.grad(feature.square().sum(), pixels, retain_graph=True, allow_unused=True)
        sizes = [0.0 if one is None else float(one.abs().max()) for one in reached]
        own = sizes.pop(number)
        isolation = max(isolation, max(sizes) / own if own > 0 else float("inf"))
    scale = max(float(one.abs().max()) for one in alone)
    pairs = zip(together, alone, strict=True)
    return Measured(isolation, max(float((mine.detach() - own).abs().max()) for mine, own in pairs) / scale)


def _by_grid(vision: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield images as rows of patches, with how many there are each way."""
    channels: int = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
    size = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    generator = torch.Generator().manual_seed(5)
    for grid in _GRIDS:
        patches = torch.randn(grid[0] * grid[1] * grid[2], size, generator=generator)
        yield {"pixel_values": patches.requires_grad_(), "image_grid_thw": torch.tensor([grid])}


def _squares(vision: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield images of the one size that the tower takes."""
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    generator = torch.Generator().manual_seed(5)
    for _ in range(_IMAGES):
        yield {"pixel_values": torch.randn(1, channels, height, width, generator=generator).requires_grad_()}


def _features(model: Any, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the features of each image; shape (tokens, width)."""
    found = model.get_image_features(**{key: torch.cat([image[key] for image in images]) for key in images[0]})
    features = getattr(found, "pooler_output", found)
    if isinstance(features, torch.Tensor) and len(features) != len(images):
        sizes = torch.tensor([image["image_grid_thw"].prod() for image in images])
        features = torch.split(features, (sizes * len(features) // sizes.sum()).tolist())
    return [one.flatten(0, -2).float() for one in features]
