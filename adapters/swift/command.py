"""
A command of ms-swift as it resolves it itself: its arguments, its template and the rows that it
trains. No weights are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
from swift.arguments import PretrainArguments, RLHFArguments, SftArguments
from swift.arguments import sft_args as training
from swift.dataset import DatasetLoader
from swift.pipelines.utils import get_cached_dataset
from swift.utils import parse_args, seed_everything

from packplan.adapters.hf.following import replaced
from packplan.adapters.swift.packs import ALGORITHMS
from packplan.adapters.swift.refusals import planned_flags, refuse_arguments, type_faults
from packplan.core.errors import ConfigError, Fault
from packplan.core.fingerprint import Value

_ARGUMENTS: Mapping[str, type[Any]] = {"sft": SftArguments, "pt": PretrainArguments, "rlhf": RLHFArguments}

_UNPLANNED = (
    "_init_deepspeed", "_init_fsdp", "_init_teacher_deepspeed", "_init_device", "_init_swanlab", "_add_version",
    "_handle_pai_compat",
)  # fmt: skip
"""Methods that prepare training alone: devices, folders, trackers."""


@attrs.frozen(eq=False)
class SwiftCommand:
    """A command that trains with ms-swift."""

    arguments: Any
    """Arguments as ms-swift resolves them."""

    world_size: int
    """Ranks that it starts."""

    source: str
    """Name of its script, for errors."""

    names_packing: bool
    """Whether it says `--packing true`, as training needs it."""

    @property
    def num_parts(self) -> int:
        """Number of sequences of a row: 2 where it is a pair, 0 where rows differ."""
        if self.arguments.task_type in {"embedding", "reranker", "generative_reranker"}:
            return 0
        return 2 if getattr(self.arguments, "rlhf_type", None) else 1

    @property
    def algorithm(self) -> str:
        """Name of the algorithm by which the plugin packs."""
        return ALGORITHMS[self.arguments.packing_strategy]

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of a rank in a step; ms-swift aims at 16 samples where none is said."""
        asked, size = self.arguments.gradient_accumulation_steps, self.arguments.per_device_train_batch_size
        return int(asked) if asked is not None else max(1, math.ceil(16 / size / self.world_size))

    def inputs(self) -> dict[str, Value]:
        """Return the arguments that lengths depend on, as ms-swift's template gets them."""
        asked = {**self.arguments.get_template_kwargs(), "task_type": self.arguments.task_type, "parts": self.num_parts}
        return {f"swift.{name}": value if isinstance(value, int) else str(value) for name, value in asked.items()}

    def flags(self) -> dict[str, Any]:
        """Return the arguments that decide the plan, by flag: see `planned_flags`."""
        return planned_flags(self.arguments)

    def open_template(self) -> Any:
        """Return the template, in training mode; ConfigError if ms-swift refuses it."""
        with _faults_named(self.source):
            _, processor = self.arguments.get_model_processor(load_model=False)
            template = self.arguments.get_template(processor)
            template.set_mode("train")  # halves of pairs are encoded one by one
        return template

    def open_rows(self) -> dict[str, Any]:
        """
        Return the rows of `train`, and of `eval` if there are any: `datasets.Dataset`s in the order
        of ms-swift, without the lengths that a cached data set has of them.

        Raises:
            ConfigError: ms-swift cannot load them.
        """
        arguments = self.arguments
        with _faults_named(self.source):
            seed_everything(arguments.seed)
            cached = get_cached_dataset(arguments)
            loaded = arguments.load_dataset() if arguments.dataset or arguments.val_dataset else (None, None)
            several = [
                [*held, *([more] if more is not None else [])] for held, more in zip(cached, loaded, strict=True)
            ]
            rows = {
                name: DatasetLoader.concat_datasets(held) for name, held in zip(("train", "eval"), several, strict=True)
            }
        if rows["train"] is None:
            raise ConfigError(self.source, (Fault("--dataset", "has no row that ms-swift can read: look at its log"),))
        return {
            name: held.remove_columns([column for column in held.column_names if column in {"lengths", "length"}])
            for name, held in rows.items()
            if held is not None
        }


def read_arguments(task: str, words: Sequence[str], *, world_size: int, source: str) -> SwiftCommand:
    """
    Return a command as ms-swift resolves it, before it loads anything.

    Args:
        task: Command of ms-swift: `sft`, `pt` or `rlhf`.
        words: Words behind it.
        world_size: Ranks that it starts.
        source: Name of its script, for errors.

    Raises:
        ConfigError: ms-swift refuses it, or its packs cannot be planned.
    """
    kind = _ARGUMENTS[task]
    unplanned = {name: _skip for name in _UNPLANNED if hasattr(kind, name)}

    def resolve(arguments: Any) -> None:
        """Refuse a type that is not planned before ms-swift finds something else in it."""
        if faults := tuple(type_faults(arguments)):
            raise ConfigError(source, faults)
        kind.__post_init__(arguments)

    planned = type(kind.__name__, (kind,), {**unplanned, "_check_padding_free": _check, "__post_init__": resolve})
    with _faults_named(source), replaced(training.TrainerFactory, get_training_args=lambda _: SimpleNamespace()):
        plain, rest = _parsed(planned, [*words, "--packing", "true"], source=source)
        if rest:
            raise ConfigError(source, (Fault(rest[0], "is no argument of ms-swift: remove it"),))
    if plain.truncation_strategy == "split":
        raise ConfigError(source, (Fault("--truncation_strategy", "is split, which makes several rows of one"),))
    return SwiftCommand(plain, world_size, source, _says_packing(words))


def _parsed(kind: type[Any], words: list[str], *, source: str) -> tuple[Any, list[str]]:
    """Return ms-swift's arguments of words; its parser ends the process where it refuses one."""
    try:
        found: tuple[Any, list[str]] = parse_args(kind, words)
    except SystemExit:
        raise ConfigError(source, (Fault("ms-swift", "refuses an argument, which it names above"),)) from None
    return found


def _says_packing(words: Sequence[str]) -> bool:
    """Return whether words switch packing on."""
    return any(
        word == "--packing=true" or (word == "--packing" and following.lower() not in {"false", "0", "no"})
        for word, following in zip(words, [*words[1:], "--"], strict=True)
    )


def _check(arguments: Any) -> None:
    """Refuse what the plugin refuses; flash attention is not needed."""
    refuse_arguments(arguments)
    arguments.padding_free = True


def _skip(_: Any) -> None:
    """Do nothing."""


@contextmanager
def _faults_named(source: str) -> Iterator[None]:
    """Raise whatever ms-swift raises as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # each of its checks raises as it likes
        reason = f"refuses the command: {str(error) or type(error).__name__}"[:500]
        raise ConfigError(source, (Fault("ms-swift", reason),)) from error
