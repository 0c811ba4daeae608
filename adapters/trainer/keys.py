"""
Types and choices of the installed ms-swift's training arguments, the source of the table of
`trainer_keys`.
"""

from collections.abc import Iterable, Mapping

from packplan.adapters.trainer.arguments import TrainingArguments  # before swift, which it makes importable  # isort: skip

import attrs
from swift.arguments.tuner_args import TunerArguments
from swift.callbacks.mapping import callbacks_map
from swift.optimizers import optimizers_map

from packplan.adapters.config.trainer_keys import TrainerKey, keys_of
from packplan.core.config import TrainingConfig, tuners_of

_CHOICES: Mapping[str, Iterable[str]] = {
    # Other values serve embeddings, rerankers and growing adapters, which are not trained here.
    "callbacks": [name for name in callbacks_map if name != "adalora"],
    "eval_metric": ["acc", "nlg"],
    "loss_type": ["cross_entropy"],
    "optimizer": optimizers_map,
}
"""Values of keys that name things."""


def installed_keys() -> dict[str, TrainerKey]:
    """Return the arguments of the installed ms-swift for training and for tuners, by key."""
    own = attrs.fields_dict(TrainingConfig)
    tuners = {name: key for name, key in keys_of(TunerArguments).items() if tuners_of(name) and name not in own}
    return tuners | keys_of(TrainingArguments, _CHOICES)
