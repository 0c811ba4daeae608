"""
Inputs of vision models besides tokens: media, positions, and a dummy image.

With the dummy image, the vision tower runs on every batch, even without images. Where ranks share
weights or gradients, a rank that skips the tower would block the others: FSDP and ZeRO-3 wait for
the tower's weights, and DDP for its gradients.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from swift.template import Template
from swift.utils import get_packed_seq_params
from torch import nn
from torch.utils._pytree import tree_leaves

from packplan.adapters.families import trained_config
from packplan.adapters.loaders.rows import MEDIA_TYPE_IDS
from packplan.adapters.samples.media import DUMMY_SIZE, IMAGES, VIDEOS, encode_image
from packplan.core.errors import ConfigError

_POSITIONS = "position_ids"

_SECONDS = "second_per_grid_ts"
"""Key of the seconds that one temporal step of patches covers, for each video."""


def plain_model(model: Any) -> Any:
    """Return the model inside its adapters; without adapters, the model itself."""
    if hasattr(model, "adapters"):  # a `SwiftModel`
        return model.base_model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def parameter_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def token_types(config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Return the type of each token, as an array of the same shape: 0 text, 1 images, 2 videos.

    Args:
        config: Configuration of a model that takes images.
        input_ids: Token ids.

    >>> from types import SimpleNamespace
    >>> sees = SimpleNamespace(image_token_id=8, video_token_id=9)
    >>> token_types(sees, torch.tensor([[7, 8, 9]])).tolist()
    [[0, 1, 2]]
    """
    images: torch.Tensor = (input_ids == config.image_token_id).long()
    video = getattr(config, "video_token_id", None)
    return images if video is None else images + 2 * (input_ids == video)


def find_rope_index(model: nn.Module) -> Callable[..., Any] | None:
    """
    Return the function `get_rope_index` of a model, which gives multimodal positions; or None.
    """
    parts: Iterator[Any] = model.modules()
    return next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)


def media_inputs(model: Any, encoded: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """
    Return a sample's or batch's media as inputs of the model, such as pixels and token types.

    Args:
        model: Model of transformers, perhaps with adapters.
        encoded: Sample as its template encodes it, or a padded batch as its collator joins it.
    """
    plain = plain_model(model)
    known = parameter_names(plain.forward) - {"input_ids", "labels", "attention_mask", _POSITIONS}
    # ms-swift creates them in inference mode: gradients need a copy.
    media = {key: value.clone() for key, value in encoded.items() if key in known and isinstance(value, torch.Tensor)}
    tokens = torch.as_tensor(encoded["input_ids"])
    tokens = tokens.view(-1, tokens.shape[-1])
    if MEDIA_TYPE_IDS in media:
        media[MEDIA_TYPE_IDS] = media[MEDIA_TYPE_IDS].view(tokens.shape)
    elif MEDIA_TYPE_IDS in known and (IMAGES.count(encoded) is not None or VIDEOS.count(encoded) is not None):
        media[MEDIA_TYPE_IDS] = token_types(trained_config(plain.config), tokens)
    if _SECONDS in known and encoded.get(_SECONDS) is not None:
        media[_SECONDS] = torch.tensor(encoded[_SECONDS])
    return media


def add_media_positions(
    batch: dict[str, Any], template: Template, samples: list[dict[str, Any]], *, packed: bool
) -> None:
    """
    Add multimodal positions to a collated batch, in three rows, if its template makes none.

    The positions of the text are then under `text_position_ids`, as in batches of templates that
    make both. A key for pixels is added, too.

    Args:
        batch: Batch as ms-swift collates it; changed in place.
        template: Template with its model.
        samples: Encoded samples, in the order of the batch.
        packed: Whether the samples share one row. If not, each has its own padded row.
    """
    batch.setdefault(IMAGES.pixels, None)  # some templates read it unconditionally
    text = batch.get(_POSITIONS)
    if text is not None and text.dim() == 3:
        return
    rope = find_rope_index(template._get_model())  # noqa: SLF001  # in loader workers a dummy, which `open_template` makes
    if rope is None:
        return
    given, parts = parameter_names(rope), []
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])[None]
        named = {**sample, "input_ids": tokens, MEDIA_TYPE_IDS: token_types(trained_config(template.config), tokens)}
        parts.append(rope(**{key: value for key, value in named.items() if key in given})[0])
    if packed:
        batch |= {_POSITIONS: torch.cat(parts, -1), "text_position_ids": text, **get_packed_seq_params(text)}
    else:
        batch[_POSITIONS] = template._pad_3d_position_ids(parts)  # noqa: SLF001  # pads on its own side


def _language_model_attribute(part: Any) -> str | None:
    """
    Return the attribute of *part* that holds its language model; None if *part* does not compute
    image features.
    """
    if not hasattr(part, "get_image_features"):
        return None
    names = ("language_model", "model")  # a thinker's has the name of a whole model's inner part
    readers = (name for name in names if isinstance(getattr(part, name, None), nn.Module))
    return next((name for name in readers if not hasattr(getattr(part, name), "get_image_features")), None)


@attrs.frozen(eq=False)
class DummyImage:
    """Black image, and the part of a model that computes image features of it."""

    inner: Any
    """Module with the vision tower, the language model and `get_image_features`."""

    reader: str
    """Attribute of `inner` that holds the language model."""

    media: Mapping[str, torch.Tensor]
    """The image, as arguments of `inner.get_image_features`."""

    @classmethod
    def from_model(cls, model: nn.Module, template: Template) -> DummyImage:
        """
        Encode the image for a model.

        Args:
            model: Model that takes images.
            template: Template that encodes the image.

        Raises:
            ConfigError: The model has no function for image features.
        """
        found = [(part, name) for part in model.modules() if (name := _language_model_attribute(part)) is not None]
        if not found:
            reason = (
                f"is a {type(plain_model(model)).__name__}, which has no function for image features: a rank "
                "without images would leave the others waiting; train on one process"
            )
            raise ConfigError.for_key("model.model", reason)
        inner: Any = found[-1][0]  # the innermost: others may call it
        known = parameter_names(inner.get_image_features)
        encoded = encode_image(template, DUMMY_SIZE)
        return cls(inner, found[-1][1], {key: value for key, value in encoded.items() if key in known})

    @property
    def towers(self) -> list[str]:
        """Names of the modules of `inner` that compute images before the language model."""
        heads = {id(getattr(self.inner, name, None)) for name in ("lm_head", "audio_tower")}
        return [name for name, part in self.inner.named_children() if name != self.reader and id(part) not in heads]

    def zero_through_tower(self, device: torch.device) -> torch.Tensor:
        """Return a zero whose gradient reaches all weights that compute image features."""
        # ms-swift creates them in inference mode: gradients need a copy.
        features = self.inner.get_image_features(**{key: value.to(device).clone() for key, value in self.media.items()})
        leaves = [leaf for leaf in tree_leaves(dict(features)) if isinstance(leaf, torch.Tensor)]
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
        Hook the model so that the tower runs at least *passes* times on every batch.

        The dummy image is added if needed; results do not change.

        Several passes are needed if ranks synchronise in each pass, and images and videos take one
        each. ms-swift does so itself for some models and engines; then nothing is added.
        """
        passes_run = Counter[str]()

        def count_pass(name: str, *_: Any) -> None:
            passes_run[name] += 1

        def add_dummy(
            __: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # A token that is generated behind cached ones has no image on any rank.
            cached = named.get("past_key_values")
            missing = 0 if cached is not None and cached.get_seq_length() else passes
            for _ in range(missing - max(passes_run.values(), default=0)):
                embeds = named["inputs_embeds"]
                named = {**named, "inputs_embeds": embeds + self.zero_through_tower(embeds.device).to(embeds.dtype)}
            passes_run.clear()
            return positional, named

        for name in self.towers:
            self.inner.get_submodule(name).register_forward_hook(partial(count_pass, name))
        self.inner.get_submodule(self.reader).register_forward_pre_hook(add_dummy, with_kwargs=True)
