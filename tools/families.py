"""Verdicts of the probe on each architecture of transformers, in its default configuration."""

from typing import Any

import attrs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from packplan.adapters.families import missing_default_keys
from packplan.adapters.probe.probe import probe_small_copy
from packplan.adapters.probe.small_model import hiding_warnings
from packplan.core.equality import AUTO, PackingVerdict


def family_names() -> list[str]:
    """
    Return the model types of causal language models, with or without images. Types that also exist
    as masked or sequence-to-sequence models are left out.
    """
    text = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    others = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) | set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    return sorted(text - others)


def default_config(family: str) -> Any:
    """Return transformers' default configuration of a model type, with missing keys filled in."""
    with hiding_warnings():
        return CONFIG_MAPPING[family](**missing_default_keys(family))


def probe_family(family: str) -> PackingVerdict:
    """
    Probe a small model of a family. If transformers refuses the default configuration, the verdict
    gives this as the reason.
    """
    try:
        config = default_config(family)
    except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
        reason = " ".join(f"its default configuration is refused ({error})".split())[:200]
        return PackingVerdict(family, None, AUTO, "", split=(), keeps_rows=False, measured=None, reason=reason)
    return attrs.evolve(probe_small_copy(config), model_type=family)  # some share a configuration
