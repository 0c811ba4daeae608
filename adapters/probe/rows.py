"""
Rows of random tokens, packed and each sample alone: on a small copy of a model, or on the model
that is about to train, with its own weights and kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import attrs
import torch

from packplan.adapters.attention import attend_as, native_attention
from packplan.adapters.families import trained_config, trained_part
from packplan.adapters.models import evaluating, weight_gradients
from packplan.adapters.probe.small_model import error_text, model_class, quiet
from packplan.adapters.proof.batches import PackedBatch
from packplan.adapters.proof.comparison import (
    Outcome,
    Sample,
    compare,
    limit_of,
    outcome_of,
    precision_of,
    rounds_choices,
    run_alone,
    watch_pass,
)
from packplan.adapters.proof.gradients import logit_reaches
from packplan.core.equality import AttentionChoice, ProbeResult
from packplan.core.errors import ModelError

LOADED_LENGTHS = (17, 3, 29)
"""Tokens of the samples that a loaded model packs."""

_SEED = 7
"""Seed of the tokens."""

_IDS = 2000
"""Ids from here on may belong to images, or to no token."""


@attrs.frozen(eq=False)
class ProbeRow:
    """Samples of random tokens, one after the other, and each alone."""

    packed: PackedBatch
    """The row as training gives it to the model: positions that restart, and no mask."""

    samples: list[Sample]
    """The samples, with nothing that a packed row needs."""

    @classmethod
    def draw(cls, model: Any, lengths: Sequence[int], *, ids: Sequence[int]) -> ProbeRow:
        """
        Draw a row for a model.

        Args:
            model: Model of transformers.
            lengths: Tokens of each sample.
            ids: Token ids to draw from.
        """
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.tensor(ids)[torch.randint(len(ids), (1, sum(lengths)), generator=generator)]
        drawn = drawn.to(next(model.parameters()).device)
        positions = torch.cat([torch.arange(length, device=drawn.device) for length in lengths])[None]
        if any(hasattr(module, "get_rope_index") for module in model.modules()):  # with those of images
            positions = positions.expand(4, 1, -1)
        places = tuple((0, slice(*span)) for span in pairwise(accumulate(lengths, initial=0)))
        inputs = {"input_ids": drawn, "position_ids": positions, "use_cache": False}
        row = PackedBatch(inputs, None, (1, sum(lengths)), places)
        parts = [drawn[:, span] for _, span in places]
        return cls(
            row,
            row.samples(
                [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False} for ids in parts]
            ),
        )


def compare_row(model: Any, row: ProbeRow, alone: Outcome, *, typical: bool = False) -> ProbeResult:
    """
    Compare a packed row with its samples alone, and see whether gradients pass between them.

    Args:
        model: Model in evaluation mode, set to pack.
        row: Row with the samples.
        alone: Outcome of the samples alone. Without gradients, those of weights are not compared.
        typical: Compare each sample's typical token, not the worst, and no losses.
    """
    packed = row.packed
    watched, logits = watch_pass(model, packed.inputs, packed.shape)
    isolation = max(reach.isolation for reach in logit_reaches(watched, logits, packed.places))
    gradients = weight_gradients if alone.gradients else None
    found = outcome_of(model, [logits[place] for place in packed.places], row.samples, gradients=gradients)
    apart = compare(found, alone, typical=typical)
    return ProbeResult(isolation, max(apart.logits), max(apart.losses, default=0.0), apart.gradients)


def probe_loaded(model: Any, *, native: str) -> ProbeResult:
    """
    Compare a packed row of short samples with the samples alone, on a model that is ready to train.

    Args:
        model: Model of transformers, perhaps with adapters; its mode is restored.
        native: Attention of transformers for samples alone.
    """
    row = ProbeRow.draw(model, LOADED_LENGTHS, ids=plain_ids(trained_config(model.config)))
    with evaluating(model):  # dropout is no difference
        with native_attention(model, native):
            alone = run_alone(model, row.samples, gradients=None)
        return compare_row(model, row, alone, typical=rounds_choices(model))


def place_of(model: torch.nn.Module) -> str:
    """Return the device and precision of a model in words: `cpu, float32`."""
    weight = next(model.parameters())
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else weight.device.type
    return f"{device}, {precision_of(model)}"


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
    kind = "auto" if dtype is None else getattr(torch, dtype)
    with quiet():
        try:
            whole = model_class(config).from_pretrained(
                folder, dtype=kind, attn_implementation=choice.backend, trust_remote_code=trust_remote_code
            )
        except Exception as error:
            raise ModelError("probe", f"its weights cannot be loaded ({error_text(error)})") from error
        model = trained_part(whole).to(device)
        attend_as(model, choice)
        return probe_loaded(model, native=choice.native), limit_of(model)
