"""
A command of ms-swift as it resolves it itself: its arguments, its template and the rows that it
trains. No weights are loaded. What stands against a plan is refused by flag.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import swift
from swift.arguments import PretrainArguments, RLHFArguments, SftArguments
from swift.arguments import sft_args as training
from swift.cli.main import parse_yaml_args
from swift.dataset import DatasetLoader, EncodePreprocessor
from swift.pipelines.utils import get_cached_dataset
from swift.utils import parse_args, seed_everything

from packplan.adapters.models import replace_attributes
from packplan.adapters.swift.packs import ALGORITHMS
from packplan.core.config.refusals import refusals_of
from packplan.core.errors import ConfigError, Fault, counted
from packplan.core.fingerprint import Value

_ARGUMENTS: Mapping[str, type[Any]] = {"sft": SftArguments, "pt": PretrainArguments, "rlhf": RLHFArguments}

COMMAND = "the command"

_UNPLANNED = (
    "_init_deepspeed", "_init_fsdp", "_init_teacher_deepspeed", "_init_device", "_init_swanlab", "_add_version",
    "_handle_pai_compat",
)  # fmt: skip
"""Methods that prepare training alone: devices, folders, trackers."""


TESTED_VERSIONS = ("4.6.0",)
"""Versions of ms-swift with which the plugin was shown to train plans exactly."""

_TYPES = ("dpo",)
"""Types of `swift rlhf` whose packs were shown to train as their samples alone do."""


@attrs.frozen(eq=False)
class SwiftCommand:
    """A command that trains with ms-swift."""

    arguments: Any
    """Arguments as ms-swift resolves them."""

    words: tuple[str, ...]
    """The command."""

    started: int
    """Ranks that it starts."""

    @property
    def world_size(self) -> int:
        """Ranks, or groups of ranks that share rows."""
        return self.started // row_ranks(self.arguments)

    @property
    def num_parts(self) -> int:
        """Number of sequences of a row: 2 where it is a pair, 0 where rows differ or are split."""
        if self.splits or self.arguments.task_type in {"embedding", "reranker", "generative_reranker"}:
            return 0
        return 2 if getattr(self.arguments, "rlhf_type", None) else 1

    @property
    def splits(self) -> bool:
        """Whether a text of more than `--max_length` becomes several rows."""
        return bool(self.arguments.truncation_strategy == "split")

    @property
    def algorithm(self) -> str:
        """Name of the algorithm by which the plugin packs."""
        return ALGORITHMS[self.arguments.packing_strategy]

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of a rank in a step; unless said, ms-swift has 16 samples over all ranks."""
        asked, size = self.arguments.gradient_accumulation_steps, self.arguments.per_device_train_batch_size
        return int(asked) if asked is not None else max(1, math.ceil(16 / size / self.started))

    @property
    def deepspeed(self) -> Any:
        """Configuration of DeepSpeed, or its file, that of a name of ms-swift too; None without."""
        named = Path(swift.__file__).parent / "config" / f"{self.arguments.deepspeed}.json"
        return str(named) if named.is_file() else self.arguments.deepspeed

    def inputs(self) -> dict[str, Value]:
        """Return the arguments that lengths depend on, as ms-swift's template gets them."""
        asked = {**self.arguments.get_template_kwargs(), "task_type": self.arguments.task_type, "parts": self.num_parts}
        return {f"swift.{name}": value if isinstance(value, int) else str(value) for name, value in asked.items()}

    def open_template(self) -> Any:
        """Return the template, in training mode; ConfigError if ms-swift refuses it."""
        with _faults_named():
            _, processor = self.arguments.get_model_processor(load_model=False)
            template = self.arguments.get_template(processor)
            template.set_mode("train")  # halves of pairs are encoded one by one
        return template

    def open_rows(self, template: Any) -> dict[str, Any]:
        """
        Return the rows of `train`, and of `eval` if there are any: `datasets.Dataset`s in the order
        of ms-swift, without the lengths that a cached data set has of them. Texts that are split
        are encoded rows.

        Args:
            template: Result of `open_template`.

        Raises:
            ConfigError: ms-swift cannot load them.
        """
        arguments = self.arguments
        with _faults_named():
            seed_everything(arguments.seed)
            cached = get_cached_dataset(arguments)
            loaded = arguments.load_dataset() if arguments.dataset or arguments.val_dataset else (None, None)
            if self.splits:
                loaded = tuple(rows and self._split(template, rows) for rows in loaded)
            several = [
                [*held, *([more] if more is not None else [])] for held, more in zip(cached, loaded, strict=True)
            ]
            rows = {
                name: DatasetLoader.concat_datasets(held) for name, held in zip(("train", "eval"), several, strict=True)
            }
        if rows["train"] is None:
            raise ConfigError(COMMAND, (Fault("--dataset", "has no row that ms-swift can read: look at its log"),))
        return {
            name: held.remove_columns([column for column in held.column_names if column in {"lengths", "length"}])
            for name, held in rows.items()
            if held is not None
        }

    def _split(self, template: Any, rows: Any) -> Any:
        """Return the rows that texts are split into, as ms-swift splits them."""
        arguments = self.arguments
        return EncodePreprocessor(template=template)(
            rows,
            num_proc=arguments.dataset_num_proc,
            load_from_cache_file=arguments.load_from_cache_file,
            strict=arguments.strict,
            batch_size=1000,
        )


def with_file(arguments: Sequence[str]) -> list[str]:
    """Return arguments with those of a YAML or JSON that stands first, as ms-swift reads it."""
    given = list(arguments)
    with _faults_named():
        parse_yaml_args(given)
    return given


def read_arguments(task: str, arguments: Sequence[str], *, words: Sequence[str], world_size: int) -> SwiftCommand:
    """
    Return a command as ms-swift resolves it, before it loads anything.

    Args:
        task: Command of ms-swift: `sft`, `pt` or `rlhf`.
        arguments: Words behind it.
        words: The whole command.
        world_size: Ranks that it starts.

    Raises:
        ConfigError: ms-swift refuses it, or its packs cannot be planned.
    """
    kind = _ARGUMENTS[task]
    unplanned = {name: _skip for name in _UNPLANNED if hasattr(kind, name)}

    def resolve(arguments: Any) -> None:
        """Refuse a type that is not planned before ms-swift finds something else in it."""
        if faults := tuple(type_faults(arguments)):
            raise ConfigError(COMMAND, faults)
        kind.__post_init__(arguments)

    planned = type(kind.__name__, (kind,), {**unplanned, "_check_padding_free": _check, "__post_init__": resolve})
    with _faults_named(), replace_attributes(training.TrainerFactory, get_training_args=lambda _: SimpleNamespace()):
        try:
            plain, rest = parse_args(planned, [*arguments, "--packing", "true"])
        except SystemExit:  # its parser ends the process where it refuses one
            raise ConfigError(COMMAND, (Fault("ms-swift", "refuses an argument, which it names above"),)) from None
        if rest:
            raise ConfigError(COMMAND, (Fault(rest[0], "is no argument of ms-swift: remove it"),))
    if world_size % (size := row_ranks(plain)):
        reason = f"is {size}, which does not divide {counted(world_size, 'rank')}: start a multiple of it, or set 1"
        raise ConfigError(COMMAND, (Fault("--sequence_parallel_size", reason),))
    return SwiftCommand(plain, tuple(words), world_size)


def _check(arguments: Any) -> None:
    """
    Check arguments as the plugin does, in place of ms-swift's check, which demands flash attention;
    sets `padding_free`.
    """
    refuse_arguments(arguments)
    arguments.padding_free = True


def _skip(_: Any) -> None:
    """Do nothing."""


@contextmanager
def _faults_named() -> Iterator[None]:
    """Raise whatever ms-swift raises as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # each of its checks raises as it likes
        reason = f"refuses the command: {str(error) or type(error).__name__}"[:500]
        raise ConfigError(COMMAND, (Fault("ms-swift", reason),)) from error


def refuse_version(version: str) -> None:
    """
    Refuse a version of ms-swift that the plugin was not tested with.

    Raises:
        ConfigError: It is another one.
    """
    if version not in TESTED_VERSIONS:
        reason = (
            f"{version} is not a version that this plugin was tested with ({', '.join(TESTED_VERSIONS)}): install that "
            "one, or write the plugin with packplan plugin swift --any-version"
        )
        raise ConfigError("the plugin", (Fault("ms-swift", reason),))


def refuse_arguments(arguments: Any) -> None:
    """
    Refuse arguments that stand against a plan; all at once.

    Args:
        arguments: Arguments of a command of ms-swift.

    Raises:
        ConfigError: There are some.
    """
    if faults := tuple(_faults(arguments)):
        raise ConfigError("the command", faults)
    if arguments.packing:
        # Ranks share rows by `attention.shared_rows`, and ms-swift's own way stays off.
        arguments.packplan_row_ranks, arguments.sequence_parallel_size = arguments.sequence_parallel_size, 1


def row_ranks(arguments: Any) -> int:
    """Return the ranks that share each row, of arguments that were checked."""
    return getattr(arguments, "packplan_row_ranks", 1)


def _faults(arguments: Any) -> Iterator[Fault]:
    own = own_type(arguments) is not None
    if own and arguments.packing:
        yield from type_faults(arguments)
    elif not own and not arguments.packing:
        yield Fault("--packing", "is false, but packs are planned: say --packing true, or leave the plugin out")
        return
    for refusal in refusals_of(arguments, "rlhf" if own else "plugin"):
        yield Fault(f"--{refusal.setting}", str(refusal))


def own_type(arguments: Any) -> str | None:
    """Return the type of `swift rlhf` if it trains its own batches; None if packs are planned."""
    kind = getattr(arguments, "rlhf_type", None)
    if kind == "cpo" and arguments.loss_type == "simpo":  # what ms-swift makes of it
        kind = "simpo"
    return None if kind in _TYPES else kind


def type_faults(arguments: Any) -> Iterator[Fault]:
    """Yield the fault of a type of `swift rlhf` for which no plans are made."""
    if (kind := own_type(arguments)) is not None:
        way = "the plugin trains it without padding, not --packing"
        yield Fault("--rlhf_type", f"is {kind}, but plans are made for {', '.join(_TYPES)} alone: {way}")
