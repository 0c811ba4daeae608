"""
Probe of a model from its `config.json`, with each attention backend of this machine. The probe does
not need ms-swift.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from packplan.adapters.probe.probe import SmallProbe
from packplan.adapters.probe.small_model import open_model_config
from packplan.adapters.versions import has_flash_package
from packplan.core.config.run import ModelConfig
from packplan.core.equality import BACKENDS, PackingVerdict, Precision, reason_against_backend
from packplan.core.errors import ConfigError, Fault


@attrs.frozen
class BackendProbe:
    """Result of a probe with one attention backend."""

    backend: str
    """Value of `model.attn_impl`."""

    verdict: PackingVerdict | None
    """Verdict on the model; None if the backend does not run on this machine."""

    reason: str
    """Clause that says why samples may or may not share packs."""

    mixes_in: str | None = None
    """First module that mixes samples without Packplan, with its class; None if unknown."""

    seconds: float = 0.0

    @property
    def may_pack(self) -> bool:
        """Whether samples may share packs when Packplan trains the model."""
        return self.verdict is not None and self.verdict.passes

    @property
    def packs_by_itself(self) -> bool:
        """Whether samples may share packs in the model's own code, without Packplan."""
        return self.may_pack and not (self.verdict.keeps_rows or self.verdict.split)  # type: ignore[union-attr]  # it passes


def probe_backends(
    path: Path, *, dtype: Precision | None, device: str | None, trust_remote_code: bool
) -> Iterator[BackendProbe]:
    """
    Yield the result for each attention backend, first for `auto`, the default of a run.

    Args:
        path: Folder of the model, or its config.json.
        dtype: Data type to compute in; float32 if None.
        device: Device to compute on. If None, the CPU, and a GPU for backends that run only on
            GPUs.
        trust_remote_code: Whether Python code from the model's folder may run.

    Raises:
        ConfigError: transformers refuses the configuration, or there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        reason = "is cuda, but torch finds no such GPU on this machine: leave it out, or use cpu"
        raise ConfigError("packplan probe", (Fault("--device", reason),))
    config = open_model_config(ModelConfig(model=str(path), trust_remote_code=trust_remote_code))
    has_gpu = torch.cuda.is_available() if device is None else device != "cpu"
    probe = SmallProbe(
        config, trust_remote_code=trust_remote_code, on_cpu=not has_gpu, device=device or "cpu",
        precision=dtype or "float32",
    )  # fmt: skip
    for backend in BACKENDS:
        start = time.monotonic()
        leak = reason_against_backend(backend, flash_installed=has_flash_package(backend), on_cpu=not has_gpu)
        if leak is not None:
            yield BackendProbe(backend, None, leak)
            continue
        verdict = probe.verdict(backend)
        found = BackendProbe(backend, verdict, verdict.reason, seconds=time.monotonic() - start)
        yield found if found.packs_by_itself else attrs.evolve(found, mixes_in=probe.mixing_module)
