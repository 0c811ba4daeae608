"""Probe of a model by its name, under each attention of this machine; without ms-swift."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import torch

from packplan.adapters.probe import SmallProbe, open_model_config, probe_weights
from packplan.core.config import ModelConfig
from packplan.core.equality import BACKENDS, PackingVerdict, Precision, choose_attention
from packplan.core.errors import ConfigError, Fault, ModelError


@attrs.frozen
class BackendProbe:
    """Result of a probe under one attention."""

    backend: str
    """Attention that a run asks for."""

    verdict: PackingVerdict | None
    """Verdict on the model; None if the attention does not run here."""

    reason: str
    """Why samples may or may not share packs, as a clause."""

    packs: bool
    """Whether they may, with what Packplan does for it."""

    by_itself: bool
    """Whether they may without it: under the model's own code and arguments."""

    mixes_in: str | None
    """Without it, the first module in which samples are mixed, and its class; None if unknown."""

    isolation: float | None
    """Largest gradient between samples, over a sample's own."""

    equality: float | None
    """Largest relative difference from the samples alone."""

    seconds: float


def probe_backends(
    path: Path, *, dtype: Precision | None, device: str | None, weights: bool, trust_remote_code: bool
) -> Iterator[BackendProbe]:
    """
    Yield the result under each attention; that of `auto`, which a run takes, is the first.

    Args:
        path: Folder or config.json.
        dtype: Type to compute in. None takes float32 for small copies, and the weights' own type.
        device: Device to compute on. None takes the CPU for small copies, and a GPU for what runs
            there alone.
        weights: Probe the real weights too, under each attention that the small copy passes.
        trust_remote_code: Whether code beside the configuration may run.

    Raises:
        ConfigError: transformers refuses the configuration; or there are no weights, or no GPU.
    """
    if weights and not path.is_dir():
        raise ConfigError("packplan probe", (Fault("--weights", f"{path} is no folder with weights: name it"),))
    if device == "cuda" and not torch.cuda.is_available():
        reason = "is cuda, but torch finds no such GPU here: leave it out, or take cpu"
        raise ConfigError("packplan probe", (Fault("--device", reason),))
    config = open_model_config(ModelConfig(model=str(path), trust_remote_code=trust_remote_code))
    has_gpu = torch.cuda.is_available() if device is None else device != "cpu"
    probe = SmallProbe(
        config, trust_remote_code=trust_remote_code, on_cpu=not has_gpu, device=device or "cpu",
        precision=dtype or "float32",
    )  # fmt: skip
    flash = find_spec("flash_attn") is not None
    for backend in BACKENDS:
        start = time.monotonic()
        leak = choose_attention(backend, None, flash_installed=flash, on_cpu=not has_gpu).leak
        if leak is not None:
            yield BackendProbe(backend, None, leak, False, False, None, None, None, 0.0)  # noqa: FBT003  # of fields
            continue
        verdict = probe.verdict(backend)
        by_itself, where = probe.packs_by_itself(backend)
        found = BackendProbe(
            backend, verdict, verdict.reason, verdict.passes, by_itself, None if where is None else str(where),
            verdict.isolation, verdict.equality, 0.0,
        )  # fmt: skip
        if weights and verdict.passes:
            found = _with_weights(
                found, verdict, path, config, dtype=dtype, device=device or ("cuda" if has_gpu else "cpu"),
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        yield attrs.evolve(found, seconds=time.monotonic() - start)


def _with_weights(
    found: BackendProbe,
    verdict: PackingVerdict,
    path: Path,
    config: Any,
    *,
    dtype: str | None,
    device: str,
    trust_remote_code: bool,
) -> BackendProbe:
    """Return the result with the numbers of the real weights."""
    choice = choose_attention(found.backend, verdict, on_cpu=device == "cpu")
    try:
        measured, limit = probe_weights(
            path, config, choice, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    except ModelError as error:
        return attrs.evolve(found, packs=False, reason=str(error), isolation=None, equality=None)
    why_not = measured.why_not(limit=limit)
    return attrs.evolve(
        found, packs=why_not is None, isolation=measured.isolation, equality=measured.equality,
        reason=found.reason if why_not is None else f"with its weights, {why_not}",
    )  # fmt: skip
