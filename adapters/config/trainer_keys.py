"""
Says which types, choices and bounds the training arguments of ms-swift and TRL have.

The arguments are read from tables, since importing these libraries takes seconds. A setting that
needs a missing package, or that this machine would ignore, is a fault.

A table is valid for one version of its libraries; `make reference` writes it from the installed
versions. If other versions are installed, the classes of the libraries are read instead, by
`installed_keys` in `adapters.trainer.arguments` or `app.opening.grpo`.
"""

import contextlib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import cattrs

from packplan.adapters.config.values import TOO_LARGE
from packplan.adapters.files import parse_json, read_text
from packplan.adapters.versions import installed_version
from packplan.core.config.faults import ForeignKey
from packplan.core.errors import Fault

SFT_KEYS_FILE = Path(__file__).with_name("trainer_keys.json")
"""Table of the settings that `training.` passes on to ms-swift."""

GRPO_KEYS_FILE = Path(__file__).with_name("grpo_keys.json")
"""Table of the settings that `grpo.` passes on to TRL."""

FOREIGN_KEYS_FILE = Path(__file__).with_name("foreign_keys.json")
"""Table of keys of other programs, with their counterparts among Packplan's keys, if any."""

LIBRARIES: Mapping[Path, tuple[str, ...]] = {
    SFT_KEYS_FILE: ("ms-swift", "transformers"),
    GRPO_KEYS_FILE: ("trl", "transformers"),
}
"""For each table, the packages from which it was read."""

WORDS = {
    "null": "null", "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text",
    "list": "a list of texts", "numbers": "a list of numbers", "dict": "a section of keys",
}  # fmt: skip
"""Words that messages use for each type, by the type's name."""

TYPES: Mapping[Any, str] = {
    type(None): "null", bool: "bool", int: "int", float: "float", str: "str", list: "list", list[float]: "numbers",
    dict: "dict",
}  # fmt: skip
"""Name of each type, which is a key of `WORDS`."""

_NEED = {"use_flash_ckpt": "dlrover", "use_liger_kernel": "liger_kernel"}
"""For each setting that needs an additional package, the name of the package."""

SETTINGS_FILES = ("accelerator_config", "deepspeed", "fsdp_config")
"""Keys of `training.` whose value is a section, or the path of a JSON file with that section."""

_ANNOTATIONS = {"fsdp": bool | str | None, "report_to": list[str] | str}
"""Complete types of settings whose annotations in transformers are incomplete."""

_PATHS = frozenset({*SETTINGS_FILES, "logging_dir"})

_BELOW_ONE = frozenset({"adam_beta1", "adam_beta2", "warmup_ratio"})


@attrs.frozen
class TrainerKey:
    """Types, choices and bounds of the values of a key that is passed to the trainer."""

    types: tuple[str, ...]
    """Names of the allowed types, which are keys of `WORDS`; `float` allows whole numbers too."""

    choices: tuple[str, ...] = ()
    """Allowed values of a text, or of each item of a list; empty if any text is allowed."""

    least: float = 0
    """Inclusive lower bound of numbers."""

    below: float = float("inf")
    """Exclusive upper bound of numbers."""

    path: bool = False
    """Whether a text is the path of a file or folder."""

    def convert(self, value: Any) -> Any:
        """Return a YAML value converted to a type of the key; ValueError if no type fits."""
        given, kind = value, TYPES.get(type(value), "")
        if value is False and "no" in self.choices:  # YAML reads no as false
            value, kind = "no", "str"
        if "float" in self.types and kind in {"int", "str"}:
            # YAML reads 1e-5 as a text; a text that is no number is refused below.
            with contextlib.suppress(ValueError, OverflowError):
                value, kind = float(value), "float"
        if kind == "str" and "dict" in self.types and not self.path:
            # ms-swift takes a section as JSON too.
            with contextlib.suppress(ValueError):
                value = parse_json(value)
            kind = "dict" if isinstance(value, dict) else ""
        if kind == "str" and "list" in self.types and "str" not in self.types:
            value, kind = [value], "list"  # as on ms-swift's command line
        if kind == "list" and "numbers" in self.types and all(type(one) in {int, float} for one in value):
            kind = "numbers"
        texts = value if kind == "list" else [value] if kind == "str" else []
        fits = kind in self.types and all(isinstance(text, str) for text in texts)
        if kind in {"int", "float"}:
            fits = fits and self.least <= value < (min(self.below, TOO_LARGE) if kind == "int" else self.below)
        if not fits or (self.choices and not set(self.choices).issuperset(texts)):
            raise ValueError(f"is {given!r}, but has to be {self._describe()}")
        return value

    def _describe(self) -> str:
        """Return a description of the values that the key accepts, for a message."""
        unsaid = {"null", "str"} if self.choices or ("dict" in self.types and not self.path) else {"null"}
        words = [WORDS[kind] for kind in self.types if kind not in unsaid]
        if self.choices:
            words.append(f"one of {', '.join(self.choices)}")
        wanted = " or ".join(words) or WORDS["null"]
        if {"int", "float"} & set(self.types):
            below = min(self.below, TOO_LARGE if "float" not in self.types else self.below)
            wanted += f" of at least {self.least:g}" + ("" if below == float("inf") else f" and below {below:,g}")
        return wanted


def flat_types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation, with unions split into types and literals into texts."""
    origin = typing.get_origin(annotation)
    if origin in {types.UnionType, typing.Union}:
        for argument in typing.get_args(annotation):
            yield from flat_types(argument)
    elif origin is typing.Literal:
        yield from (choice if isinstance(choice, str) else type(choice) for choice in typing.get_args(annotation))
    else:
        yield annotation if annotation in TYPES else origin or annotation


def argument_keys(
    kind: Any, choices: Mapping[str, Iterable[str]] = types.MappingProxyType({})
) -> dict[str, TrainerKey]:
    """
    Return the keys of a class of training arguments, by field name.

    Args:
        kind: Dataclass of training arguments.
        choices: For some fields, allowed texts that the annotation does not list, by field name.
    """
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    known = {"report_to": ["all", "none", *INTEGRATION_TO_CALLBACK], **choices}
    hints = typing.get_type_hints(kind) | _ANNOTATIONS
    return {
        name: _argument_key(kind, name, hints[name], known.get(name, ()))
        for name in kind.__dataclass_fields__
        if name in hints
    }


def _argument_key(owner: Any, name: str, annotation: Any, known: Iterable[str]) -> TrainerKey:
    field = owner.__dataclass_fields__[name]
    # ms-swift declares some of transformers' keys again, as plain strings.
    kinds = [*flat_types(annotation), *flat_types(_first_annotation(owner, name))]
    choices = [*known, *(field.metadata.get("choices") or ())]
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
    """Return a key's annotation in the base class that declares it, such as transformers'."""
    for kind in reversed(owner.__mro__):
        if name in vars(kind).get("__annotations__", {}):
            return typing.get_type_hints(kind)[name]
    raise AssertionError(name)


def read_key_table(path: Path = SFT_KEYS_FILE) -> dict[str, TrainerKey] | None:
    """Return a table's keys by name; None if another version of a library is installed."""
    table = json.loads(path.read_text(encoding="utf-8"))
    if any(installed_version(name) not in {None, stated} for name, stated in table["versions"].items()):
        return None
    return cattrs.structure(table["keys"], dict[str, TrainerKey])


def read_foreign_keys() -> dict[str, ForeignKey]:
    """
    Return the keys of other programs, by name, also if Packplan has no counterpart for the key.
    """
    found = dict.fromkeys(json.loads(SFT_KEYS_FILE.read_text(encoding="utf-8"))["others"], ForeignKey("ms-swift"))
    for row in json.loads(FOREIGN_KEYS_FILE.read_text(encoding="utf-8")):
        ours, about = row.pop("here"), row.pop("about", "").replace("`", "")
        for name in " ".join(row.values()).split():
            programs = [program for program, names in row.items() if name in names.split()]
            found[name] = ForeignKey(" and ".join(programs), ours, about)
    return found


def read_nested_settings(value: Any) -> Mapping[str, Any]:
    """
    Return the settings in the value of a `SETTINGS_FILES` key: a section, JSON or a file's path.

    The result is empty if a file cannot be read; the trainer refuses that file later.
    """
    if isinstance(value, (str, Path)):
        with contextlib.suppress(ValueError):
            value = parse_json(str(value) if str(value).startswith("{") else read_text(Path(value)))
    return value if isinstance(value, Mapping) else {}


def deepspeed_file(name: str) -> str:
    """
    Return the path of ms-swift's file with the DeepSpeed settings *name*, such as `zero2`.

    If ms-swift has no such file, *name* is returned.
    """
    spec = find_spec("swift")
    if spec is None or spec.origin is None or not re.fullmatch(r"zero\w+", name):
        return name
    file = Path(spec.origin).parent / "config" / f"{name}.json"
    return str(file) if file.is_file() else name


def machine_faults(settings: Mapping[str, Any], *, on_cpu: bool, section: str = "training") -> Iterator[Fault]:
    """
    Yield a fault for each setting that does not work on this machine.

    Such a setting needs a missing package or file, has no effect on a CPU or under DeepSpeed, or
    makes several ranks train as one.

    Args:
        settings: Settings of the trainer.
        on_cpu: Whether training uses no GPU.
        section: Section of the settings: `training`, or `grpo`.
    """
    for key, package in _NEED.items():
        if settings.get(key) and find_spec(package) is None:
            reason = f"needs the package {package}, which is not installed: install it, or remove the key"
            yield Fault(f"{section}.{key}", reason)
    if settings.get("fp16") and on_cpu:
        yield Fault(f"{section}.fp16", "has no effect on a CPU, which would compute in float32: use bf16, or drop fp16")
    if settings.get("fsdp") and on_cpu:
        reason = "has no effect on a CPU, where accelerate ignores it: remove the key, or train on GPUs"
        yield Fault(f"{section}.fsdp", reason)
    for key in SETTINGS_FILES:
        # Text that begins with ey is JSON in base64, as the launcher of DeepSpeed writes it.
        if isinstance(path := settings.get(key), str) and not path.startswith(("{", "ey")) and not Path(path).is_file():
            yield Fault(f"{section}.{key}", f"is {path}, but there is no such file: name a JSON file of settings")
    shared = read_nested_settings(settings.get("deepspeed"))
    for name in ("tensor_parallel", "sequence_parallel_size"):
        if name in shared:
            reason = "makes DeepSpeed train several ranks as one learner, but plans count every rank"
            yield Fault(f"{section}.deepspeed", f"{reason}: remove {name}")
    if shared and settings.get("max_grad_norm") and "gradient_clipping" not in shared:
        reason = f"is {settings['max_grad_norm']}, but DeepSpeed clips gradients by its own settings alone"
        yield Fault(f"{section}.max_grad_norm", f"{reason}: add gradient_clipping: auto to {section}.deepspeed")


def require_deepspeed_agrees(args: Any) -> None:
    """
    Refuse DeepSpeed settings that contradict training arguments, before the model is loaded.

    Raises:
        ValueError: A setting differs. Transformers would raise the same error when training starts.
    """
    if found := getattr(getattr(args, "hf_deepspeed_config", None), "mismatches", None):
        raise ValueError(f"{'; '.join(one.removeprefix('- ') for one in found)}: write auto to use the run's values")
