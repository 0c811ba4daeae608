"""
Values that all ranks of a run have to share, as text by key, and differences between ranks.

A path says where something is on a rank's own machine. Only whether it is set is compared, and the
content elsewhere: weights, checkpoint, data and tokenizer by their digests, files of settings by
what they hold.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from packplan.core.config.keys import key_of, keys_of
from packplan.core.config.run import PathText, RunConfig
from packplan.core.errors import RankDifference

KEYS = dict(keys_of(RunConfig))

PATHS = frozenset(
    {key for key, field in KEYS.items() if str(PathText) in str(field.type) and not key_of(field).own}
    | {"training.accelerator_config", "training.deepspeed", "training.fsdp_config", "training.logging_dir"}
)
"""Keys of files and folders, which may be elsewhere on another machine."""

OWN: Mapping[str, str] = {
    **{key: key_of(field).own for key, field in KEYS.items() if key_of(field).own},
    "training.dataloader_persistent_workers": "memory of a rank's machine",
    "training.dataloader_pin_memory": "memory of a rank's machine",
    "training.dataloader_prefetch_factor": "memory of a rank's machine",
    "training.disable_tqdm": "what is shown; --quiet sets it",
    "training.hub_token": "a secret, which no message shows",
    "training.local_rank": "a rank's place on its machine",
    "training.log_level": "what is shown",
    "training.log_level_replica": "what is shown",
    "training.log_on_each_node": "what is shown",
    "training.report_to": "services that rank 0 reports to, whose packages others may lack",
}
"""Keys that a rank may have for itself -> why: they do not change what is trained."""


def run_values(config: RunConfig, files: Mapping[str, Any]) -> dict[str, str]:
    """
    Return the keys of a run that its ranks have to share, with their values as JSON.

    Args:
        config: The run.
        files: Key -> content of the file that it names, which is compared in place of the path.
    """
    sections = attrs.asdict(config, filter=lambda field, _: not key_of(field).by_command)
    sections["training"] |= sections["training"].pop("trainer")
    for section, name in (key.split(".") for key in (*PATHS, *OWN)):
        key, value = f"{section}.{name}", sections[section].pop(name, None)
        if value and key in PATHS:
            # `last` is a choice among the checkpoints of a folder.
            path = value if isinstance(value, Mapping) or value == "last" else "a path"
            sections[section][name] = files.get(key, path)
    return flat_values(sections)


def flat_values(document: Mapping[str, Any]) -> dict[str, str]:
    """
    Return the values of nested sections as JSON, by key; None counts as absent.

    >>> flat_values({"a": {"b": 0.5, "c": None}, "d": ["x"]})
    {'a.b': '0.5', 'd': '["x"]'}
    """
    return dict(_leaves("", document))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), below)
    elif value is not None:
        yield key, json.dumps(value, ensure_ascii=False, default=str)


def rank_differences(runs: Sequence[Mapping[str, str]]) -> tuple[RankDifference, ...]:
    """
    Return each key whose value is not the same on all ranks, by name.

    Args:
        runs: Key -> value, of each rank.

    >>> rank_differences([{"a": "1", "b": "2"}, {"a": "1"}])
    (RankDifference(key='b', values=('2', None)),)
    """
    keys = sorted({key for run in runs for key in run})
    by_rank = ((key, tuple(run.get(key) for run in runs)) for key in keys)
    return tuple(RankDifference(key, values) for key, values in by_rank if len(set(values)) > 1)
