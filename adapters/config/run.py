"""YAML -> RunConfig, strictly: every fault at once, each with its path and remedy."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from packplan.adapters.config.layers import Override, expand_path, read_document, read_overrides, without_null
from packplan.adapters.config.trainer_keys import TrainerKey
from packplan.adapters.config.values import known_keys, structure
from packplan.core.config.faults import faults, unknown_key
from packplan.core.config.refusals import refused_settings
from packplan.core.config.rl import RlConfig, rl_faults
from packplan.core.config.run import RunConfig, TrainingConfig
from packplan.core.errors import ConfigError, Fault
from packplan.core.mixes import Mix, Mixes, Source, mixes_faults

SECTIONS = ("model", "template", "custom", "training")

RL_SECTIONS = ("policy", "grpo")

_REFUSED = {f"training.{key}": str(refusal) for key, refusal in refused_settings("sft").items()}


def load_config(
    path: str | Path,
    trainer_keys: Mapping[str, TrainerKey],
    *,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """
    Read a run's YAML, and those that it extends.

    Args:
        path: The YAML; a relative `extends:` starts at its folder, all other relative paths at the
            working directory.
        trainer_keys: Settings that `training.` passes to the trainer, and what each takes.
        overrides: Values for single keys, as `training.learning_rate=1e-4`, in place of the YAML's;
            null unsets a key.

    Raises:
        ConfigError: All faults of the configuration.
    """
    return parse_config(read_document(Path(path)), str(path), trainer_keys, overrides=overrides)


def parse_config(
    document: Mapping[str, Any],
    source: str,
    trainer_keys: Mapping[str, TrainerKey],
    *,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """
    Build a configuration from a parsed document.

    Args:
        document: Content of the YAML.
        source: Name of the YAML, for errors.
        trainer_keys: See `load_config`.
        overrides: See `load_config`.

    Raises:
        ConfigError: All faults of the configuration.
    """
    given = read_overrides(overrides)
    document = without_null(_override(document, given))
    known = {f"training.{key}": False for key in trainer_keys} | dict(known_keys(RunConfig))
    usable = {path: section for path, section in known.items() if path not in _REFUSED}
    advice = _Advice(document, usable, _REFUSED)
    sections, found = _sections(document, SECTIONS)
    for name in document.keys() & set(RL_SECTIONS):
        reason = "is of reinforcement learning (packplan rl), which this command is not: remove the section"
        found.append(Fault(name, reason))
    training = sections["training"]
    own = {field.name for field in attrs.fields(TrainingConfig)} - {"trainer"}
    passed = {key: training.pop(key) for key in list(training) if key not in own}
    training["trainer"], key_faults = _check_settings(passed, "training", trainer_keys, advice)
    found += key_faults
    others = {key: value for key, value in document.items() if key not in {*sections, *RL_SECTIONS}}
    config = structure({**others, **sections}, RunConfig, advice)
    found += faults(config) if isinstance(config, RunConfig) else config
    if found or not isinstance(config, RunConfig):
        raise ConfigError(source, _place_faults(found, given))
    return config


def load_rl_config(path: str | Path, grpo_keys: Mapping[str, TrainerKey], *, overrides: Sequence[str] = ()) -> RlConfig:
    """
    Read the YAML of a run of reinforcement learning, and those that it extends.

    Args:
        path: See `load_config`.
        grpo_keys: Settings that `grpo.` passes to TRL, and what each takes.
        overrides: See `load_config`.

    Raises:
        ConfigError: All faults of the configuration.
    """
    given = read_overrides(overrides)
    document = without_null(_override(read_document(Path(path)), given))
    known = {path: section for path, section in known_keys(RlConfig) if path.partition(".")[0] != "training"}
    advice = _Advice(document, known | {f"grpo.{key}": False for key in grpo_keys}, {})
    sections, found = _sections(document, ("model", "template", "custom", *RL_SECTIONS))
    if "training" in document:
        found.append(Fault("training", "is of packplan sft: write into the section grpo what GRPOConfig takes"))
    sections["grpo"], key_faults = _check_settings(sections["grpo"], "grpo", grpo_keys, advice)
    if "output_dir" not in sections["grpo"]:
        key_faults.append(Fault("grpo.output_dir", "is not set: name a folder for checkpoints and the policy"))
    sections["training"] = {"output_dir": sections["grpo"].get("output_dir", "")}
    others = {key: value for key, value in document.items() if key not in sections}
    config = structure({**others, **sections}, RlConfig, advice)
    found += [*key_faults, *(rl_faults(config) if isinstance(config, RlConfig) else config)]
    if found or not isinstance(config, RlConfig):
        raise ConfigError(str(path), _place_faults(found, given))
    return config


def load_mixes(path: str | Path) -> Mixes:
    """
    Read the mixes of data sets of `custom.fusion_config`: a curriculum of one for each epoch, or
    one for all. Spellings of one path become the first of them.

    Args:
        path: The YAML.

    Raises:
        ConfigError: All faults of the YAML, or it names no file; the faults that the data decide
            are `core.mixes.mixes_faults`.
    """
    document = read_document(Path(path))
    kind: type[_Curriculum | Mix] = _Curriculum if "curriculum" in document else Mix
    found: _Curriculum | Mix | list[Fault] = structure(document, kind, _Advice(document, dict(known_keys(kind)), {}))
    if isinstance(found, list):
        raise ConfigError(str(path), tuple(found))
    spelling: dict[Path, str] = {}

    def spelled(source: Source) -> Source:
        return attrs.evolve(source, jsonl=spelling.setdefault(Path(source.jsonl).resolve(), source.jsonl))

    entries = (found,) if isinstance(found, Mix) else found.curriculum
    mixes = Mixes(
        tuple(attrs.evolve(mix, sources=tuple(map(spelled, mix.sources))) for mix in entries),
        is_curriculum=not isinstance(found, Mix),
    )
    if not mixes.files:
        raise ConfigError(str(path), tuple(mixes_faults(mixes, ())))
    return mixes


@attrs.frozen
class _Curriculum:
    """YAML of several mixes."""

    curriculum: tuple[Mix, ...]


@attrs.frozen
class _Advice:
    """Advice on a key that its place does not have."""

    document: Mapping[str, Any]
    known: Mapping[str, bool]
    """Every key with its sections -> whether it is a section itself."""

    refused: Mapping[str, str]

    def __call__(self, key: str, level: str) -> str:
        """Return what is wrong with a *key* in the section *level*, and what to do."""
        value: Any = self.document
        for part in re.findall(r"[^.\[\]]+", level):
            value = value[int(part)] if isinstance(value, list) else value[part]
        is_leaf = not isinstance(value.get(key), (dict, type(None)))
        known = [path for path, section in self.known.items() if not (is_leaf and section)]
        return unknown_key(key, re.sub(r"\[\d+\]", "[]", level), known, refused=self.refused)


def _override(document: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    result = dict(document)
    for override in overrides:
        result = override.over(result)
    return result


def _place_faults(found: Sequence[Fault], overrides: Sequence[Override]) -> tuple[Fault, ...]:
    """Return the faults, those of overridden keys with their overrides as their place."""
    placed = list(found)
    for override in overrides:
        placed = [override.with_place(fault) for fault in placed]
    return tuple(placed)


def _sections(document: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[Fault]]:
    """
    Return these sections, those that are absent as empty, and what is wrong with them as a whole.
    """
    found: list[Fault] = []
    sections: dict[str, dict[str, Any]] = {}
    for name in names:
        value = document.get(name)
        if value is not None and not isinstance(value, dict):
            found.append(Fault(name, f"is {value!r}, but has to be a section of keys"))
        sections[name] = dict(value) if isinstance(value, dict) else {}
    return sections, found


def _check_settings(
    passed: Mapping[str, Any], section: str, keys: Mapping[str, TrainerKey], advice: _Advice
) -> tuple[dict[str, Any], list[Fault]]:
    """Return the settings of a section that go to the trainer, and what is wrong with them."""
    checked, found = {}, []
    for key, value in passed.items():
        path = f"{section}.{key}"
        if path in _REFUSED:
            found.append(Fault(path, _REFUSED[path]))
        elif key not in keys:
            found.append(Fault(path, advice(str(key), section)))
        else:
            try:
                checked[key] = keys[key].checked(value)
                if keys[key].path and isinstance(value, str):
                    checked[key] = expand_path(value)
            except ValueError as error:
                found.append(Fault(path, str(error)))
    return checked, found
