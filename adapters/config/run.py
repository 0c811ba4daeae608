"""
Reads the YAML of a run, and reports all its faults at once, each with its key and a remedy.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, get_origin

import attrs

from packplan.adapters.config.layers import apply_overrides, expand_path, read_document
from packplan.adapters.config.trainer_keys import (
    GRPO_KEYS_FILE,
    SFT_KEYS_FILE,
    TrainerKey,
    deepspeed_file,
    read_foreign_keys,
    read_key_table,
)
from packplan.adapters.config.values import Advise, structure_document
from packplan.core.config.faults import explain_unknown_key, run_faults
from packplan.core.config.keys import yield_keys
from packplan.core.config.refusals import refused_settings
from packplan.core.config.rl import RlConfig, rl_faults
from packplan.core.config.run import RunConfig, TrainingConfig
from packplan.core.errors import ConfigError, Fault
from packplan.core.mixes import Mix, Mixes, Source, mixes_faults

T = TypeVar("T", bound=RunConfig)

SECTIONS = ("model", "template", "custom", "training")

RL_SECTIONS = ("policy", "grpo")

_OWN_KEYS = {field.name for field in attrs.fields(TrainingConfig)} - {"trainer"}
"""Keys of `training.` that Packplan itself reads; all others are passed on to the trainer."""

_REQUIRED = {"template": {}, "custom": {}, "model": {"model": "unset"}, "training": {"output_dir": "unset"}}
"""For each section, stand-ins for faulty values of keys that have no default."""

_FAULTS: Mapping[type, Callable[[Any], Iterator[Fault]]] = {RunConfig: run_faults, RlConfig: rl_faults}
"""For each configuration class, a function that yields faults that types cannot express."""

_ADVICE = re.compile(r": (?:write|did you mean) (.*)")

_NO_PRESET = (
    "is 'fsdp2', but these settings were not tested with packs: set fsdp to true, and copy what you need "
    "from ms-swift's fsdp2.json into fsdp_config"
)

_FOREIGN = read_foreign_keys()

_REFUSED = {f"training.{key}": str(refusal) for key, refusal in refused_settings("sft").items()}


def parse_config(
    document: Mapping[str, Any], source: str, trainer_keys: Mapping[str, TrainerKey], *, overrides: Sequence[str] = ()
) -> RunConfig:
    """
    Build a configuration from a parsed document.

    Args:
        document: Content of the YAML.
        source: Name of the YAML, which errors mention.
        trainer_keys: Keys of `training.` that are passed to the trainer, with the values that each
            accepts.
        overrides: Values for single keys, such as `training.learning_rate=1e-4`, which replace the
            YAML's; null unsets a key.

    Raises:
        ConfigError: The configuration has faults; the error lists all of them.
    """
    document = {name: {} for name in SECTIONS} | apply_overrides(document, overrides)
    reason = "belongs to packplan rl, and no other command reads it: remove the section"
    found = [Fault(name, reason) for name in RL_SECTIONS if document.pop(name, None) is not None]
    usable = {f"training.{key}" for key in trainer_keys} | {*known_keys(RunConfig)}
    advise = partial(explain_unknown_key, known=sorted(usable - {*_REFUSED}), refused=_REFUSED, foreign=_FOREIGN)
    training: Any = document["training"]
    if isinstance(training, dict):
        passed = {key: value for key, value in training.items() if key not in _OWN_KEYS}
        own = {key: value for key, value in training.items() if key in _OWN_KEYS}
        document["training"] = own | {"trainer": _convert_settings("training", passed, trainer_keys, advise, found)}
    return _build_config(document, RunConfig, source, advise, found)


def load_rl_config(path: str | Path, grpo_keys: Mapping[str, TrainerKey], *, overrides: Sequence[str] = ()) -> RlConfig:
    """
    Read the YAML of a run of reinforcement learning, and the YAMLs that it extends.

    Args:
        path: YAML file. A relative path in `extends:` is relative to the YAML's folder; all other
            relative paths are relative to the working directory.
        grpo_keys: Keys of `grpo.` that are passed to TRL, with the values that each accepts.
        overrides: Values for single keys, as in `parse_config`.

    Raises:
        ConfigError: The configuration has faults; the error lists all of them.
    """
    document = {name: {} for name in (*SECTIONS, *RL_SECTIONS)} | apply_overrides(read_document(Path(path)), overrides)
    known = [key for key in known_keys(RlConfig) if key.partition(".")[0] != "training"]
    known += [f"grpo.{key}" for key in grpo_keys]
    advise = partial(explain_unknown_key, known=known, refused={}, foreign=_FOREIGN)
    found = []
    if document["training"]:
        found.append(Fault("training", "belongs to packplan sft: write arguments of GRPOConfig into the section grpo"))
    grpo: Any = document["grpo"]
    if not isinstance(grpo, dict):
        found.append(Fault("grpo", f"is {grpo!r}, but has to be a section of keys"))
        grpo = {}
    elif "output_dir" not in grpo:
        found.append(Fault("grpo.output_dir", "is not set: name a folder for checkpoints and the policy"))
    document["grpo"] = _convert_settings("grpo", grpo, grpo_keys, advise, found)
    document["training"] = {"output_dir": document["grpo"].get("output_dir", "unset")}
    return _build_config(document, RlConfig, str(path), advise, found)


def known_keys(kind: type) -> Iterator[str]:
    """Yield the dotted path of each section and each key of a configuration class."""
    paths = (path for path, field in yield_keys(kind) if get_origin(field.type) is not Mapping)
    parts = (part.removesuffix("[]") for path in paths for part in accumulate(path.split("."), "{}.{}".format))
    return iter(dict.fromkeys(parts))


def advise_overrides(words: Sequence[str], *, section: str) -> str:
    """
    Return advice to write overrides instead of unknown options; empty if no option is a key.

    Args:
        words: Options and values, such as `["--max_length", "512"]`, with names of this or another
            program.
        section: Section of the trainer's keys, `training` or `grpo`.
    """
    table = read_key_table(GRPO_KEYS_FILE if section == "grpo" else SFT_KEYS_FILE) or {}
    paths = {path.rpartition(".")[2]: path for path in [*(f"{section}.{key}" for key in table), *known_keys(RunConfig)]}
    paths = {name: twin.ours for name, twin in _FOREIGN.items() if twin.ours} | paths
    found = []
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and (path := paths.get(name.replace("-", "_"))):
            found.append(f"{path}={value or ('…' if after.startswith('-') else after)}")
    return f"; keys of the YAML have no dashes: {' '.join(found)}" if found else ""


def _build_config(document: Mapping[str, Any], kind: type[T], source: str, advise: Advise, found: Sequence[Fault]) -> T:
    """
    Build the configuration of a document; ConfigError lists its faults and those in *found*.
    """
    config, more = structure_document(document, kind, advise, required=_REQUIRED)
    found = (*found, *more)
    if config is not None:
        # A faulty key has its default now, so faults that mention this key are not reported.
        replaced = [fault.path for fault in found]
        found = (*found, *(one for one in _FAULTS[kind](config) if not _mentions_any(one, replaced)))
    if config is None or found:
        raise ConfigError(source, tuple(_without_advised(found)))
    return attrs.evolve(config, source=source)


def _without_advised(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield faults, except those of unset keys that another fault already advises to write."""
    faults = tuple(faults)
    words = {(one.path, word.strip(",?")) for one in faults for word in " ".join(_ADVICE.findall(one.reason)).split()}
    advised = {key for path, word in words for key in (word, f"{path.rpartition('.')[0]}.{word}")}
    return (fault for fault in faults if fault.path not in advised or not fault.reason.startswith("is not set"))


def _mentions_any(fault: Fault, paths: Sequence[str]) -> bool:
    """Return whether a fault's text names a key of *paths*, or a key below it."""
    words = [f"{word.rstrip(',.:')}." for word in str(fault).split()]
    return any(word.startswith(f"{path}.") for word in words for path in paths)


def load_mixes(path: str | Path) -> Mixes:
    """
    Read the YAML of `custom.fusion_config`: one mix for all epochs, or a curriculum of mixes.

    If several paths lead to the same data file, all of its sources get the first path.

    Args:
        path: YAML file.

    Raises:
        ConfigError: The YAML has faults, which the error lists, or names no data file. Faults that
            depend on the data are found by `core.mixes.mixes_faults`.
    """
    document = read_document(Path(path))
    kind: type[_Curriculum | Mix] = _Curriculum if "curriculum" in document else Mix
    advise = partial(explain_unknown_key, known=[*known_keys(kind)], refused={}, foreign={})
    found, faults = structure_document(document, kind, advise)
    if found is None or faults:
        raise ConfigError(str(path), tuple(_without_advised(faults)))
    first_names: dict[Path, str] = {}

    def use_first_name(source: Source) -> Source:
        return attrs.evolve(source, jsonl=first_names.setdefault(Path(source.jsonl).resolve(), source.jsonl))

    entries = (found,) if isinstance(found, Mix) else found.curriculum
    mixes = Mixes(
        tuple(attrs.evolve(mix, sources=tuple(map(use_first_name, mix.sources))) for mix in entries),
        is_curriculum=not isinstance(found, Mix),
    )
    if not mixes.files:
        raise ConfigError(str(path), tuple(mixes_faults(mixes, ())))
    return mixes


@attrs.frozen
class _Curriculum:
    """Content of a YAML with a mix for each epoch."""

    curriculum: tuple[Mix, ...]


def _convert_settings(
    section: str, values: Mapping[str, Any], keys: Mapping[str, TrainerKey], advise: Advise, found: list[Fault]
) -> dict[str, Any]:
    """Convert the settings of a section for the trainer; append faults to *found*."""
    taken: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{section}.{key}"
        if refusal := _NO_PRESET if (key, value) == ("fsdp", "fsdp2") else _REFUSED.get(path):
            found.append(Fault(path, refusal))
        elif key not in keys:
            found.append(Fault(path, advise(str(key), section)))
        else:
            try:
                is_path = keys[key].path and isinstance(value, str)
                taken[key] = expand_path(value) if is_path else keys[key].convert(value)
                if key == "deepspeed" and is_path:
                    taken[key] = deepspeed_file(taken[key])
            except ValueError as error:
                twin = _FOREIGN.get(key)
                meant = f", or write {twin.ours} if you mean the key of {twin.programs}" if twin and twin.ours else ""
                found.append(Fault(path, f"{error}{meant}"))
    return taken
