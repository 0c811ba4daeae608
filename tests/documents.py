"""A run of four keys, and what becomes of it with others: a configuration, or faults by key."""

from collections.abc import Mapping
from typing import Any

import pytest

from packplan.adapters.config.run import parse_config
from packplan.adapters.config.trainer_keys import read_key_table
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError

KEYS = read_key_table()
"""Keys of ms-swift's trainer."""

LEAST = {
    "model.model": "m", "template.max_length": 80, "custom.train_jsonl": "a.jsonl", "training.output_dir": "out",
}  # fmt: skip
"""Key -> value, of the keys that a run needs."""


def document(changes: Mapping[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    """Return the document of a run."""
    made: dict[str, Any] = {}
    keys = {**LEAST, **(changes or {}), **{f"training.{name}": value for name, value in training.items()}}
    for key, value in keys.items():
        *sections, name = key.split(".")
        below = made
        for section in sections:
            below = below.setdefault(section, {})
        below[name] = value
    return made


def parsed(changes: Mapping[str, Any] | None = None, *overrides: str, **training: Any) -> RunConfig:
    """Return the configuration of a run with these keys, under overrides of the command line."""
    return parse_config(document(changes, **training), "run.yaml", KEYS, overrides=overrides)


def faults_of(changes: Mapping[str, Any] | None = None, *overrides: str, **training: Any) -> dict[str, str]:
    """Return the messages by which a run with these keys is refused, by key."""
    with pytest.raises(ConfigError) as raised:
        parsed(changes, *overrides, **training)
    found: dict[str, str] = {}
    for fault in raised.value.faults:
        found[fault.path] = f"{found.get(fault.path, '')}{fault.reason}"
    return found
