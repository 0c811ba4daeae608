"""
What a sample or a pack costs to train, in floating-point operations (FLOPs), from the layer sizes
of the model.

Counted are the multiplications and additions of matrix products in one forward pass; a backward
pass over all weights takes twice as many. Norms, activations and rotations are not counted: they
are linear in the positions and far below one percent of a model of usual width. Three parts make up
the work:

- every position passes all weights, those of the output head included;
- attention compares each token with those that it sees, so causal attention over a sample of n
  tokens counts n (n + 1) / 2 pairs, and an implementation that computes the whole square, as eager
  attention does, n * n;
- each image's patches pass the vision tower, whose layers attend within the image, or within
  windows of it.

Work is additive: attention by sample makes the work of a pack the sum over its samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigError
from core.lengths import IntArray, Lengths, as_lengths

FLOPs = NDArray[np.float64]
"""Floating-point operations; float64, because those of a large data set pass 64-bit integers."""

Grid = Sequence[int]
"""
Patches of one image before merging: frames, rows, columns, as `image_grid_thw` of ms-swift's
samples gives them.
"""

Sizes = Mapping[str, Any]

_PER_PRODUCT = 2
"""FLOPs of one multiplication and the addition of its result."""

_ATTENTION_PRODUCTS = 2
"""Products per pair of tokens and width: query with key, and weight with value."""


@attrs.frozen
class VisionWork:
    """Forward FLOPs of a vision tower and its projector, in plain numbers."""

    per_patch: int
    """FLOPs of the matrix products that one patch passes in all layers and in the projectors."""

    per_image_pair: int
    """
    FLOPs of attention per pair of patches of one image frame, over the layers that attend within
    the frame.
    """

    per_window_pair: int
    """
    FLOPs of attention per pair of patches of one window, over the layers that attend within
    windows; 0 without such layers.
    """

    window: int
    """
    Patches on the side of a window; those at the right and lower edges of an image are smaller. 0
    without windows.
    """

    def of_counts(self, images: Any, patches: Any) -> FLOPs:
        """
        Return the forward FLOPs of each sample's images where only their number and patches are
        known: as if a sample's images had equal sizes and whole windows.

        Args:
            images: Images of each sample; shape (num_samples,).

            patches: Patches of all images of a sample together; of the same shape.

        >>> vision = VisionWork(per_patch=100, per_image_pair=1, per_window_pair=1, window=4)
        >>> vision.of_counts([1, 2, 0], [16, 32, 0]).tolist()
        [2112.0, 4224.0, 0.0]
        """
        images, patches = np.asarray(images, dtype=np.float64), np.asarray(patches, dtype=np.float64)
        pairs = patches**2 / np.maximum(images, 1)
        windows = self.per_window_pair * float(self.window) ** 2 * patches
        work: FLOPs = self.per_patch * patches + self.per_image_pair * pairs + windows
        return work

    def of(self, grids: Iterable[Grid]) -> FLOPs:
        """
        Return the forward FLOPs of each image; shape (num_images,).

        >>> vision = VisionWork(per_patch=100, per_image_pair=1, per_window_pair=1, window=4)
        >>> vision.of([(1, 4, 4), (1, 4, 6)]).tolist()
        [2112.0, 3296.0]
        """
        frames, rows, columns = np.array(list(grids), dtype=np.float64).reshape(-1, 3).T
        patches = rows * columns
        pairs = _squares(rows, self.window) * _squares(columns, self.window)
        work: FLOPs = frames * (
            self.per_patch * patches + self.per_image_pair * patches**2 + self.per_window_pair * pairs
        )
        return work


@attrs.frozen
class WorkModel:
    """Forward FLOPs of a model, in plain numbers."""

    per_position: int
    """FLOPs of the matrix products that one position passes: all layers and the output head."""

    per_pair: int
    """FLOPs of attention per pair of tokens that it compares, over all layers."""

    vision: VisionWork | None = None
    """FLOPs of the vision tower; None for a model of text alone."""

    @classmethod
    def from_config(cls, config: Sizes) -> WorkModel:
        """
        Return the work of a model from the content of its config.json.

        Raises:
            ConfigError: The architecture is not one of `ARCHITECTURES`, has attention layers that
            are not full, or
                lacks a size.
        """
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            reason = f"the work of model_type {kind!r} is not known; known are {', '.join(ARCHITECTURES)}"
            raise ConfigError.of("model.model", reason)
        text = config.get("text_config", config)
        if others := sorted(set(text.get("layer_types") or ()) - {"full_attention"}):
            reason = f"the work of {', '.join(others)} layers is not known; known is full attention"
            raise ConfigError.of("model.model", reason)
        width, layers, heads = (_size(text, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        attention = heads * (text.get("head_dim") or width // heads)
        keys_and_values = 2 * attention * (text.get("num_key_value_heads") or heads) // heads
        layer = width * (2 * attention + keys_and_values + 3 * _size(text, "intermediate_size"))
        vision = ARCHITECTURES[kind]
        return cls(
            per_position=_PER_PRODUCT * (layers * layer + width * _size(text, "vocab_size")),
            per_pair=_PER_PRODUCT * _ATTENTION_PRODUCTS * layers * attention,
            vision=vision(_mapping(config, "vision_config")) if vision else None,
        )

    @classmethod
    def estimated(cls, config: Sizes) -> WorkModel:
        """
        Return the work of a model whose architecture is not known: tokens and squares of lengths,
        in the proportion of ordinary layers of its width.

        Where *config* says neither, it takes 32 layers of a width of 4,096. Images count as the
        tokens that they become.
        """
        text = config.get("text_config") or config
        width, layers = int(text.get("hidden_size") or 4096), int(text.get("num_hidden_layers") or 32)
        # Four square matrices of attention, and an MLP of about eight.
        return cls(
            per_position=_PER_PRODUCT * layers * 12 * width**2,
            per_pair=_PER_PRODUCT * _ATTENTION_PRODUCTS * layers * width,
        )

    def trained(self, *, text: bool = True, vision: bool = True, vision_gradients: bool = True) -> WorkModel:
        """
        Return the FLOPs of a forward and a backward pass, from this, the forward pass alone.

        A backward pass takes as many for the gradients of what a layer is given, and as many again
        for those of its weights, if these are trained; attention has no weights, and two products
        for each of its own.

        Args:
            text: Whether the text's weights are trained, not frozen or under adapters.

            vision: The same of the vision tower's weights.

            vision_gradients: Whether gradients reach the vision tower at all: something in it is
            trained, be it adapters.
        """
        tower = self.vision
        if tower is not None and vision_gradients:
            tower = attrs.evolve(
                tower,
                per_patch=tower.per_patch * (2 + vision),
                per_image_pair=3 * tower.per_image_pair,
                per_window_pair=3 * tower.per_window_pair,
            )
        return WorkModel(per_position=self.per_position * (2 + text), per_pair=3 * self.per_pair, vision=tower)

    def of(self, lengths: Lengths, grids: Sequence[Sequence[Grid]] = ()) -> FLOPs:
        """
        Return the forward FLOPs of each sample under causal attention; shape (num_samples,).

        The work of a pack under attention by sample is the sum over its samples.

        Args:
            lengths: Tokens of each sample, image tokens included; each >= 1.

            grids: The images of each sample, one list a sample, for a model that sees images; none
            if empty.

        Raises:
            InvalidLengthError: A length that is not a positive whole number.

            ValueError: Grids of another number of samples than lengths.

        >>> model = WorkModel(per_position=100, per_pair=2)
        >>> model.of([1, 3]).tolist()
        [102.0, 312.0]
        """
        tokens = as_lengths(lengths).astype(np.float64)
        work = self.of_positions(tokens, causal_pairs(tokens))
        if not len(grids):
            return work
        if len(grids) != tokens.size:
            message = f"grids of {len(grids)} samples for {tokens.size} lengths"
            raise ValueError(message)
        images = self.of_images([grid for sample in grids for grid in sample])
        sample = np.repeat(np.arange(tokens.size), [len(sample) for sample in grids])
        return work + np.bincount(sample, weights=images, minlength=tokens.size)

    def of_positions(self, positions: Any, pairs: Any) -> FLOPs:
        """
        Return the forward FLOPs of text by the number of positions computed, padding included, and
        of pairs compared.

        Both are numbers or arrays of one shape, which the result has.
        """
        work: FLOPs = np.multiply(positions, self.per_position, dtype=np.float64) + np.multiply(
            pairs, self.per_pair, dtype=np.float64
        )
        return work

    def of_images(self, grids: Sequence[Grid]) -> FLOPs:
        """
        Return the forward FLOPs of each image in the vision tower; shape (num_images,).

        Raises:
            ValueError: There are images, and the model sees none.
        """
        if self.vision is None:
            if len(grids):
                message = f"{len(grids)} images for a model without a vision tower"
                raise ValueError(message)
            return np.zeros(0)
        return self.vision.of(grids)


@attrs.frozen(eq=False)
class SampleWorks:
    """Work of each sample of a data set, from what is measured of it."""

    model: WorkModel

    lengths: IntArray
    """Tokens of each sample; shape (num_samples,)."""

    images: FLOPs
    """FLOPs of each sample's images; shape (num_samples,)."""

    @classmethod
    def of(cls, model: WorkModel, lengths: Lengths, *, images: Any = 0, patches: Any = 0) -> SampleWorks:
        """
        Return the works of samples.

        Args:
            model: What its layers take.

            lengths: Tokens of each sample, image tokens included, each >= 1; shape (num_samples,).

            images: Images of each sample; shape (num_samples,).

            patches: Patches of all images of a sample together; shape (num_samples,).
        """
        tokens = as_lengths(lengths)
        seen = np.zeros(tokens.size) if model.vision is None else model.vision.of_counts(images, patches)
        return cls(model, tokens, np.broadcast_to(seen, tokens.shape))

    @property
    def samples(self) -> IntArray:
        """
        FLOPs of each sample, whole numbers, whose sums are the same on every processor; shape
        (num_samples,).
        """
        return np.rint(self.padded(self.lengths) + self.images).astype(np.int64)

    def padded(self, widths: Any) -> FLOPs:
        """Return the FLOPs of text alone, of rows of these *widths*; of their shape."""
        positions = np.asarray(widths, dtype=np.float64)
        return self.model.of_positions(positions, causal_pairs(positions))


def causal_pairs(lengths: Any) -> Any:
    """
    Return the pairs of tokens that causal attention compares in rows of these *lengths*; a number
    or an array, as given.

    >>> causal_pairs(3)
    6.0
    """
    return lengths * (lengths + 1) / 2


def _squares(side: FLOPs, window: int) -> FLOPs:
    """
    Return the sum of the squares of the parts that windows cut each *side* into; zeros without
    windows.
    """
    if not window:
        return np.zeros_like(side)
    rest = side % window
    squares: FLOPs = side // window * window**2 + rest**2
    return squares


def _qwen2_5_vl(vision: Sizes) -> VisionWork:
    """
    Return the work of Qwen2.5-VL's tower: gated MLPs, windows but for some layers, one projector.
    """
    full = len(_mapping(vision, "fullatt_block_indexes"))
    merged = _size(vision, "patch_size") * vision.get("spatial_merge_size", 2)
    return attrs.evolve(
        _tower(vision, mlp_products=3, num_projectors=1),
        per_image_pair=_pair(vision) * full,
        per_window_pair=_pair(vision) * (_size(vision, "depth") - full),
        # A window is a whole number of merged patches wide.
        window=_size(vision, "window_size") // merged * vision.get("spatial_merge_size", 2),
    )


def _qwen3_vl(vision: Sizes) -> VisionWork:
    """
    Return the work of Qwen3-VL's tower: plain MLPs, whole frames, a projector more for each layer
    that feeds the text's.
    """
    return _tower(vision, mlp_products=2, num_projectors=1 + len(_mapping(vision, "deepstack_visual_indexes")))


def _tower(vision: Sizes, *, mlp_products: int, num_projectors: int) -> VisionWork:
    """
    Return the work of a vision tower whose layers all attend within whole frames.

    Args:
        vision: The `vision_config` of a config.json.

        mlp_products: Matrix products of a layer's MLP, each as large as width times its inner
        width.

        num_projectors: Pairs of matrices that merge patches and bring them to the text's width.
    """
    width, depth, patch = (_size(vision, key) for key in ("hidden_size", "depth", "patch_size"))
    embedding = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * patch**2 * width
    layer = width * (4 * width + mlp_products * _size(vision, "intermediate_size"))
    # A projector takes merge² patches at once, merge² times as wide, so a patch has its share of
    # the product.
    merged = vision.get("spatial_merge_size", 2) ** 2 * width
    projector = width * (merged + _size(vision, "out_hidden_size"))
    return VisionWork(
        per_patch=_PER_PRODUCT * (embedding + depth * layer + num_projectors * projector),
        per_image_pair=_pair(vision) * depth,
        per_window_pair=0,
        window=0,
    )


def _pair(vision: Sizes) -> int:
    """Return the FLOPs of attention per pair of patches in one layer."""
    return _PER_PRODUCT * _ATTENTION_PRODUCTS * _size(vision, "hidden_size")


def _mapping(sizes: Sizes, key: str) -> Any:
    """Return what *sizes* says under *key*; ConfigError without it."""
    if key not in sizes:
        raise ConfigError.of("model.model", f"config.json has no {key}, which the work of a sample depends on")
    return sizes[key]


def _size(sizes: Sizes, key: str) -> int:
    """Return the size under *key*; ConfigError without it."""
    return int(_mapping(sizes, key))


ARCHITECTURES = {"qwen2": None, "qwen3": None, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}
"""Model type of a config.json -> the reader of its vision tower's sizes."""
