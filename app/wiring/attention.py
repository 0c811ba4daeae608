"""
The attention of a run by its configuration and the verdict on its model, without torch;
`app.wiring.verdicts` asks the model.
"""

from importlib.util import find_spec

from packplan.adapters.model_folder import config_digest, config_model_type
from packplan.adapters.stores.plans import DiskVerdictStore
from packplan.adapters.versions import installed_version
from packplan.app.wiring.stores import artefacts_folder
from packplan.core.config.run import RunConfig
from packplan.core.equality import (
    AUTO,
    PROBE_VERSION,
    VARLEN,
    AttentionChoice,
    PackingVerdict,
    choose_attention,
)
from packplan.core.errors import ModelError
from packplan.core.fingerprint import Fingerprint


def attention_by(config: RunConfig, verdict: PackingVerdict | None, *, on_cpu: bool) -> AttentionChoice:
    """
    Return the attention of a run on this machine.

    Args:
        config: The run.
        verdict: Verdict on its model; None if the model was not asked.
        on_cpu: Whether the run trains on a CPU.

    Raises:
        ModelError: It cannot take the one that `model.attn_impl` names.
    """
    return choose_attention(
        config.model.attn_impl,
        verdict,
        flash_installed=find_spec("flash_attn") is not None,
        on_cpu=on_cpu,
    )


def refuse_leak(config: RunConfig, attention: AttentionChoice) -> None:
    """Raise ModelError if samples of a pack might see each other, or it does not run here."""
    if attention.leak is not None:
        verdict = attention.verdict
        model_type = config_model_type(config.model) if verdict is None else verdict.model_type
        raise ModelError.isolation(model_type, config.model.attn_impl, attention.leak)


def needs_verdict(config: RunConfig) -> bool:
    """
    Return whether the model has to be asked: samples share packs, or the attention follows from it.
    ms-swift's own is asked by the plugin.
    """
    return config.command is None and (config.training.packing or config.model.attn_impl in (AUTO, VARLEN))


def verdict_key(config: RunConfig) -> Fingerprint:
    """
    Return everything that the verdict on a run's model depends on; ConfigError if its folder does
    not say what it is.
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


def stored_verdict(config: RunConfig) -> PackingVerdict | None:
    """
    Return the verdict on a run's model as it is now, if it is stored; CorruptArtefactError if it is
    damaged.
    """
    return _open_verdicts(config).load(verdict_key(config))


def keep_verdict(config: RunConfig, verdict: PackingVerdict) -> None:
    """Keep the verdict on a run's model beside its plans."""
    if verdict != stored_verdict(config):
        _open_verdicts(config).save(verdict_key(config), verdict)


def _open_verdicts(config: RunConfig) -> DiskVerdictStore:
    return DiskVerdictStore(artefacts_folder(config.training.output_dir))
