"""Probe of the model that is about to train, with its own weights and kernels, on short samples."""

from __future__ import annotations

from typing import Any

import torch

from packplan.adapters.attention import native_attention
from packplan.adapters.families import trained_config
from packplan.adapters.models import evaluating
from packplan.adapters.probe.rows import ProbeRow, measure_alone, measure_packed
from packplan.core.equality import Precision, ProbeResult, loaded_limit

LENGTHS = (17, 3, 29)

_TF32 = 2.0**-10
"""Step of float32 products that PyTorch may round for speed."""

_OTHER_EXPERTS = 0.1
"""
Difference that another choice of experts may add to a sample's median token.

0.07 was measured.
"""

_IDS = 2000
"""Ids from here on may belong to images, or to no token."""


def place_of(model: torch.nn.Module) -> str:
    """Return the device and precision of a model in words: `cpu, float32`."""
    weight = next(model.parameters())
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else weight.device.type
    return f"{device}, {precision_of(model)}"


def precision_of(model: torch.nn.Module) -> Precision:
    """Return the precision of a model's weights."""
    names: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    return names.get(next(model.parameters()).dtype, "float32")


def limit_of(model: Any) -> float:
    """Return the largest difference of packed logits that rounding explains."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    return loaded_limit(_epsilon_of(model), layers=max(1, layers)) + (_OTHER_EXPERTS if _rounds_choices(model) else 0)


def _epsilon_of(model: torch.nn.Module) -> float:
    """Return the step of the type to which a model's products are rounded."""
    precision = precision_of(model)
    if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
        return _TF32
    return float(torch.finfo(getattr(torch, precision)).eps)


def _rounds_choices(model: torch.nn.Module) -> bool:
    """
    Return whether rounding may change the weights that a token passes.

    This holds for experts chosen by scores of 16 bits.
    """
    return _epsilon_of(model) >= _TF32 and any("expert" in name for name, _ in model.named_modules())


def probe_loaded(model: Any, *, native: str) -> ProbeResult:
    """
    Compare a packed row of short samples with the samples alone, on a model that is ready to train.

    Args:
        model: Model of transformers, perhaps with adapters; its mode is restored.
        native: Attention of transformers for samples alone.
    """
    row = ProbeRow.draw(model, LENGTHS, ids=_plain_ids(trained_config(model.config)))
    with evaluating(model):  # dropout is no difference
        with native_attention(model, native):
            alone = measure_alone(model, row, with_gradients=False)
        return measure_packed(model, row, alone, with_gradients=False, typical=_rounds_choices(model))


def _plain_ids(config: Any) -> list[int]:
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
