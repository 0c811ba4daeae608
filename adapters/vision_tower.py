"""
Makes a model's vision tower run on every batch, with a dummy image if the batch has none.

If ranks share weights or gradients, a rank that skips the tower blocks the other ranks. With FSDP
and ZeRO 3, ranks wait for the tower's weights; with DDP and ZeRO 1 and 2, for its gradients.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import attrs
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from packplan.core.errors import ArgumentError

SEEING: WeakSet[nn.Module] = WeakSet()
"""Language models of models in which `ensure_tower_runs` has added its hooks."""


def parameter_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of all parameters of a function."""
    return set(inspect.signature(function).parameters)


def _language_model_attribute(part: Any) -> str | None:
    """
    Return the name of the attribute of *part* that is its language model.

    If *part* does not compute image features, None is returned.
    """
    if not hasattr(part, "get_image_features"):
        return None
    names = ("language_model", "model")  # a thinker's has the name of a whole model's inner part
    readers = (name for name in names if isinstance(getattr(part, name, None), nn.Module))
    return next((name for name in readers if not hasattr(getattr(part, name), "get_image_features")), None)


@attrs.frozen(eq=False)
class DummyImage:
    """Dummy image, with which a model's vision tower runs on a batch without images."""

    inner: Any
    """Module with the vision tower, the language model and `get_image_features`."""

    reader: str
    """Name of the attribute of `inner` that is the language model."""

    media: Mapping[str, torch.Tensor]
    """Dummy image, as arguments of `inner.get_image_features`."""

    @classmethod
    def from_inputs(cls, model: nn.Module, inputs: Mapping[str, Any]) -> DummyImage | None:
        """
        Build a dummy image from inputs of a model; None if the model computes no image features.

        Args:
            model: Model that accepts images.
            inputs: Inputs of the model that contain an image.
        """
        found = [(part, name) for part in model.modules() if (name := _language_model_attribute(part)) is not None]
        if not found:
            return None
        inner: Any = found[-1][0]  # the innermost part, which outer parts may call
        known = parameter_names(inner.get_image_features)
        media = {name: value for name, value in inputs.items() if name in known and isinstance(value, torch.Tensor)}
        return cls(inner, found[-1][1], media)

    @property
    def towers(self) -> list[str]:
        """Names of the modules of `inner` that process images before the language model runs."""
        heads = {id(getattr(self.inner, name, None)) for name in ("lm_head", "audio_tower")}
        return [name for name, part in self.inner.named_children() if name != self.reader and id(part) not in heads]

    def zero_through_tower(self, device: torch.device) -> torch.Tensor:
        """Return a zero whose gradient reaches all weights that compute image features."""
        # ms-swift creates these tensors in inference mode, and gradients need a copy.
        given = {key: value.to(device).clone() for key, value in self.media.items()}
        features = dict(self.inner.get_image_features(**given))
        if "pooler_output" in features:  # ZeRO 3 compares which outputs ranks use, and models use this one
            features.pop("last_hidden_state", None)
        leaves = [leaf for leaf in tree_leaves(features) if isinstance(leaf, torch.Tensor)]
        return torch.stack([leaf.mean() for leaf in leaves]).sum() * 0

    def unreached_weights(self) -> list[str]:
        """Return the names of trained weights in `towers` that image features do not depend on."""
        vision = {
            f"{tower}.{name}": weight
            for tower in self.towers
            for name, weight in self.inner.get_submodule(tower).named_parameters()
            if weight.requires_grad
        }
        if not vision:
            return []
        zero = self.zero_through_tower(next(iter(vision.values())).device)
        reached = torch.autograd.grad(zero, list(vision.values()), allow_unused=True)
        return [name for name, gradient in zip(vision, reached, strict=True) if gradient is None]

    def ensure_tower_runs(self, *, passes: int = 1) -> None:
        """
        Add hooks to the model so that the tower runs at least *passes* times on every batch.

        If needed, the hooks add passes with the dummy image. These passes do not change results.

        Two passes are needed if ranks synchronise in each pass, and the tower runs once for images
        and again for videos. For some models and engines, ms-swift adds a dummy image itself; then
        the hooks add no pass.
        """
        passes_run = Counter[str]()

        def count_pass(name: str, *_: Any) -> None:
            passes_run[name] += 1

        def add_dummy(
            __: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # Generation with cached tokens processes no image on any rank.
            cached = named.get("past_key_values")
            missing = 0 if cached is not None and cached.get_seq_length() else passes
            for _ in range(missing - max(passes_run.values(), default=0)):
                embeds = named["inputs_embeds"]
                named = {**named, "inputs_embeds": embeds + self.zero_through_tower(embeds.device).to(embeds.dtype)}
            passes_run.clear()
            return positional, named

        for name in self.towers:
            self.inner.get_submodule(name).register_forward_hook(partial(count_pass, name))
        reader = self.inner.get_submodule(self.reader)
        # Runs before hooks that gather the language model's weights, so that all ranks gather
        # weights in the same order.
        reader.register_forward_pre_hook(add_dummy, prepend=True, with_kwargs=True)
        SEEING.add(reader)


def count_tower_runs(model: nn.Module, given: Mapping[str, Any]) -> int:
    """
    Return how often a call runs the vision tower for its images and videos, to compare ranks.

    After `ensure_tower_runs`, ranks cannot differ, so 0 is returned.

    Args:
        model: Model that is called.
        given: Arguments of the call by name.
    """
    if any(part in SEEING for part in model.modules()):
        return 0
    return sum(name.startswith("pixel_values") and value is not None for name, value in given.items())


def ensure_vision_forward(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """
    Make a model's vision tower run in every call, which is needed if ranks share its weights.

    A call without images, or without videos, runs the tower on an image of *inputs* or on a small
    part of that image. The result is added times 0, so no output changes. Every rank has to call
    this function, after the model is wrapped.

    Args:
        model: Model of transformers that accepts images.
        inputs: Inputs of the model that contain an image or a video, as its collator makes them.

    Raises:
        ArgumentError: The model computes no image features from these inputs.
    """
    images = {name.replace("_videos", "").replace("video_", "image_"): one for name, one in inputs.items()}
    dummy = DummyImage.from_inputs(model, images | dict(inputs))
    if dummy is None or not dummy.media:
        fact = f"{type(model).__name__} computes no image features from {', '.join(inputs)}: give inputs with an image"
        raise ArgumentError("host", fact)
    side = getattr(getattr(dummy.inner.config, "vision_config", None), "spatial_merge_size", None)
    if side and "image_grid_thw" in dummy.media:
        patches, grid = dummy.media["pixel_values"][: side**2], torch.tensor([[1, side, side]])
        dummy = attrs.evolve(dummy, media={"pixel_values": patches, "image_grid_thw": grid})
    # Ranks synchronise in each pass, and there is one for images and one for videos.
    dummy.ensure_tower_runs(passes=1 + hasattr(dummy.inner, "get_video_features"))
