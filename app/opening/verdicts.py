"""
Verdict on whether samples may share packs in a run's model, and choice of the attention backend.

First a small copy of the model is probed, then the loaded model itself. A verdict is stored in the
folder of the plans, with a fingerprint of everything that it depends on.
"""

import logging
import time
from functools import cache
from typing import Any

import attrs

from packplan.adapters.attention.shared_rows import RowGroups, attention_for_shared_rows
from packplan.adapters.model_folder import config_digest, config_model_type, refuse_missing_layers
from packplan.adapters.probe.probe import probe_small_copy
from packplan.adapters.probe.probe_row import device_and_precision, probe_ready_model
from packplan.adapters.probe.small_model import open_model_config
from packplan.adapters.stores.plans import DiskVerdictStore
from packplan.adapters.trainer.arguments import runs_on_cpu
from packplan.adapters.versions import has_flash_package, installed_version
from packplan.app.opening.stores import artefacts_folder
from packplan.core.config.run import ModelConfig, RunConfig
from packplan.core.equality import AUTO, PROBE_VERSION, VARLEN, AttentionChoice, PackingVerdict, choose_attention
from packplan.core.errors import ModelError
from packplan.core.fingerprint import Fingerprint

log = logging.getLogger(__name__)


def decide_attention(config: RunConfig, *, isolated: bool) -> AttentionChoice:
    """
    Choose the attention backend of a run, before anything is measured.

    The model is probed, unless its verdict is stored or not needed.

    Args:
        config: The run.
        isolated: Whether to refuse a backend that does not run on this machine, or that may mix the
            samples of a pack.

    Raises:
        ModelError: The backend in `model.attn_impl` cannot be used, or is refused.
        ConfigError: The model type is unclear from the model's folder.
    """
    on_cpu = runs_on_cpu(config.training.trainer)
    if isolated:  # a backend that does not run here is refused before the model is probed
        _refuse_leak(config, _choose_attention(config, None, on_cpu=on_cpu))
    verdict = probe_unless_stored(config) if needs_verdict(config) else None
    attention = _choose_attention(config, verdict, on_cpu=on_cpu)
    if isolated:
        _refuse_leak(config, attention)
    return attention_for_shared_rows(attention) if config.training.sequence_parallel_size != 1 else attention


def require_packing_model(config: RunConfig) -> PackingVerdict | None:
    """
    Return the verdict on a run's model. ModelError if the model may not be packed, or if its
    attention backend is not installed.

    The verdict is None if no model is probed, since packing is off, or since the attention backend
    needs a GPU that this machine lacks. The verdict is also None for an ms-swift command, whose
    model the plugin probes.
    """
    if not (config.training.packing and needs_verdict(config)):
        return None
    _refuse_leak(config, _choose_attention(config, None, on_cpu=False))
    if _choose_attention(config, None, on_cpu=runs_on_cpu(config.training.trainer)).leak is not None:
        return None
    return decide_attention(config, isolated=True).verdict


def probe_unless_stored(config: RunConfig) -> PackingVerdict:
    """Return the stored verdict on a run's model; without one, probe the model now."""
    on_cpu = runs_on_cpu(config.training.trainer)
    stored = load_verdict(config)
    if stored is not None and not (stored.strategy == "flash" and on_cpu):
        return stored
    refuse_missing_layers(config.model)
    return _probe_once(verdict_key(config).digest, config.model, config.model.attn_impl, on_cpu=on_cpu)


@cache
def _probe_once(digest: str, model: ModelConfig, attn_impl: str, *, on_cpu: bool) -> PackingVerdict:
    """Probe a model; further calls in this process return the same verdict."""
    del digest
    start = time.monotonic()
    verdict = probe_small_copy(
        open_model_config(model), attn_impl=attn_impl, trust_remote_code=model.trust_remote_code, on_cpu=on_cpu
    )
    outcome = "passed" if verdict.passes else "failed"
    log.info("probe of %s %s in %.1f s: %s", verdict.model_type, outcome, time.monotonic() - start, verdict)
    return verdict


def probe_loaded_model(
    config: RunConfig, model: Any, verdict: PackingVerdict, *, whole: bool, keep: bool, groups: RowGroups | None = None
) -> None:
    """
    Probe the loaded model, and store the verdict.

    The probe is skipped if the model's small copy failed, or if the model's weights are sharded.
    The probe is also skipped if the model was probed on this device before, unless ranks share
    rows.

    Args:
        config: The run.
        model: Model that is ready to train.
        verdict: Verdict on the small copy of the model.
        whole: Whether this rank holds all weights; if not, the model is not probed.
        keep: Whether this rank stores the verdict.
        groups: Groups of ranks that share rows.

    Raises:
        ModelError: Samples are not kept apart, or their results differ from those of the samples
            alone.
    """
    place = device_and_precision(model)
    if groups is not None:
        place += f", {' or '.join(map(str, groups.degrees))} ranks to a row"
    if not whole:
        if keep and verdict.passes:
            log.info(
                "the loaded model is not probed, since its weights are sharded: the probe of its small copy counts"
            )
    # `packplan check` also takes models that do not pass. Ranks that share a row are probed
    # together.
    elif verdict.passes and (groups is not None or place not in verdict.loaded_on):
        measured = probe_ready_model(model, native=verdict.native, named=config.model.attn_impl, groups=groups)
        log.info("probe of the loaded model (%s) also passed: %s", place, measured)
        verdict = attrs.evolve(verdict, loaded_on=(*verdict.loaded_on, place))
    if keep:
        store_verdict(config, verdict)


def _choose_attention(config: RunConfig, verdict: PackingVerdict | None, *, on_cpu: bool) -> AttentionChoice:
    """
    Return a run's attention backend, chosen by *verdict* if given; ModelError if the run sets
    `varlen`, and the verdict does not allow it.
    """
    flash_installed = has_flash_package(config.model.attn_impl)
    return choose_attention(config.model.attn_impl, verdict, flash_installed=flash_installed, on_cpu=on_cpu)


def _refuse_leak(config: RunConfig, attention: AttentionChoice) -> None:
    """
    Raise ModelError if an attention backend might mix samples of a pack, or does not run here.
    """
    if attention.leak is not None:
        verdict = attention.verdict
        model_type = config_model_type(config.model) if verdict is None else verdict.model_type
        raise ModelError.for_leak(model_type, config.model.attn_impl, attention.leak)


def needs_verdict(config: RunConfig) -> bool:
    """
    Return whether a run's model is probed. The models of ms-swift commands are not; others are if
    the run packs, or if the attention of the model depends on the verdict.
    """
    return config.command is None and (config.training.packing or config.model.attn_impl in (AUTO, VARLEN))


def verdict_key(config: RunConfig) -> Fingerprint:
    """
    Return everything that the verdict on a model depends on; ConfigError if the model type is
    unclear.
    """
    packages = {name: installed_version(name) for name in ("torch", "transformers", "ms-swift", "flash-attn")}
    return Fingerprint(
        {
            "config.json": config_digest(config.model),
            "model.attn_impl": config.model.attn_impl,
            "model.trust_remote_code": config.model.trust_remote_code,
            "probe": PROBE_VERSION,
            **packages,
        }
    )


def load_verdict(config: RunConfig) -> PackingVerdict | None:
    """
    Return the stored verdict on a run's current model; None if there is no such verdict.
    """
    return _open_verdicts(config).load(verdict_key(config))


def store_verdict(config: RunConfig, verdict: PackingVerdict) -> None:
    """Store the verdict on a run's model in the folder of its plans."""
    if verdict != load_verdict(config):
        _open_verdicts(config).save(verdict_key(config), verdict)


def _open_verdicts(config: RunConfig) -> DiskVerdictStore:
    return DiskVerdictStore(artefacts_folder(config.training.output_dir))
