"""Probe of the model that is about to train, with its own weights and kernels, on short samples."""

from typing import Any

import torch

from packplan.adapters.attention import native_attention
from packplan.adapters.families import trained_config
from packplan.adapters.models import evaluating
from packplan.adapters.probe.rows import ProbeRow, measure_alone, measure_packed
from packplan.adapters.proof import precision_of, rounds_choices
from packplan.core.equality import ProbeResult

LENGTHS = (17, 3, 29)

_IDS = 2000
"""Ids from here on may belong to images, or to no token."""


def place_of(model: torch.nn.Module) -> str:
    """Return the device and precision of a model in words: `cpu, float32`."""
    weight = next(model.parameters())
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else weight.device.type
    return f"{device}, {precision_of(model)}"


def probe_loaded(model: Any, *, native: str) -> ProbeResult:
    """
    Compare a packed row of short samples with the samples alone, on a model that is ready to train.

    Args:
        model: Model of transformers, perhaps with adapters; its mode is restored.
        native: Attention of transformers for samples alone.
    """
    row = ProbeRow.draw(model, LENGTHS, ids=plain_ids(trained_config(model.config)))
    with evaluating(model):  # dropout is no difference
        with native_attention(model, native):
            alone = measure_alone(model, row, with_gradients=False)
        return measure_packed(model, row, alone, with_gradients=False, typical=rounds_choices(model))


def plain_ids(config: Any) -> list[int]:
    """Return ids of tokens that no key of the configuration names."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    special = {
        value
        for part in parts
        if part is not None
        for key, value in vars(part).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    return [number for number in range(min(config.get_text_config().vocab_size, _IDS)) if number not in special]
