"""Work of vision towers and their projectors, computed from `vision_config` in a config.json."""

from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ModelError
from packplan.core.work.keys import ATTENTION_PRODUCTS, PRODUCT, ConfigKeys, Sizes

FLOPs = NDArray[np.float64]
"""Floating-point operations; float64, since sums over a data set may exceed 64-bit integers."""


@attrs.frozen
class VisionWork:
    """
    Coefficients from which the forward FLOPs of a vision tower and its projectors are computed.
    """

    per_patch: int
    """FLOPs of the matrix products of one patch, over all layers and projectors."""

    per_image_pair: int
    """
    FLOPs of attention per pair of patches in a frame, over all layers that attend within frames.
    """

    per_window_pair: int
    """
    FLOPs of attention per pair of patches in a window, over all layers that attend within windows.
    """

    window: int
    """
    Number of patches along the side of a window; 0 without windows. Windows at the right and lower
    edges may be smaller.
    """

    def estimate_image_flops(self, images: Any, patches: Any) -> FLOPs:
        """
        Estimate the forward FLOPs of each sample's images from the numbers of images and patches.

        The estimate assumes that all images of a sample have the same size, in whole windows.

        Args:
            images: Number of images of each sample; shape (num_samples,).
            patches: Number of patches in all images of each sample; shape (num_samples,).

        >>> vision = VisionWork(per_patch=100, per_image_pair=1, per_window_pair=1, window=4)
        >>> vision.estimate_image_flops([1, 2, 0], [16, 32, 0]).tolist()
        [2112.0, 4224.0, 0.0]
        """
        images, patches = np.asarray(images, dtype=np.float64), np.asarray(patches, dtype=np.float64)
        pairs = patches**2 / np.maximum(images, 1)
        windows = self.per_window_pair * float(self.window) ** 2 * patches
        work: FLOPs = self.per_patch * patches + self.per_image_pair * pairs + windows
        return work


def read_vision_work(config: Sizes) -> VisionWork:
    """
    Compute the work of a vision tower. Raise a ModelError if its keys match no known kind of tower.

    In all known towers, no patch attends beyond its frame, and patches are then merged. The kind of
    a tower is recognised by its keys:

    - `fullatt_block_indexes`: all layers except those with these indexes attend within windows.
    - `deepstack_visual_indexes`, or `num_position_embeddings` with `spatial_merge_size`: positions
      are learned, and each of the indexes adds a projector.
    - `embed_dim` with `spatial_merge_size`: `embed_dim` is the tower's width, and `hidden_size` is
      the text model's width.
    - `out_hidden_size` and `image_size` with `attention_bias` false: GLM-4V, whose MLPs are as wide
      as the text model.
    - `use_absolute_position_embeddings` and the model's `downsample_ratio`: InternVL, whose tiles
      all have the same size.
    """
    sizes = config["vision_config"]
    keys = ConfigKeys(sizes)
    if None not in (config.get("downsample_ratio"), keys.find("use_absolute_position_embeddings")):
        return _tile_work(keys, config["downsample_ratio"], text=ConfigKeys(config["text_config"]).size("hidden_size"))
    if (full := keys.find("fullatt_block_indexes")) is not None:
        merge, width = keys.find_size("spatial_merge_size") or 2, keys.size("hidden_size")
        return attrs.evolve(
            _tower_work(keys, width, inner=keys.size("intermediate_size"), mlp_products=3),
            per_image_pair=_pair_flops(width) * len(full),
            per_window_pair=_pair_flops(width) * (keys.size("depth") - len(full)),
            # The width of a window is a whole number of merged patches.
            window=keys.size("window_size") // (keys.size("patch_size") * merge) * merge,
        )
    deep, merges = keys.find("deepstack_visual_indexes"), keys.find("spatial_merge_size") is not None
    if deep is not None or (merges and keys.find("num_position_embeddings") is not None):
        inner, num_projectors = keys.size("intermediate_size"), 1 + len(deep or ())
        return _tower_work(keys, keys.size("hidden_size"), inner=inner, mlp_products=2, num_projectors=num_projectors)
    if merges and (embedded := keys.find_size("embed_dim")) is not None:
        inner = embedded * keys.size("mlp_ratio")
        return _tower_work(keys, embedded, inner=inner, mlp_products=2, out=keys.size("hidden_size"))
    if keys.find("attention_bias") is False and None not in (keys.find("out_hidden_size"), keys.find("image_size")):
        return _glm_work(keys)
    reason = "the work of its vision tower is not known: its vision_config has no fullatt_block_indexes, "
    raise ModelError("work", reason + "deepstack_visual_indexes or embed_dim with spatial_merge_size")


def _tower_work(
    keys: ConfigKeys, width: int, *, inner: int, mlp_products: int, num_projectors: int = 1, out: int | None = None
) -> VisionWork:
    """Return the work of a vision tower whose layers all attend within whole frames."""
    depth = keys.size("depth")
    channels = keys.find_size("in_channels", "in_chans") or 3
    embedding = channels * (keys.find_size("temporal_patch_size") or 2) * keys.size("patch_size") ** 2 * width
    layer = width * (4 * width + mlp_products * inner)
    # A projector computes merge² patches together, so each patch has a share of the product.
    merged = (keys.find_size("spatial_merge_size") or 2) ** 2 * width
    projector = width * (merged + (keys.size("out_hidden_size") if out is None else out))
    return VisionWork(
        per_patch=PRODUCT * (embedding + depth * layer + num_projectors * projector),
        per_image_pair=_pair_flops(width) * depth,
        per_window_pair=0,
        window=0,
    )


def _glm_work(keys: ConfigKeys) -> VisionWork:
    """
    Compute the work of GLM-4V's tower: a convolution merges patches, and an MLP projects them.
    """
    width, out, inner = keys.size("hidden_size"), keys.size("out_hidden_size"), keys.size("intermediate_size")
    tower = _tower_work(keys, width, inner=out, mlp_products=3, num_projectors=0)
    merge = keys.find_size("spatial_merge_size") or 2
    # The convolution covers the patches that it merges, so each patch has a share of it.
    projector = PRODUCT * (width * out + out * (out + 3 * inner) // merge**2)
    return attrs.evolve(tower, per_patch=tower.per_patch + projector)


def _tile_work(keys: ConfigKeys, ratio: float, *, text: int) -> VisionWork:
    """
    Compute the work of InternVL's tower, whose tiles count as windows and have one token more than
    patches.
    """
    width, depth = keys.size("hidden_size"), keys.size("num_hidden_layers")
    patch, size = _side_length(keys, "patch_size"), _side_length(keys, "image_size")
    merge, side = round(1 / ratio), size // patch
    patches = side**2
    layer = width * (4 * width + 2 * keys.size("intermediate_size"))
    embedding = (keys.find_size("num_channels") or 3) * patch**2 * width
    projector = text * (width + text // merge**2)
    extra = PRODUCT * layer + _pair_flops(width) * (2 * patches + 1)
    return VisionWork(
        per_patch=PRODUCT * (embedding + depth * layer + projector) + depth * extra // patches,
        per_image_pair=0,
        per_window_pair=_pair_flops(width) * depth,
        window=side,
    )


def _side_length(keys: ConfigKeys, name: str) -> int:
    """
    Return the length of a side in pixels, which the config has as a number or as a list of equal
    numbers.
    """
    found = keys.find(name)
    if isinstance(found, (list, tuple)) and len(set(found)) == 1:
        return ConfigKeys({name: found[0]}).size(name)
    return keys.size(name)


def _pair_flops(width: int) -> int:
    """Return the FLOPs of attention per pair of patches in one layer."""
    return PRODUCT * ATTENTION_PRODUCTS * width
