"""
Whether a run's model may pack, asked of a small copy and of the loaded one, and its attention.
"""

import logging
import time
from functools import cache
from typing import Any

import attrs

from packplan.adapters.attention.shared_rows import share_attention
from packplan.adapters.model_folder import refuse_other_layers
from packplan.adapters.probe.probe import probe_config
from packplan.adapters.probe.rows import place_of, probe_loaded
from packplan.adapters.probe.small_model import open_model_config
from packplan.adapters.samples.template import refuse_remote_code
from packplan.adapters.trainer.arguments import runs_on_cpu
from packplan.app.wiring.attention import (
    attention_by,
    keep_verdict,
    needs_verdict,
    refuse_leak,
    stored_verdict,
    verdict_key,
)
from packplan.core.config.run import ModelConfig, RunConfig
from packplan.core.equality import AttentionChoice, PackingVerdict

log = logging.getLogger(__name__)


def decide_attention(config: RunConfig, *, isolated: bool) -> AttentionChoice:
    """
    Decide the attention of a run, once, before anything is measured. The model is asked, unless
    its verdict is stored.

    Args:
        config: The run.
        isolated: Refuse an attention that does not run here, or under which samples of a pack might
            see each other.

    Raises:
        ModelError: The run cannot take the one that `model.attn_impl` names, or it is refused.
        ConfigError: The model's folder does not say what it is.
    """
    on_cpu = runs_on_cpu(config.training.trainer)
    attention = attention_by(config, None, on_cpu=on_cpu)
    if isolated:
        refuse_leak(config, attention)
    if needs_verdict(config):
        attention = attention_by(config, verdict_of(config), on_cpu=on_cpu)
    if isolated:
        refuse_leak(config, attention)
    return share_attention(attention) if config.training.sequence_parallel_size > 1 else attention


def ask_before_measuring(config: RunConfig) -> PackingVerdict | None:
    """
    Refuse a model that may not pack, or an attention that is not installed, before hours of
    measuring, and return the verdict on the model; None where nothing is packed, the attention runs
    on a GPU alone and there is none, or ms-swift trains: the plugin asks then.
    """
    if config.command is not None or not config.training.packing:
        return None
    refuse_leak(config, attention_by(config, None, on_cpu=False))
    if attention_by(config, None, on_cpu=runs_on_cpu(config.training.trainer)).leak is not None:
        return None
    return decide_attention(config, isolated=True).verdict


def verdict_of(config: RunConfig) -> PackingVerdict:
    """Return the verdict on a run's model: stored, or by probe."""
    on_cpu = runs_on_cpu(config.training.trainer)
    stored = stored_verdict(config)
    if stored is not None and not (stored.strategy == "flash" and on_cpu):
        return stored
    refuse_remote_code(config.model)
    refuse_other_layers(config.model)
    return _probed(verdict_key(config).digest, config.model, config.model.attn_impl, on_cpu=on_cpu)


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


def ask_loaded(config: RunConfig, model: Any, verdict: PackingVerdict, *, whole: bool, keep: bool) -> None:
    """
    Ask the model that is about to train too, unless it was asked in this place before.

    Args:
        config: The run.
        model: Ready to train.
        verdict: Verdict on its small copy.
        whole: Whether this rank holds all weights.
        keep: Whether this rank keeps the verdict.

    Raises:
        ModelError: Samples are not apart, or not equal to themselves alone.
    """
    place, size = place_of(model), config.training.sequence_parallel_size
    if size > 1:
        place += f", {size} ranks to a row"
    if not whole:
        if keep and verdict.passes:
            log.info(
                "the loaded model was not asked whether it may pack, since ranks share its weights: "
                "what its small copy showed counts"
            )
    # `packplan check` looks at models that do not pass, too. Ranks of a row are asked together.
    elif verdict.passes and (size > 1 or place not in verdict.loaded_on):
        measured = probe_loaded(model, native=verdict.native, named=config.model.attn_impl)
        log.info("the loaded model (%s) was asked too: %s", place, measured)
        verdict = attrs.evolve(verdict, loaded_on=(*verdict.loaded_on, place))
    if keep:
        keep_verdict(config, verdict)
