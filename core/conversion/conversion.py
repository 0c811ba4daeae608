"""A run that is made of a command of ms-swift, with a line for each argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs

Verdict: TypeAlias = Literal["taken over", "changed", "not needed here", "not supported", "refused"]

DIFFERENT = frozenset({"changed", "not supported", "refused"})
"""Verdicts under which the run does otherwise than ms-swift."""

PACKING = "(this project) packing"
"""Name of the line on packs."""


@attrs.frozen
class ModelFacts:
    """Facts that ms-swift knows about a model."""

    is_multimodal: bool | None = None
    """Whether it takes images; None if nothing tells."""

    max_length: int | None = None
    """Tokens that it was made for; None if its folder is not here."""

    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of its weights, as ms-swift loads them; None if its folder is not here."""

    loss_scale: str = "default"
    """Value that ms-swift gives `--loss_scale` with the model's template."""

    unpacked: str | None = None
    """Family of the model, or template, that is known not to pack; None if neither is."""


@attrs.frozen
class Line:
    """Verdict on an argument."""

    argument: str
    """The argument and its value, as they are written; or the default that ms-swift takes."""

    verdict: Verdict

    reason: str
    """The keys that it is here, or why it is none."""


@attrs.frozen
class World:
    """Everything that convert knows beyond the command."""

    model: ModelFacts

    exists: Callable[[str], bool]
    """Whether there is a file or folder of a name."""

    sections: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """Name of a configuration that ms-swift brings (`zero2`, `fsdp2`) -> what it holds."""

    world_size: int = 1

    spread: str = ""
    """Variable that gives the command's one process several devices; empty if none does."""

    exports: bool = False
    """Whether the script's `swift export` makes the cached data of the command."""


@attrs.frozen
class Conversion:
    """A run, and how it came about."""

    document: Mapping[str, Mapping[str, Any]]
    """Sections of the run's YAML."""

    lines: tuple[Line, ...]

    written: Mapping[str, str]
    """Key of the run, with its section -> the argument that it was written for, as in its line."""

    may_pack: bool
    """Whether samples could share packs, though the command says nothing of it."""

    @property
    def different(self) -> tuple[Line, ...]:
        """Lines on everything that the run does otherwise than the command, or not at all."""
        return tuple(line for line in self.lines if line.verdict in DIFFERENT)

    def with_line(
        self, shown: str, verdict: Verdict, reason: str, keys: Mapping[str, Any] = MappingProxyType({})
    ) -> Conversion:
        """
        Return the run with another line for an argument or a decision.

        Args:
            shown: The argument, or the decision, whose line is replaced.
            verdict: Verdict of its new line.
            reason: Reason of its new line.
            keys: Key with its section -> value; each is in the run already, and the lines of the
                arguments that it was written for say its new value.
        """
        document = {section: dict(held) for section, held in self.document.items()}
        lines = {line.argument: line for line in self.lines}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            document[section][name] = value
            argument = self.written[key]
            lines[argument] = Line(argument, "changed", f"{key}: {_shown(value)}")
        lines[shown] = Line(shown, verdict, reason)
        return attrs.evolve(self, document=document, lines=tuple(lines.values()))


def samples_of_step(training: Mapping[str, Any]) -> int:
    """Return the number of samples, or packs, of a rank's optimizer step."""
    return int(training.get("per_device_train_batch_size", 1)) * int(training["gradient_accumulation_steps"])


def batch_keys(batches: int, training: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the keys of a step of so many samples, or packs, of a rank.

    Args:
        batches: Samples, or packs, that a rank takes.
        training: The section as it is, whose batch of a forward pass is kept where it divides them.
    """
    size = int(training.get("per_device_train_batch_size", 1))
    if not batches % size:
        return {"training.gradient_accumulation_steps": batches // size}
    return {"training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": batches}


def listed(keys: Mapping[str, Any]) -> str:
    """Return keys and their values as a line shows them."""
    return ", ".join(f"{key}: {_shown(value)}" for key, value in keys.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{…}"
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
