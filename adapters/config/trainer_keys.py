"""
Types, choices and bounds of ms-swift's training arguments, read from a table, since importing
ms-swift takes seconds.

The table is of one version of ms-swift and transformers; `make reference` writes it from the
installed ones (`adapters.trainer.keys.installed_keys`). Where others are installed, it is not used.
"""

from __future__ import annotations

import contextlib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import cattrs

from packplan.adapters.config.values import HUGE
from packplan.adapters.versions import installed_version
from packplan.core.errors import Fault

TABLE = Path(__file__).with_name("trainer_keys.json")

LIBRARIES = ("ms-swift", "transformers")
"""Packages whose versions decide what the keys are."""

WORDS = {
    "null": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "list": "a list of texts",
    "dict": "a section of keys",
}
"""Type of a value -> what a message calls it."""

TYPES = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict"}
"""Type -> its name, a key of `WORDS`."""

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "all": (),
    "azure_ml": ("azureml",),
    "dagshub": ("dagshub", "mlflow"),
    "flyte": ("flytekit",),
    "kubeflow": (),
    "none": (),
}
"""Service of `report_to` -> the packages it needs, where these are not the one of its name."""

_NEED = {"deepspeed": "deepspeed", "use_flash_ckpt": "dlrover", "use_liger_kernel": "liger_kernel"}
"""Setting -> the package it needs."""

_FILES = ("accelerator_config", "deepspeed", "fsdp_config")
"""Settings that are a section, or the file of one."""


@attrs.frozen
class TrainerKey:
    """Values that a key takes."""

    types: tuple[str, ...]
    """Keys of `WORDS`; where a number may be fractional, it may be whole."""

    choices: tuple[str, ...] = ()
    """Texts that a text, or each item of a list, may be; empty: any."""

    least: float = 0
    """Least number."""

    below: float = float("inf")
    """Number that every number is below."""

    path: bool = False
    """Whether a text is the path of a file or folder."""

    def checked(self, value: Any) -> Any:
        """Return *value* as the trainer takes it; ValueError if it takes none such."""
        given, kind = value, TYPES.get(type(value), "")
        if value is False and "no" in self.choices:  # YAML reads no as false
            value, kind = "no", "str"
        if "float" in self.types and kind in {"int", "str"}:
            # YAML reads 1e-5 as a text; what is no number is refused below.
            with contextlib.suppress(ValueError, OverflowError):
                value, kind = float(value), "float"
        if kind == "str" and "dict" in self.types and not self.path:
            # ms-swift takes a section as JSON too.
            with contextlib.suppress(ValueError):
                value = json.loads(value)
            kind = "dict" if isinstance(value, dict) else ""
        texts = value if kind == "list" else [value] if kind == "str" else []
        fits = kind in self.types and all(isinstance(text, str) for text in texts)
        if fits and kind in {"int", "float"}:
            fits = self.least <= value < self.below
            if kind == "int" and value >= HUGE:
                message = f"is {given!r}, but has to be a whole number below {HUGE:,}"
                raise ValueError(message)
        if not fits or (self.choices and not set(self.choices).issuperset(texts)):
            message = f"is {given!r}, but has to be {self._wanted()}"
            raise ValueError(message)
        return value

    def _wanted(self) -> str:
        """Return in words what the key takes."""
        unsaid = {"null", "str"} if self.choices or ("dict" in self.types and not self.path) else {"null"}
        words = [WORDS[kind] for kind in self.types if kind not in unsaid]
        if self.choices:
            listed = f"one of {', '.join(self.choices)}"
            words = [f"{word} of these" if word == WORDS["list"] else word for word in words] + [listed]
        wanted = " or ".join(words) or WORDS["null"]
        if {"int", "float"} & set(self.types):
            bound = "" if self.below == float("inf") else f" and below {self.below:g}"
            wanted += f" of at least {self.least:g}{bound}"
        return wanted


def flat_types(annotation: Any) -> Iterator[Any]:
    """Yield the types and literal texts of an annotation, without type parameters."""
    origin = typing.get_origin(annotation)
    if origin in {types.UnionType, typing.Union}:
        for argument in typing.get_args(annotation):
            yield from flat_types(argument)
    elif origin is typing.Literal:
        yield from (choice if isinstance(choice, str) else type(choice) for choice in typing.get_args(annotation))
    else:
        yield origin or annotation


def stored_keys() -> dict[str, TrainerKey] | None:
    """Return the table's keys; None if another version of a library is installed than it is of."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if any(installed_version(name) not in {None, table["versions"][name]} for name in LIBRARIES):
        return None
    return cattrs.structure(table["keys"], dict[str, TrainerKey])


def as_table(keys: Mapping[str, TrainerKey]) -> str:
    """
    Return the text of the table of these keys, those of the installed libraries: a line for each
    key.
    """
    plain = TrainerKey(())
    lines = [
        f"    {json.dumps(name)}: "
        f"{json.dumps(attrs.asdict(key, filter=lambda part, value: value != getattr(plain, part.name)))}"
        for name, key in sorted(keys.items())
    ]
    versions = json.dumps({name: installed_version(name) for name in LIBRARIES})
    return f'{{\n  "versions": {versions},\n  "keys": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def lacking(settings: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield faults of settings that need a package or a file that this machine does not have."""
    for key, package in _NEED.items():
        if settings.get(key) and find_spec(package) is None:
            reason = f"needs the package {package}, which is not installed: install it, or remove the key"
            yield Fault(f"training.{key}", reason)
    for key in _FILES:
        file = settings.get(key)
        if isinstance(file, str) and not file.startswith("{") and not Path(file).is_file():
            reason = f"is {file}, which is no file: name a JSON file, or write what it would hold as a section of keys"
            yield Fault(f"training.{key}", reason)
    services = settings.get("report_to", ())
    for service in [services] if isinstance(services, str) else services:
        for package in PACKAGES.get(service, (service,)):
            if find_spec(package) is None:
                reason = f"has {service}, whose package {package} is not installed: install it, or remove {service}"
                yield Fault("training.report_to", reason)
