"""
Probe of the model that is about to train, with its own weights and kernels, on short samples.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from packplan.adapters.attention import attend_as, native_attention
from packplan.adapters.families import trained_config, trained_part
from packplan.adapters.models import evaluating
from packplan.adapters.probe.rows import ProbeRow, measure_alone, measure_packed
from packplan.adapters.probe.small_model import quiet
from packplan.adapters.proof import limit_of, precision_of, rounds_choices
from packplan.core.equality import AttentionChoice, ProbeResult
from packplan.core.errors import ModelError

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


def probe_weights(
    folder: Path, config: Any, choice: AttentionChoice, *, dtype: str | None, device: str, trust_remote_code: bool
) -> tuple[ProbeResult, float]:
    """
    Load a model's weights, and compare a packed row of short samples with the samples alone.

    Args:
        folder: Folder with the config.json and the weights.
        config: Configuration of transformers, of that folder.
        choice: Attention that a run takes.
        dtype: Type to load the weights in; None for the one that they have.
        device: Device to load them on.
        trust_remote_code: Whether code beside the configuration may run.

    Returns:
        What was measured, and the largest difference that rounding explains.

    Raises:
        ModelError: The model cannot be loaded.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if named is None or not issubclass(named, transformers.PreTrainedModel):
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        named = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    kind = "auto" if dtype is None else getattr(torch, dtype)
    with quiet():
        try:
            whole = named.from_pretrained(
                folder, dtype=kind, attn_implementation=choice.backend, trust_remote_code=trust_remote_code
            )
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelError("probe", f"its weights cannot be loaded ({reason})") from error
        model = trained_part(whole).to(device)
        attend_as(model, choice)
        return probe_loaded(model, native=choice.native), limit_of(model)
