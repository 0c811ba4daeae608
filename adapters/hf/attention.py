"""The attention of a model that trains packs, shown to keep samples apart before it trains."""

from importlib.util import find_spec
from typing import Any

from packplan.adapters.attention import NAME, attend_as
from packplan.adapters.families import trained_config
from packplan.adapters.probe import place_of, probe_config, probe_loaded
from packplan.adapters.proof.comparison import limit_of
from packplan.core.equality import AUTO, AttentionChoice, choose_attention
from packplan.core.errors import ModelError


def separate_samples(model: Any, *, named: str | None = None, whole: bool = True) -> AttentionChoice:
    """
    Let a model attend within the samples of a packed row, and return how.

    A model that was loaded with `attn_implementation="packplan"` takes the fastest attention that
    is shown to work. Another one keeps its own. First a small copy of the model is probed, in some
    seconds, and then the model itself: gradients between samples have to be exactly 0, and samples
    equal to themselves alone.

    Args:
        model: Model of transformers, perhaps with adapters.
        named: Attention that was asked for; None takes the one that the model was loaded with.
        whole: Whether this process holds all weights. Otherwise only the small copy is probed.

    Raises:
        ModelError: It cannot be shown.
    """
    loaded = trained_config(model.config)._attn_implementation  # noqa: SLF001  # has no public name
    choice = attend_apart(model, named=named or loaded)
    if not whole:
        return choice
    why_not = probe_loaded(model, native=choice.native).why_not(limit=limit_of(model))
    if why_not is not None:
        reason = f"the loaded model ({place_of(model)}) was asked, and {why_not}"
        raise ModelError.isolation(trained_config(model.config).model_type, named or loaded, reason)
    return choice


def attend_apart(model: Any, *, named: str) -> AttentionChoice:
    """
    Set an attention by which a small copy of a model keeps samples apart, and return it.

    Args:
        model: Model of transformers.
        named: Attention; `packplan` takes the fastest that is shown to work.

    Raises:
        ModelError: It cannot be shown.
    """
    config = trained_config(model.config)
    attn_impl = AUTO if named == NAME else named
    on_cpu = next(model.parameters()).device.type == "cpu"
    verdict = probe_config(config, attn_impl=attn_impl, on_cpu=on_cpu)
    flash = find_spec("flash_attn") is not None
    choice = choose_attention(attn_impl, verdict, flash_installed=flash, on_cpu=on_cpu)
    if choice.leak is not None:
        raise ModelError.isolation(verdict.model_type, named, choice.leak)
    if attn_impl == AUTO and choice.backend != config._attn_implementation:  # noqa: SLF001  # has no public name
        model.set_attn_implementation(choice.backend)
    attend_as(model, choice)
    return choice
