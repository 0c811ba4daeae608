"""
Whether a run's model may pack, asked of a small copy and of the loaded one, and its attention.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from importlib.util import find_spec
from typing import Any

import attrs

from packplan.adapters.model_folder import config_model_type, refuse_other_layers
from packplan.adapters.probe import limit_of, open_model_config, place_of, probe_config, probe_loaded
from packplan.adapters.samples.template import refuse_remote_code
from packplan.adapters.trainer.arguments import runs_on_cpu
from packplan.app.wiring.stores import (
    asked_of,
    attention_by,
    needs_verdict,
    open_verdicts,
    refuse_leaks,
    stored_verdict,
    verdict_key,
)
from packplan.core.config import ModelConfig, RunConfig
from packplan.core.equality import Attention, PackingVerdict, why_not_here
from packplan.core.errors import IsolationError
from packplan.core.ports import RankGroup

log = logging.getLogger(__name__)


def require_isolation(config: RunConfig, *, packed: bool) -> None:
    """
    Ask the model whether samples may share its packs, unless that is stored, before anything is
    measured; refuse an attention that does not run, or under which they might see each other.

    Args:
        config: The run.
        packed: Whether samples share packs.
    """
    on_cpu = runs_on_cpu(config.training.trainer)
    if packed:
        refuse_leaks(config, None, on_cpu=on_cpu)
    verdict = verdict_of(config) if needs_verdict(config, packed=packed) else None
    attention_by(config, verdict)
    if packed:
        refuse_leaks(config, verdict, on_cpu=on_cpu)


def ask_before_measuring(config: RunConfig) -> PackingVerdict | None:
    """
    Refuse a model that may not pack before hours of measuring, and return the verdict on it; None
    where nothing is packed, or the attention runs on other machines alone.
    """
    on_cpu = runs_on_cpu(config.training.trainer)
    flash = find_spec("flash_attn") is not None
    if not config.training.packing or why_not_here(config.model.attn_impl, flash_installed=flash, on_cpu=on_cpu):
        return None
    require_isolation(config, packed=True)
    return verdict_of(config)


def attention_of(config: RunConfig) -> Attention:
    """
    Return the attention that a run takes; the model is asked, unless its verdict is stored.

    Raises:
        AttentionError: It cannot take the one that `model.attn_impl` names.
        ConfigError: The model's folder does not say what it is.
    """
    packed = config.training.packing or config.policy.sequence_packing.enabled
    return attention_by(config, verdict_of(config) if needs_verdict(config, packed=packed) else None)


def logged_attention(config: RunConfig, group: RankGroup) -> Attention:
    """Return the attention that a run takes, which rank 0 logs."""
    attention = attention_of(config)
    if group.rank == 0:
        log.info("attention: %s", attention)
    return attention


def verdict_of(config: RunConfig) -> PackingVerdict:
    """Return the verdict on a run's model: stored, or by probe."""
    on_cpu = runs_on_cpu(config.training.trainer)
    stored = stored_verdict(config)
    if stored is not None and not (stored.strategy == "flash" and on_cpu):
        return stored
    refuse_remote_code(config.model)
    refuse_other_layers(config.model)
    return _probed(verdict_key(config).digest, config.model, asked_of(config), on_cpu=on_cpu)


@cache
def _probed(digest: str, model: ModelConfig, attn_impl: str, *, on_cpu: bool) -> PackingVerdict:
    """Probe a model, once in a process."""
    del digest
    start = time.monotonic()
    verdict = probe_config(
        open_model_config(model), attn_impl=attn_impl, trust_remote_code=model.trust_remote_code, on_cpu=on_cpu
    )
    log.info("%s was asked whether it may pack, in %.1f s: %s", verdict.model_type, time.monotonic() - start, verdict)
    return verdict


def keep_verdict(config: RunConfig, verdict: PackingVerdict) -> None:
    """Keep the verdict on a run's model beside its plans."""
    if verdict != stored_verdict(config):
        open_verdicts(config).save(verdict_key(config), verdict)


def model_type_of(config: RunConfig) -> str:
    """Return the `model_type` of the model's config.json."""
    return config_model_type(config.model)


def ask_loaded(config: RunConfig, model: Any, *, whole: bool, keep: bool) -> None:
    """
    Ask the model that is about to train too, unless it was asked in this place before.

    Args:
        config: The run.
        model: Ready to train.
        whole: Whether this rank holds all of it.
        keep: Whether this rank keeps the verdict.

    Raises:
        IsolationError: Its samples are not apart, or not equal to themselves alone.
    """
    verdict, place = verdict_of(config), place_of(model)
    if not whole:
        if keep and verdict.passes:
            log.info(
                "the loaded model was not asked whether it may pack, since ranks share its weights: "
                "what its small copy showed counts"
            )
    elif verdict.passes and place not in verdict.loaded_on:  # `packplan check` looks at those that do not, too
        measured = probe_loaded(model, native=verdict.native)
        why_not = measured.why_not(limit=limit_of(model))
        if why_not is not None:
            reason = f"the loaded model ({place}) was asked, and {why_not}"
            raise IsolationError(verdict.model_type, config.model.attn_impl, reason)
        log.info("the loaded model (%s) was asked too: %s", place, measured)
        verdict = attrs.evolve(verdict, loaded_on=(*verdict.loaded_on, place))
    if keep:
        keep_verdict(config, verdict)
