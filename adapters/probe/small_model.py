"""Small copies of a model, with random weights that switch off no part of the model."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations import deepspeed
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging as transformers_logging

from packplan.adapters.models import replace_attributes
from packplan.adapters.probe.shrink import NewValues, replace_values, shrink_config
from packplan.core.config.run import ModelConfig
from packplan.core.errors import ConfigError, ModelError

_MAX_WEIGHTS = 20_000_000
"""Maximum number of weights of a small copy; a larger copy would take minutes to probe."""

_SEED = 3
"""Seed of the random weights."""

_PLAIN_STD = 0.05
"""
Standard deviation below which weights of a narrow model would make all attention scores almost
equal.
"""


@contextlib.contextmanager
def hiding_warnings() -> Iterator[None]:
    """
    Hide all warnings inside this context, such as those about missing kernels and unusual sizes.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)


def error_text(error: Exception) -> str:
    """Return an error's class and fact in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {getattr(error, 'fact', error)}".split())[:300]


def open_model_config(model: ModelConfig) -> Any:
    """Return transformers' configuration of a model folder; ConfigError if it cannot be used."""
    try:
        config = AutoConfig.from_pretrained(model.model, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        reason = " ".join(f"{error}".split())[:300]
        fact = f"is {model.model}, whose config.json transformers refuses: {reason}"
        raise ConfigError.for_key("model.model", fact) from error
    for part in (config, config.get_text_config()):
        if not isinstance(part.dtype, torch.dtype | None):
            fact = f"is {model.model}, whose config.json has dtype {str(part.dtype)[:40]}, which torch does not have"
            raise ConfigError.for_key("model.model", fact)
    return config


@attrs.define(eq=False)
class SmallModels:
    """
    Builder of small copies of one model, which caches each small configuration and its number of
    weights.
    """

    config: Any
    """Configuration of the user's model, as transformers loads it."""

    trust_remote_code: bool = False
    """Whether Python code in the model's folder may run."""

    kind: Any = None
    """Class of the copies; None takes the result of `model_class`."""

    _configs: dict[Any, tuple[Any, int]] = attrs.field(factory=dict, init=False)
    """
    Number of layers of each kind, and new values -> small configuration, and its number of weights.
    """

    def build(self, *, attention: str, new_values: NewValues = MappingProxyType({})) -> Any:
        """
        Build a small copy with random float32 weights, in evaluation mode.

        Args:
            attention: Name of the attention of transformers with which the copy is built.
            new_values: New values for numbers that `shrink_config` has not changed.

        Raises:
            ModelError: No copy can be built, or it has too many weights.
        """
        failures = []
        for layers_per_kind in (1, 2):
            try:
                return self._build_with_layers(attention, new_values, layers_per_kind)
            except ModelError:
                raise
            except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
                failures.append(error_text(error))
        raise ModelError("probe", f"the probe cannot build a small copy of the model ({failures[0]})")

    def _build_with_layers(self, attention: str, new_values: NewValues, layers_per_kind: int) -> Any:
        """Build a copy with *layers_per_kind* layers of each kind."""
        key = (layers_per_kind, tuple(new_values.items()))
        build_one = partial(
            _instantiate,
            self.kind or model_class(self.config),
            attention=attention,
            trust_remote_code=self.trust_remote_code,
        )
        if key not in self._configs:
            # transformers' from_dict would also write the configuration out, for a line of its log.
            shrunk = shrink_config(self.config.to_dict(), layers_per_kind)
            small = type(self.config)(**replace_values(shrunk, new_values))
            with torch.device("meta"):
                on_meta = build_one(small)
            self._configs[key] = small, sum(one.numel() for one in on_meta.parameters())
        small, weights = self._configs[key]
        if weights > _MAX_WEIGHTS:
            raise ModelError(
                "probe", f"the probe's small copy of the model has {weights:,} weights, more than {_MAX_WEIGHTS:,}"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = build_one(small).float().eval()
            diversify_weights(model)
        return model


def model_class(config: Any) -> Any:
    """
    Return the first class that a configuration names, if it can generate text; else an auto class.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if named is not None and issubclass(named, transformers.PreTrainedModel) and named.can_generate():
        return named
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _instantiate(kind: Any, small: Any, *, attention: str, trust_remote_code: bool) -> Any:
    """Build a model of class *kind* from a copy of the configuration *small*."""
    small = copy.deepcopy(small)
    # Under ZeRO 3 transformers would share the copy's weights out to all ranks.
    with replace_attributes(deepspeed, _hf_deepspeed_config_weak_ref=None):
        if issubclass(kind, transformers.PreTrainedModel):
            return kind._from_config(small, attn_implementation=attention)  # noqa: SLF001  # from_config calls it
        return kind.from_config(small, attn_implementation=attention, trust_remote_code=trust_remote_code)


def diversify_weights(model: torch.nn.Module) -> None:
    """
    Add noise to constant weights, and scale up very small ones.

    Constant weights may switch a mechanism off, so that the probe would miss a leak.
    """
    with torch.no_grad():
        for weight in model.parameters():
            if weight.numel() < 2:
                continue
            std = float(weight.std())
            if std == 0:
                weight.add_(torch.randn_like(weight), alpha=0.05)
            elif weight.dim() > 1 and std < _PLAIN_STD and abs(float(weight.mean())) < std:
                weight.mul_(weight.shape[-1] ** -0.5 / std)
