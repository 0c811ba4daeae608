"""Plugin that makes ms-swift's training commands plan and train packs; see `install`."""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import swift
from swift.arguments import SftArguments
from swift.pipelines.train import sft
from swift.utils import is_master

from packplan.adapters.loaders.rows import require_supervised_rows
from packplan.adapters.models import set_media_token_ids
from packplan.adapters.proof.steps import failing_together, gather_from_ranks
from packplan.adapters.swift.command import (
    loading_rows,
    prepare_arguments,
    refuse_untested_version,
    row_ranks,
    unplanned_rlhf,
)
from packplan.adapters.swift.packs import PlannedPacks, RowFactsPreprocessor, take_bad_rows
from packplan.adapters.swift.training import follow_plan, unpad_models
from packplan.core.config.remedies import name_arguments
from packplan.core.errors import (
    ArgumentError,
    ConfigError,
    DataSetError,
    NotBuiltError,
    PackplanError,
    counted,
    fit_lines,
    format_lines,
)
from packplan.core.inspection import describe_long_samples, failure_lines
from packplan.core.packs import plan_checksum
from packplan.core.samples.tables import BadRecord

KeptRows = tuple[Any, Sequence[BadRecord]]
"""Rows of a data set, or None if none is kept, and the rows that are left out, with reasons."""

TakeStored = Callable[[Any, Sequence[Any]], list[KeptRows]]
FindChanges = Callable[[Any], list[str]]


def install(
    *,
    checksum: str | None = None,
    any_version: bool = False,
    check: bool = True,
    degrees: int | Literal["auto"] = 1,
    max_left_out: float = 0.01,
    take_stored: TakeStored | None = None,
    find_changes: FindChanges | None = None,
) -> None:
    """
    Make `swift sft`, `swift pt` and `swift rlhf --rlhf_type dpo` train planned packs.

    These commands need `--packing true` or `--padding_free true`. With `--packing true`,
    `--rlhf_type kto` trains planned packs too, but only a text model, and no ranks may share rows.
    Without `--packing`, `--rlhf_type kto` trains its own batches, and its models skip padding. So
    do all other types; with them, `--packing` is refused. The file that is passed to
    `--external_plugins` calls this function. Other commands, such as `swift infer`, may load the
    same file from a checkpoint, and are not changed by it.

    Args:
        checksum: Checksum of the only plan that may be trained, from the file that `packplan plugin
            swift` writes. None allows any plan.
        any_version: Whether to accept a version of ms-swift that was not tested.
        check: Whether the first pack is compared with its samples alone, before the first step.
        degrees: Maximum number of ranks that share a pack longer than `--packing_length`. The
            number has to be a power of two that divides the number of ranks; `auto` takes the
            largest such power.
        max_left_out: Largest share of the training rows that may be left out because they are too
            long or cannot be encoded. If ms-swift leaves out more rows, the command stops.
        take_stored: Function that returns the rows of a pipeline with stored lengths, and raises
            PackplanError if no stored lengths fit. With None, ms-swift measures all rows.
        find_changes: Function that names the arguments of a pipeline that have changed since its
            plan was stored. With None, the error about another checksum names no argument.

    Raises:
        ConfigError: The version of ms-swift was not tested.
    """
    if not any_version:
        refuse_untested_version(swift.__version__)
    if sft.PackingDataset is PlannedPacks:
        return
    pipeline: Any = sft.SwiftSft
    own = (pipeline.train, pipeline._encode_dataset, pipeline._post_process_datasets)  # noqa: SLF001  # no public names
    steps = _PlannedPipeline(checksum, check, degrees, max_left_out, take_stored, find_changes, *own)
    sft.PackingDataset, sft.AddLengthPreprocessor = PlannedPacks, RowFactsPreprocessor
    SftArguments._check_padding_free = _as_method(partial(prepare_arguments, degrees=degrees))  # noqa: SLF001
    SftArguments._init_stream = _as_method(partial(_replace_padding_free, SftArguments._init_stream))  # noqa: SLF001
    pipeline._encode_dataset, pipeline._post_process_datasets = _as_method(steps.encode), _as_method(steps.pack)  # noqa: SLF001
    pipeline._get_dataset = _as_method(partial(_load_rows, pipeline._get_dataset))  # noqa: SLF001
    # It reads the first pack.
    show = failing_together()(pipeline._show_dataset)  # noqa: SLF001
    pipeline.train, pipeline._show_dataset = _as_method(steps.train), _as_method(show)  # noqa: SLF001


def _as_method(step: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return *step* as a plain function, which a class can have as a method.

    A PackplanError raised by *step* ends the process with the error's message, without a traceback,
    and with the exit status 2. Errors in arguments, which are the same on all ranks, are printed by
    rank 0 only.
    """

    def method(*given: Any, **options: Any) -> Any:
        try:
            return step(*given, **options)
        except PackplanError as error:
            if is_master() or not isinstance(error, (ArgumentError, ConfigError)):
                print(f"packplan: {name_arguments(str(error))}", file=sys.stderr, flush=True)
            raise SystemExit(2) from error

    return method


def _load_rows(load: Callable[[Any], Any], pipeline: Any) -> Any:
    """
    Return the rows that *load*, a step of ms-swift's pipeline, reads; ConfigError if *load* fails.

    First, the token ids that the model uses for images and videos are set in the template.
    """
    set_media_token_ids(pipeline.template, pipeline.processor)
    with loading_rows(pipeline.args):
        return load(pipeline)


def _replace_padding_free(resolve: Callable[[Any], None], arguments: Any) -> None:
    """
    Turn `--padding_free` into `--packing`, before *resolve* sets arguments that depend on packing.

    Trainers of `swift rlhf` that follow no plan keep their own batches.
    """
    if arguments.padding_free and not arguments.packing and unplanned_rlhf(arguments) is None:
        arguments.packing = True
        size = arguments.per_device_train_batch_size
        report(f"planned packs replace --padding_free: --per_device_train_batch_size {size} counts packs, not samples")
    arguments.padding_free = False
    resolve(arguments)


@attrs.frozen
class _PlannedPipeline:
    """
    Replacements for steps of ms-swift's training pipeline; they plan and train packs, or skip
    padding.
    """

    checksum: str | None
    """This field and the next five fields are arguments of `install`."""

    check: bool
    degrees: int | Literal["auto"]
    max_left_out: float
    take_stored: TakeStored | None
    find_changes: FindChanges | None

    _train: Callable[[Any, Any], Any]
    """
    ms-swift's own step `train`. The next two fields are its own steps that encode and pack rows.
    """

    _encode: Callable[..., Any]

    _pack: Callable[[Any, list[Any]], list[Any]]

    def encode(self, pipeline: Any, *data_sets: Any, **options: Any) -> Any:
        """
        Encode data sets by ms-swift's own step, unless their lengths are stored.

        The number of rows that are left out is printed, by reason.

        Raises:
            DataSetError: ms-swift leaves out a larger share of the training rows than
                `max_left_out`.
        """
        found = self._take_stored(pipeline, data_sets)
        found = found or [*map(take_bad_rows, self._encode(pipeline, *data_sets, **options))]
        for name, given, (rows, bad) in zip(("training", "evaluation"), data_sets, found, strict=True):
            num, kept = (0 if one is None else len(one) for one in (given, rows))
            if kept < num:
                self._report_left_out(pipeline.args, name, num - kept, num, bad)
        return [rows for rows, _ in found]

    @failing_together()
    def _take_stored(self, pipeline: Any, data_sets: Sequence[Any]) -> list[KeptRows] | None:
        """
        Return data sets with their stored lengths, and their bad rows; None if any rank has no
        stored lengths for them.
        """
        arguments, rows, reason = pipeline.args, None, ""
        others = (arguments.cached_dataset, arguments.cached_val_dataset, arguments.predict_with_generate)
        if self.take_stored is None or not arguments.packing or arguments.truncation_strategy == "split" or any(others):
            return None
        try:
            rows = self.take_stored(pipeline, data_sets)
        except (PackplanError, OSError) as error:  # each rank has to reach the next line
            reason = "" if isinstance(error, NotBuiltError) else str(error)
        found = gather_from_ranks((rows is not None, reason))
        if not all(fits for fits, _ in found):
            if reason := next((text for _, text in found if text), ""):
                report(f"warning: all rows are measured again: {reason}")
            return None
        report(f"no row is measured: the lengths of all rows are stored below {arguments.packplan_output_dir}")
        pipeline._save_val_dataset(data_sets[1])  # noqa: SLF001  # no public name
        return rows

    def _report_left_out(self, arguments: Any, name: str, number: int, num_rows: int, bad: Sequence[BadRecord]) -> None:
        """
        Print the number of rows left out, by reason; DataSetError if their share exceeds
        `max_left_out`.
        """
        unknown = f"they exceed --max_length ({arguments.max_length:,}), or cannot be encoded"
        text = f"ms-swift leaves out {number:,} of {counted(num_rows, 'row')} of {name} ({number / num_rows:.1%})"
        text = format_lines(text, failure_lines(bad) if bad else [unknown])
        text += "\nTo list them, run packplan plan build with this command, and then packplan plan show --all"
        if arguments.packing and name == "training" and 100 * number > round(100 * self.max_left_out, 6) * num_rows:
            percent = math.ceil(100 * number / num_rows)
            raise DataSetError(f"{text}. To leave them out, pass --allow-left-out {percent} to packplan plugin swift")
        report(f"warning: {text}")

    @failing_together()
    def pack(self, pipeline: Any, data_sets: list[Any]) -> list[Any]:
        """
        Return each data set as `PlannedPacks`, or unpacked if `--packing` is not set.

        Raises:
            DataSetError: No row is left, or the plan's checksum differs from `checksum`.
            ArgumentError: No row has a supervised token.
        """
        packed = self._pack(pipeline, data_sets)
        packs: PlannedPacks | None = packed[0]
        if packs is None:
            raise DataSetError("no row is left to train: all are too long (raise --max_length), or cannot be encoded")
        if not pipeline.args.packing:
            return packed
        require_supervised_rows(packs.facts.num_supervised)
        if text := describe_long_samples(packs.plan.raw, packs.plan.lengths, "--packing_length"):
            report(f"warning: {text}")
        found = plan_checksum(packs.plan.packs, lengths=packs.plan.lengths)
        if self.checksum not in (None, found):
            fact = f"the checksum of packs and lengths is {found[:12]} instead of {self.checksum[:12]}"
            changes = self.find_changes(pipeline) if self.find_changes else []
            why = "; ".join(changes) or "data or arguments have changed"
            raise DataSetError(f"{fact}, since {why}: run packplan plugin swift again")
        return packed

    def train(self, pipeline: Any, trainer: Any) -> Any:
        """Train the packs and print the plan; without packing, train the trainer's own batches."""
        if not pipeline.args.packing:
            return self._train_unpadded(pipeline, trainer)
        shares: dict[str, Any] = {"row_ranks": row_ranks(pipeline.args), "degrees": self.degrees}
        schedule = follow_plan(trainer, attn_impl=pipeline.args.attn_impl, **shares, check=self.check)
        result = self._train(pipeline, trainer)
        report(f"trained the plan up to step {trainer.state.global_step:,} of {schedule.total_steps:,}")
        return result

    def _train_unpadded(self, pipeline: Any, trainer: Any) -> Any:
        """Train the trainer's own batches, and print the number of padding positions left out."""
        counts = [hooks.counts for hooks in unpad_models(pipeline)]
        kind, models = unplanned_rlhf(pipeline.args), counted(len(counts), "model")
        report(f"{kind} trains its own batches, without a plan; {models} will compute no padding")
        result = self._train(pipeline, trainer)
        real, padded = sum(one.real for one in counts), sum(one.padded for one in counts)
        report(f"rank 0 computed {real:,} of {counted(padded, 'position')}; the others were padding")
        return result


def report(text: str) -> None:
    """Print lines on rank 0, whatever the log level of ms-swift."""
    if is_master():
        print(fit_lines(f"packplan: {name_arguments(text)}"), flush=True)
