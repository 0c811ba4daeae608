"""
Arguments, template and rows of a training command, as ms-swift itself resolves them.

`read_command` also returns the `RunConfig` by which Packplan plans the command. No weights are
loaded. If arguments contradict a plan, an error names their flags.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from math import ceil
from types import SimpleNamespace
from typing import Any, Literal

import attrs
from swift.arguments import PretrainArguments, RLHFArguments, SftArguments
from swift.arguments import sft_args as training
from swift.cli.main import parse_yaml_args
from swift.dataset import DATASET_MAPPING
from swift.pipelines.train import SwiftPretrain, SwiftRLHF, SwiftSft
from swift.utils import get_device_count, parse_args

from packplan.adapters.config.trainer_keys import deepspeed_file
from packplan.adapters.files import broken_lines
from packplan.adapters.models import replace_attributes, set_media_token_ids
from packplan.adapters.swift.packs import ALGORITHMS
from packplan.core.batch import count_row_groups
from packplan.core.config.refusals import active_refusals
from packplan.core.config.run import (
    COMMAND,
    TUNERS,
    CustomConfig,
    HostCommand,
    ModelConfig,
    RunConfig,
    TemplateConfig,
    TrainingConfig,
)
from packplan.core.config.tuners import decides_weights
from packplan.core.errors import ConfigError, Fault

COMMANDS: Mapping[str, tuple[type[Any], type[Any]]] = {
    "pt": (PretrainArguments, SwiftPretrain), "rlhf": (RLHFArguments, SwiftRLHF), "sft": (SftArguments, SwiftSft),
}  # fmt: skip
"""
Command of ms-swift -> classes of its arguments and its pipeline. The classes of `sft` are base
classes of the other commands' classes.
"""

_SKIPPED_METHODS = (
    "_init_deepspeed", "_init_fsdp", "_init_teacher_deepspeed", "_init_device", "_init_swanlab", "_add_version",
    "_handle_pai_compat",
)  # fmt: skip
"""
Methods of ms-swift's arguments that prepare devices, folders and trackers. `read_command` replaces
them with functions that do nothing.
"""

_STEP_ARGUMENTS = (
    "bf16", "fp16", "gradient_checkpointing", "vit_gradient_checkpointing", "optim", "use_liger_kernel", "use_cpu",
    "fsdp", "deepspeed", "data_seed", "train_dataloader_shuffle",
)  # fmt: skip
"""
Arguments that decide the memory of a step or the order of rows. `run_of_arguments` copies them to
the section `training`.
"""

Degrees = int | Literal["auto"]
"""
Maximum number of ranks that share a long pack. The number is a power of two that divides the number
of ranks; `auto` takes the largest such power. With 1, no pack is shared.
"""

_DRAWING = ("gkd", "grpo", "ppo")
"""Values of `--rlhf_type` whose trainers generate answers with the model."""

DATA_SETS: Container[str] = DATASET_MAPPING
"""Names of the data sets that are registered in ms-swift."""

TESTED_VERSIONS = ("4.6.0",)
"""
Versions of ms-swift with which the plugin was tested; `refuse_untested_version` refuses all others.
"""


class DryRun:
    """
    Mixin that makes a training pipeline of ms-swift prepare only its template and its rows.

    No weights are loaded, and no file is written. Rows are encoded only if texts are split into
    several samples.
    """

    args: Any
    template: Any

    def read_rows(self) -> dict[str, Any]:
        """
        Return the training rows under the key `train`, and evaluation rows, if any, under `eval`.

        The values are `datasets.Dataset`s in ms-swift's order. If texts are split into several
        samples, the rows are encoded. The columns `length` and `lengths`, which cached data sets
        have, are left out.

        Raises:
            ConfigError: ms-swift cannot load the data, or there is no row to train.
        """
        with loading_rows(self.args):
            found = zip(("train", "eval"), self._prepare_dataset(), strict=True)  # type: ignore[attr-defined]  # of ms-swift
        rows = {split: one for split, one in found if one}  # an empty one is not trained either
        if "train" not in rows:
            raise ConfigError(COMMAND, (Fault("--dataset", "has no row that ms-swift can read: see the log above"),))
        return {name: one.remove_columns([*{"lengths", "length"} & {*one.column_names}]) for name, one in rows.items()}

    def _prepare_model_tokenizer(self) -> None:
        self.model, self.processor = self.args.get_model_processor(load_model=False)

    def _prepare_template(self) -> None:
        super()._prepare_template()  # type: ignore[misc]  # of ms-swift
        set_media_token_ids(self.template, self.processor)
        self.template.set_mode("train")  # halves of pairs are encoded one by one
        self.template.packing = self.template.padding_free = True

    def _save_val_dataset(self, rows: Any) -> None:
        """Write nothing."""

    def _encode_dataset(self, *rows: Any, **options: Any) -> Any:
        splits = self.args.truncation_strategy == "split"
        return super()._encode_dataset(*rows, **options) if splits else rows  # type: ignore[misc]  # of ms-swift

    def _post_process_datasets(self, rows: list[Any]) -> list[Any]:
        return rows

    def _show_dataset(self, *rows: Any) -> None:
        """Print nothing."""


def open_pipeline(arguments: Any) -> DryRun:
    """
    Return ms-swift's own pipeline for a command, with a template but without weights.

    Args:
        arguments: Arguments that `read_command` has returned.

    Raises:
        ConfigError: ms-swift cannot load the processor or the template.
    """
    _, kind = next(one for one in COMMANDS.values() if isinstance(arguments, one[0]))
    with _wrap_swift_errors():
        opened: DryRun = type(kind.__name__, (DryRun, kind), {})(arguments)
    return opened


def read_command(
    task: str, words: Sequence[str], *, world_size: int | None = None, count_started: Callable[[], int] = lambda: 1,
    degrees: Degrees = 1,
) -> tuple[Any, RunConfig]:  # fmt: skip
    """
    Return a command's arguments as ms-swift resolves them, and the `RunConfig` that plans it.

    No rows or weights are loaded. If the first word is a YAML or JSON file, ms-swift reads the
    file, and sets the environment variables that the file names.

    Args:
        task: Command of ms-swift: `sft`, `pt` or `rlhf`.
        words: Words of the command line after the task.
        world_size: Number of processes, or of groups of processes that share each row. None takes
            the number of processes that the command starts.
        count_started: Function that returns the number of training processes that the command
            starts. It is called after ms-swift has read the file.
        degrees: See `Degrees`.

    Raises:
        ConfigError: ms-swift refuses the command, or its arguments contradict a plan.
        ArgumentError: The processes cannot share rows or packs as the arguments say.
    """
    (kind, _), given = COMMANDS[task], list(words)
    unplanned = {name: lambda _: None for name in _SKIPPED_METHODS if hasattr(kind, name)}
    check = {"_check_padding_free": lambda arguments: prepare_arguments(arguments, degrees=degrees)}
    with (
        _wrap_swift_errors(),
        replace_attributes(training.TrainerFactory, get_training_args=lambda _: SimpleNamespace()),
    ):
        parse_yaml_args(given)  # puts the keys of a file in its place
        try:
            plain, rest = parse_args(type(kind.__name__, (kind,), unplanned | check), [*given, "--packing", "true"])
        except SystemExit:  # ms-swift's parser exits if it refuses an argument
            raise ConfigError(COMMAND, (Fault("ms-swift", "refuses the argument named above: change it"),)) from None
        if rest:
            raise ConfigError(COMMAND, (Fault(rest[0], "is not an argument of ms-swift: remove it"),))
    num_processes = world_size * row_ranks(plain) if world_size else count_started()
    size = plain.per_device_train_batch_size
    # What ms-swift sets where a command trains.
    plain.gradient_accumulation_steps = plain.gradient_accumulation_steps or max(1, ceil(16 / size / num_processes))
    plain.deepspeed = plain.deepspeed and deepspeed_file(plain.deepspeed)
    if getattr(plain, "rlhf_type", None) == "kto":  # pairs the rows of a step
        plain.global_batch_size = num_processes * size * plain.gradient_accumulation_steps
    run = run_of_arguments(plain, num_processes, task=task, words=given, degrees=degrees)
    run.plan_world_size(num_processes // row_ranks(plain))  # refuses degrees that the ranks do not allow
    return plain, run


def run_of_arguments(
    arguments: Any, num_processes: int, *, task: str = "", words: Sequence[str] = (), degrees: Degrees = 1
) -> RunConfig:
    """
    Return the `RunConfig` by which Packplan plans a command.

    Args:
        arguments: Arguments as ms-swift resolves them.
        num_processes: Number of training processes that the command starts.
        task: Name of the command, such as `sft`; empty inside the command itself.
        words: Words after the task.
        degrees: See `Degrees`.

    Raises:
        ArgumentError: The number of processes that share a row does not divide *num_processes*.
    """
    kind, task_type, shares = getattr(arguments, "rlhf_type", None), arguments.task_type, degrees != 1
    differ = arguments.truncation_strategy == "split" or task_type in {"embedding", "reranker", "generative_reranker"}
    parts = 0 if differ else 2 if kind and (kind, arguments.loss_type) != ("kto", "apo_zero_unpaired") else 1
    own = {one: getattr(arguments, one) for one in ("template", "max_pixels", "system", "agent_template", "loss_scale")}
    inputs = arguments.get_template_kwargs() | {"task_type": task_type, "parts": parts}
    others = {name: one for name, one in inputs.items() if name not in {*own, "default_system"}}
    val = arguments.dataset if arguments.split_dataset_ratio > 0 else arguments.val_dataset
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if not arguments.model_meta.is_multimodal:  # ms-swift freezes parts that the model does not have
        given |= dict.fromkeys(("freeze_llm", "freeze_vit", "freeze_aligner"), False)
    keys = {field.name for field in attrs.fields(TrainingConfig)} - {"resume_from_checkpoint", "trainer"}
    passed = {name for name in given if name in _STEP_ARGUMENTS or decides_weights(name)} - keys
    training = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items() if name in keys} | {
        "packing_algorithm": ALGORITHMS[arguments.packing_strategy], "packing_min_fill_ratio": Decimal(0),
        "packing_balance": "none", "eval_packing": True, "per_device_eval_batch_size": 1,
        "sequence_parallel_size": "auto" if shares else 1,
        "max_sequence_parallel_size": degrees if isinstance(degrees, int) and shares else None,
        "tuner_type": arguments.tuner_type if arguments.tuner_type in TUNERS else "lora",
        "trainer": {name: given[name] for name in sorted(passed)},
    }  # fmt: skip
    dtype: Any = str(arguments.torch_dtype).removeprefix("torch.")
    return RunConfig(
        source=COMMAND,
        model=ModelConfig(model=arguments.model_dir, model_type=arguments.model_type, torch_dtype=dtype),
        template=TemplateConfig(max_length=arguments.packing_length, **own),
        custom=CustomConfig(
            train_jsonl=(*arguments.dataset, *arguments.cached_dataset), max_bad_share=Decimal(1),
            val_jsonl=(*val, *arguments.cached_val_dataset), on_bad_record="stop" if arguments.strict else "skip",
        ),
        training=TrainingConfig(**training),
        command=HostCommand(
            task=task, words=tuple(words), world_size=count_row_groups(num_processes, row_ranks(arguments)),
            task_type=task_type, sequences_per_row=parts,
            length_inputs={f"swift.{name}": one if isinstance(one, int) else str(one) for name, one in others.items()},
        ),
    )  # fmt: skip


@contextmanager
def _wrap_swift_errors() -> Iterator[None]:
    """Turn any exception in this context, such as an error of ms-swift, into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # its checks raise errors of any class
        facts = dict.fromkeys(str(one) or type(one).__name__ for one in (error, error.__cause__) if one is not None)
        raise ConfigError(COMMAND, (Fault("ms-swift", f"refuses the command: {': '.join(facts)}"[:500]),)) from error


@contextmanager
def loading_rows(arguments: Any) -> Iterator[None]:
    """
    Turn any exception while the rows of a command are loaded into a ConfigError.

    If lines of data files are not valid JSON, the faults of the error name these lines.
    """
    try:
        with _wrap_swift_errors():
            yield
    except ConfigError as error:
        names = {"--dataset": arguments.dataset, "--val_dataset": arguments.val_dataset}
        faults = [Fault(flag, line) for flag, files in names.items() for line in broken_lines(files)]
        raise ConfigError(COMMAND, tuple(faults) or error.faults) from error


def refuse_untested_version(version: str) -> None:
    """Refuse a version of ms-swift that is not in `TESTED_VERSIONS`."""
    if version not in TESTED_VERSIONS:
        fact = f"is {version}, but this plugin was tested only with {', '.join(TESTED_VERSIONS)}"
        remedy = "install that version, or write the plugin with packplan plugin swift --any-version"
        raise ConfigError("the plugin", (Fault("ms-swift", f"{fact}: {remedy}"),))


def prepare_arguments(arguments: Any, *, degrees: Degrees = 1) -> None:
    """
    Refuse arguments that contradict a plan, and set the arguments that packs need.

    This function replaces ms-swift's own check, which requires flash attention.

    Args:
        arguments: Arguments of a command of ms-swift, which are changed in place.
        degrees: See `Degrees`.

    Raises:
        ConfigError: Some arguments contradict a plan; the error names all of them.
    """
    faults = (*_plan_conflicts(arguments), *(_sharing_conflicts(arguments) if degrees != 1 else ()))
    if faults:
        raise ConfigError(COMMAND, faults)
    arguments.padding_free = arguments.packing
    arguments.packplan_output_dir = arguments.output_dir  # ms-swift adds a version to it
    if arguments.packing:
        # Ranks share rows by `attention.shared_rows`, and ms-swift's own way stays off.
        arguments.packplan_row_ranks, arguments.sequence_parallel_size = arguments.sequence_parallel_size, 1


def unplanned_rlhf(arguments: Any) -> str | None:
    """Return the `--rlhf_type` if its trainer makes its own batches, without a plan; else None."""
    kind = getattr(arguments, "rlhf_type", None)
    packed = kind == "kto" and arguments.packing and arguments.sequence_parallel_size == 1
    return None if kind == "dpo" or (packed and not arguments.model_meta.is_multimodal) else kind


def row_ranks(arguments: Any) -> int:
    """Return the number of ranks that share each row, as `prepare_arguments` has stored it."""
    return getattr(arguments, "packplan_row_ranks", 1)


def _plan_conflicts(arguments: Any) -> Iterator[Fault]:
    """Yield a fault for each argument that contradicts a plan."""
    kind = unplanned_rlhf(arguments)
    if kind and arguments.packing:
        why = "which generates answers in training, so no plan can know their lengths"
        fact = why if kind in _DRAWING else "whose rows are not packed"
        yield Fault("--rlhf_type", f"is {kind}, {fact}: leave --packing out, and the plugin skips padding")
    elif not kind and not arguments.packing:
        yield Fault("--packing", "is false, but the plugin plans packs: add --packing true, or leave the plugin out")
    if (ranks := arguments.global_world_size) > 1 and not (arguments.use_cpu or get_device_count()):
        yield Fault("--use_cpu", f"is false, but {ranks} ranks were started without a GPU: add --use_cpu true")
    for refusal in active_refusals(arguments, "rlhf" if kind else "plugin"):
        yield Fault(f"--{refusal.setting}", str(refusal))
    shares = arguments.packing and arguments.sequence_parallel_size > 1
    if shares and (task := arguments.task_type) not in {"causal_lm", "seq_cls"}:
        yield Fault("--task_type", f"is {task}, whose rows ranks cannot share: set --sequence_parallel_size to 1")


def _sharing_conflicts(arguments: Any) -> Iterator[Fault]:
    """Yield a fault for each argument that prevents ranks from sharing packs by length."""
    without = "write the plugin without --sequence-parallel-size auto"
    if kind := getattr(arguments, "rlhf_type", None):
        yield Fault("--rlhf_type", f"is {kind}, whose packs ranks cannot share by length: {without}")
    elif (task := arguments.task_type) != "causal_lm":
        yield Fault("--task_type", f"is {task}, whose packs ranks cannot share by length: {without}")
    if (size := arguments.sequence_parallel_size) > 1:
        yield Fault("--sequence_parallel_size", f"is {size}, but packs are shared by length: set it to 1, or {without}")
    if (size := arguments.per_device_train_batch_size) > 1:
        remedy = f"set it to 1, and multiply --gradient_accumulation_steps by {size}"
        yield Fault("--per_device_train_batch_size", f"is {size}, but ranks share packs one by one: {remedy}")
    if arguments.enable_channel_loss:
        reason = f"would count tokens of a shared pack once for each of its ranks: remove it, or {without}"
        yield Fault("--enable_channel_loss", reason)
