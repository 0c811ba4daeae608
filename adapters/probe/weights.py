"""Probe of a model with its real weights, loaded for it."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from packplan.adapters.attention import attend_as
from packplan.adapters.families import trained_part
from packplan.adapters.probe.loaded import probe_loaded
from packplan.adapters.probe.small_model import quiet
from packplan.adapters.proof import limit_of
from packplan.core.equality import AttentionChoice, ProbeResult
from packplan.core.errors import ModelError


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
