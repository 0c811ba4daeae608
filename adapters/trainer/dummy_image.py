"""
Lets a model's vision tower run on every batch, also on one without images.

Where weights or gradients are shared between ranks, a rank that skips the tower while another uses
it would leave that one waiting: in FSDP and ZeRO-3 for the tower's weights, in DDP for its
gradients.
"""

from __future__ import annotations

from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import torch
from PIL import Image
from torch import nn


def ensure_vision_forward(model: nn.Module, image_processor: Any) -> None:
    """
    Let the vision tower of *model* see a black dummy image, which changes nothing, where a batch
    has none.

    ms-swift does so itself for some models and engines; then nothing is added.

    Args:
        model: With a `visual` and a `language_model` beside it, as those of Qwen-VL.

        image_processor: Of the model.
    """
    inner = next(m for m in model.modules() if hasattr(m, "visual") and hasattr(m, "language_model"))
    visual: Any = inner.visual
    language: Any = inner.language_model
    side = image_processor.patch_size * image_processor.merge_size
    dummy = image_processor(images=[Image.new("RGB", (side, side))], return_tensors="pt", do_resize=False)
    saw = False

    def note(*_: Any) -> None:
        nonlocal saw
        saw = True

    def see(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal saw
        if not saw:
            embeds = named["inputs_embeds"]
            pixels = dummy["pixel_values"].to(embeds.device, visual.dtype)
            seen = visual(pixels, grid_thw=dummy["image_grid_thw"].to(embeds.device))
            features = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
            nothing = sum(torch.cat(tuple(feature)).mean() for feature in features) * 0
            named = {**named, "inputs_embeds": embeds + nothing}
        saw = False
        return positional, named

    visual.register_forward_hook(note)
    language.register_forward_pre_hook(see, with_kwargs=True)
