"""
Work of a sample or a pack in floating-point operations (FLOPs), computed from the model's layer
sizes.

The multiplications and additions of matrix products in one forward pass are counted. A backward
pass over all weights takes twice as many FLOPs. Norms, activations and rotations are left out: they
are linear in the positions, and far below one percent in a model of usual width. Work has four
parts:

- Every position is multiplied with the weights of all layers and of the output head. Only the
  experts to which a position is routed count.
- Causal attention over a sample of n tokens counts n (n + 1) / 2 pairs. Implementations that
  compute all n * n pairs, such as eager attention, count the same. A layer limited to a window or a
  chunk has fewer pairs than a layer with full attention.
- Layers with the delta rule (linear attention) compute whole chunks of tokens.
- The vision tower computes the patches of each image, with attention within the image or within
  windows of the image.

Tokens attend only within their sample, so the work of a pack is the sum over its samples.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from packplan.core.errors import ModelError
from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.work.keys import ATTENTION_PRODUCTS, PRODUCT, Sizes, as_sizes
from packplan.core.work.text import DELTA_CHUNK, LocalAttention, read_text_work
from packplan.core.work.vision import FLOPs, VisionWork, read_vision_work

FRAMES_PER_LAYER = 2
"""Number of video frames that a vision tower computes as one image."""


@attrs.frozen
class WorkModel:
    """
    Coefficients from which a model's FLOPs are computed, for a forward pass or a training step.
    """

    per_position: float
    """FLOPs of the matrix products of one position, over all layers and the output head."""

    per_pair: float
    """FLOPs of attention per pair of tokens, over all layers with full attention."""

    vision: VisionWork | None = None
    """Coefficients of the vision tower; None for a text model."""

    local: tuple[LocalAttention, ...] = ()
    """Attention layers limited to a window or a chunk."""

    per_chunk: float = 0
    """FLOPs of a chunk of 64 tokens, over all layers with the delta rule."""

    @classmethod
    def from_config(cls, config: Sizes) -> WorkModel:
        """
        Return the work model that a model's config.json describes.

        Args:
            config: Content of a config.json, or a model's `config` of transformers.

        Raises:
            ArgumentError: *config* is neither.
            ModelError: A size is missing, or a key has an unknown effect on the work.
        """
        config = as_sizes(config)
        thinker = config.get("thinker_config")  # the trained part, which gets no audio
        config = thinker or config
        text = config.get("text_config") or config
        vision = config.get("vision_config")
        unknown = {"encoder", "decoder"} if thinker else {"audio_config", "encoder", "decoder"}
        if others := sorted(set(config) & unknown):
            raise ModelError("work", f"the work of the model's {', '.join(others)} is not known")
        layers = read_text_work(text, model_type=text.get("model_type") or config.get("model_type"))
        return cls(**layers, vision=None if vision is None else read_vision_work(config))

    @classmethod
    def from_config_or_estimated(cls, config: Sizes) -> tuple[WorkModel, str | None]:
        """Return the work model of a config.json, and the reason if it is an estimate, or None."""
        try:
            return cls.from_config(config), None
        except ModelError as error:
            return cls.estimated(config), error.fact

    @classmethod
    def estimated(cls, config: Sizes) -> WorkModel:
        """
        Estimate the work of an unknown architecture as the work of ordinary layers of its width.

        If *config* has no number for the layers or the width, 32 layers or a width of 4,096 are
        assumed. Images add only the work of their tokens.
        """
        config = as_sizes(config)
        config = config.get("thinker_config") or config
        text = config.get("text_config") or config

        def size(name: str, usual: int) -> int:
            found = text.get(name)  # lxmert has a dict of layers
            return found if isinstance(found, int) and found else usual

        width, layers = size("hidden_size", 4096), size("num_hidden_layers", 32)
        # Four square matrices of attention, and an MLP of about eight square matrices.
        return cls(
            per_position=PRODUCT * layers * 12 * width**2, per_pair=PRODUCT * ATTENTION_PRODUCTS * layers * width
        )

    def trained(self, *, text: bool = True, vision: bool = True, vision_gradients: bool = True) -> WorkModel:
        """
        Return the work model of a forward and backward pass, computed from this model of the
        forward pass.

        In a backward pass, the gradients of a layer's inputs take as many FLOPs as the forward
        pass. The gradients of trained weights take as many again. Attention has no weights, but its
        backward pass has two products for each product of the forward pass.

        Args:
            text: Whether the language model's own weights are trained (not frozen, and not only
                adapters).
            vision: Whether the vision tower's own weights are trained.
            vision_gradients: Whether any weights in the vision tower are trained, adapters
                included.
        """
        tower = self.vision
        if tower is not None and vision_gradients:
            tower = attrs.evolve(
                tower,
                per_patch=tower.per_patch * (2 + vision),
                per_image_pair=3 * tower.per_image_pair,
                per_window_pair=3 * tower.per_window_pair,
            )
        return attrs.evolve(self.scaled(2 + text, 3), vision=tower, per_chunk=3 * self.per_chunk)

    def scaled(self, text: float, attention: float) -> WorkModel:
        """
        Return a work model with multiplied text terms. The vision tower does not change.

        Args:
            text: Factor for the matrix products of text positions, and for layers with the delta
                rule.
            attention: Factor for attention between text tokens.
        """
        return attrs.evolve(
            self,
            per_position=text * self.per_position,
            per_pair=attention * self.per_pair,
            local=tuple(attrs.evolve(one, per_pair=attention * one.per_pair) for one in self.local),
            per_chunk=text * self.per_chunk,
        )

    def sample_flops(self, lengths: Lengths) -> FLOPs:
        """
        Return the forward FLOPs of each sample's text with causal attention; shape (num_samples,).

        Raises an ArgumentError if a length is not a positive whole number.

        The work of a pack is the sum over its samples.

        >>> model = WorkModel(per_position=100, per_pair=2)
        >>> model.sample_flops([1, 3]).tolist()
        [102.0, 312.0]
        """
        return self.row_flops(as_lengths(lengths))

    def row_flops(self, widths: Any) -> FLOPs:
        """
        Return the forward FLOPs of rows of *widths* tokens, each with one text sample; same shape
        as *widths*.
        """
        tokens = np.asarray(widths, dtype=np.float64)
        work: FLOPs = tokens * self.per_position + tokens * (tokens + 1) / 2 * self.per_pair
        for layers in self.local:
            work = work + layers.per_pair * layers.pairs(tokens)
        if self.per_chunk:
            work = work + self.per_chunk * np.ceil(tokens / DELTA_CHUNK)
        return work


@attrs.frozen(eq=False)
class SampleWorks:
    """Work of each sample in a data set, computed from its length, images and videos."""

    model: WorkModel

    lengths: IntArray
    """Number of tokens of each sample; shape (num_samples,)."""

    media_flops: FLOPs
    """FLOPs of each sample's images and videos; shape (num_samples,)."""

    @classmethod
    def from_lengths(
        cls,
        model: WorkModel,
        lengths: Lengths,
        *,
        images: Any = 0,
        patches: Any = 0,
        frames: Any = 0,
        video_patches: Any = 0,
    ) -> SampleWorks:
        """
        Compute the work of samples from their lengths and media.

        Args:
            model: Work model of the model.
            lengths: Number of tokens of each sample, image tokens included, 0 for a record that is
                not a sample; shape (num_samples,).
            images: Number of images of each sample; shape (num_samples,).
            patches: Number of patches in all images of each sample; shape (num_samples,).
            frames: Number of frames sampled from the videos of each sample; shape (num_samples,).
                Two frames count as one image.
            video_patches: Number of patches in all videos of each sample; shape (num_samples,).

        >>> vision = VisionWork(per_patch=100, per_image_pair=1, per_window_pair=0, window=0)
        >>> model = WorkModel(per_position=0, per_pair=0, vision=vision)
        >>> SampleWorks.from_lengths(model, [9], images=2, patches=32).flops.tolist()
        [3712.0]
        >>> SampleWorks.from_lengths(model, [9], frames=4, video_patches=32).flops.tolist()
        [3712.0]
        """
        tokens = as_lengths(lengths, least=0)
        media = np.zeros(tokens.size)
        if model.vision is not None:
            layers = np.asarray(frames) / FRAMES_PER_LAYER
            media = model.vision.estimate_image_flops(images, patches)
            media = media + model.vision.estimate_image_flops(layers, video_patches)
        return cls(model, tokens, np.broadcast_to(media, tokens.shape))

    def scaled(self, text: float, attention: float, vision: float) -> SampleWorks:
        """
        Return these works with each term multiplied by a factor, such as nanoseconds per FLOP.

        Args:
            text: See `WorkModel.scaled`.
            attention: See `WorkModel.scaled`.
            vision: Factor for the vision tower.

        >>> model = WorkModel(per_position=100, per_pair=2)
        >>> SampleWorks.from_lengths(model, [3]).scaled(0, 10, 0).flops.tolist()
        [120.0]
        """
        return attrs.evolve(self, model=self.model.scaled(text, attention), media_flops=vision * self.media_flops)

    @property
    def flops(self) -> FLOPs:
        """Work of each sample, in FLOPs or in the unit of `scaled`; shape (num_samples,)."""
        return np.rint(self.model.row_flops(self.lengths) + self.media_flops)
