"""
Types and choices of the installed ms-swift's training arguments, the source of the table of
`trainer_keys`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from packplan.adapters.trainer.arguments import TrainingArguments  # before swift, which it makes importable  # isort: skip

import attrs
from swift.arguments.tuner_args import TunerArguments
from swift.callbacks.mapping import callbacks_map
from swift.optimizers import optimizers_map
from transformers.integrations import INTEGRATION_TO_CALLBACK

from packplan.adapters.config.trainer_keys import TYPES, WORDS, TrainerKey, flat_types
from packplan.core.config import TrainingConfig, tuners_of

_ANNOTATIONS = {"fsdp": bool | str | None, "report_to": list[str] | str}
"""Types of keys whose annotations are incomplete."""

_CHOICES: Mapping[str, Iterable[str]] = {
    # Other values serve embeddings, rerankers and growing adapters, which are not trained here.
    "callbacks": [name for name in callbacks_map if name != "adalora"],
    "eval_metric": ["acc", "nlg"],
    "loss_type": ["cross_entropy"],
    "optimizer": optimizers_map,
    "report_to": ["all", "none", *INTEGRATION_TO_CALLBACK],
}
"""Values of keys that name things."""

_PATHS = frozenset({"accelerator_config", "deepspeed", "fsdp_config", "logging_dir"})

_BELOW_ONE = frozenset({"adam_beta1", "adam_beta2", "warmup_ratio"})


def installed_keys() -> dict[str, TrainerKey]:
    """Return the arguments of the installed ms-swift for training and for tuners, by key."""
    own = attrs.fields_dict(TrainingConfig)
    tuners = {name: key for name, key in _keys_of(TunerArguments).items() if tuners_of(name) and name not in own}
    return tuners | _keys_of(TrainingArguments)


def _keys_of(kind: Any) -> dict[str, TrainerKey]:
    hints = typing.get_type_hints(kind) | _ANNOTATIONS
    return {name: _key(kind, name, hints[name]) for name in kind.__dataclass_fields__ if name in hints}


def _key(owner: Any, name: str, annotation: Any) -> TrainerKey:
    field = owner.__dataclass_fields__[name]
    # ms-swift declares some of transformers' keys again, as plain strings.
    kinds = [*flat_types(annotation), *flat_types(_first_annotation(owner, name))]
    choices = [*_CHOICES.get(name, ()), *(field.metadata.get("choices") or ())]
    choices += [
        str(member.value) for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for member in kind
    ]
    choices += [kind for kind in kinds if isinstance(kind, str)]
    types = {"str" if isinstance(kind, str) else TYPES.get(kind) for kind in flat_types(annotation)}
    return TrainerKey(
        types=tuple(kind for kind in WORDS if kind in types),
        choices=tuple(dict.fromkeys(choices)),
        least=float(min(0, field.default)) if type(field.default) in {int, float} else 0.0,
        below=1.0 if name in _BELOW_ONE else float("inf"),
        path=name in _PATHS,
    )


def _first_annotation(owner: Any, name: str) -> Any:
    """Return a key's annotation in the class that declares it first, such as transformers' own."""
    for kind in reversed(owner.__mro__):
        if name in vars(kind).get("__annotations__", {}):
            return typing.get_type_hints(kind)[name]
    raise AssertionError(name)
