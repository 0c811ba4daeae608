"""Installs plans into ms-swift, from the file that `--external_plugins` names."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import swift
from swift.arguments import SftArguments
from swift.pipelines.train import sft
from swift.utils import is_master

from packplan.adapters.loaders.rows import refuse_unlearned
from packplan.adapters.swift.command import own_type, refuse_arguments, refuse_version, row_ranks
from packplan.adapters.swift.packs import AddFacts, PlannedPacks
from packplan.adapters.swift.training import follow, unpad_models
from packplan.core.checksum import plan_checksum
from packplan.core.errors import DataSetError, PackplanError, counted
from packplan.core.surface import Plan


def install(*, checksum: str | None = None, any_version: bool = False) -> None:
    """
    Let `swift sft`, `swift pt` and `swift rlhf --rlhf_type dpo` train plans.

    Other types of `swift rlhf` train their own batches, whose padding no model of theirs computes.
    Nothing changes for other commands, such as `swift infer`, which read the name of the plugin in
    a checkpoint.

    Args:
        checksum: Checksum of the plan that the command has to have, as `packplan plugin swift`
            writes it. None takes the plan of whatever the command has.
        any_version: Try a version of ms-swift that the plugin was not tested with.

    Raises:
        ConfigError: ms-swift is of such a version.
    """
    if not any_version:
        refuse_version(swift.__version__)
    if sft.PackingDataset is PlannedPacks:
        return
    pipeline: Any = sft.SwiftSft
    plan = _Planning(checksum, pipeline.train, pipeline._encode_dataset, pipeline._post_process_datasets)  # noqa: SLF001  # no public names
    sft.PackingDataset, sft.AddLengthPreprocessor = PlannedPacks, AddFacts
    SftArguments._check_padding_free = _method(plan.check)  # noqa: SLF001  # ms-swift's own demands flash attention
    SftArguments._init_stream = _method(partial(_replace_padding_free, SftArguments._init_stream))  # noqa: SLF001
    pipeline._encode_dataset, pipeline._post_process_datasets = _method(plan.encode), _method(plan.pack)  # noqa: SLF001
    pipeline.train = _method(plan.train)


def _method(step: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return a function that a class hands its objects to, which it does not do with a method.

    An error of ours ends the process with its message alone: it is about the command.
    """

    def method(*given: Any, **options: Any) -> Any:
        try:
            return step(*given, **options)
        except PackplanError as error:
            message = f"packplan: {error}"
            raise SystemExit(message) from error

    return method


def _replace_padding_free(resolve: Callable[[Any], None], arguments: Any) -> None:
    """
    Take planned packs in the place of `--padding_free`, before ms-swift resolves what depends on
    packing; types that train their own batches compute no padding anyway.
    """
    if arguments.padding_free and own_type(arguments) is None and not arguments.packing:
        arguments.packing = True
        size = arguments.per_device_train_batch_size
        tell(f"planned packs replace --padding_free: --per_device_train_batch_size {size} counts packs, not samples")
    arguments.padding_free = False
    resolve(arguments)


@attrs.frozen
class _Planning:
    """Steps of ms-swift's pipeline, with a plan."""

    checksum: str | None
    """See `install`."""

    _train: Callable[[Any, Any], Any]
    """ms-swift's own steps."""

    _encode: Callable[..., Any]

    _pack: Callable[[Any, list[Any]], list[Any]]

    def check(self, arguments: Any) -> None:
        """Refuse arguments that stand against the plan."""
        refuse_arguments(arguments)
        arguments.padding_free = arguments.packing

    def encode(self, pipeline: Any, *data_sets: Any, **options: Any) -> Any:
        """Measure the rows, and tell how many ms-swift leaves out."""
        before = [0 if rows is None else len(rows) for rows in data_sets]
        encoded = self._encode(pipeline, *data_sets, **options)
        after = [0 if rows is None else len(rows) for rows in encoded]
        for name, num, kept in zip(("training", "evaluation"), before, after, strict=True):
            if kept < num:
                of = f"{num - kept:,} of {counted(num, 'row')} of {name}"
                tell(f"ms-swift left out {of}: longer than --max_length, or not to be encoded")
        return encoded

    def pack(self, pipeline: Any, data_sets: list[Any]) -> list[Any]:
        """
        Plan the packs of each data set.

        Raises:
            DataSetError: They are not those that were planned. ArgumentError: Nothing is learned.
        """
        packed = self._pack(pipeline, data_sets)
        packs: PlannedPacks | None = packed[0]
        if packs is None:
            message = "no row is left to train: all are longer than --max_length, or cannot be encoded"
            raise DataSetError(message)
        if not pipeline.args.packing:
            return packed
        refuse_unlearned(packs.facts.learned)
        found = plan_checksum(packs.plan.packs, lengths=packs.plan.lengths)
        if self.checksum not in (None, found):
            message = f"the plan is {found[:12]}, but {self.checksum[:12]} was planned: data or arguments have changed"
            raise DataSetError(message)
        return packed

    def train(self, pipeline: Any, trainer: Any) -> Any:
        """Train the packs by their schedule, and tell its steps before the first; see `install`."""
        if not pipeline.args.packing:
            return self._train_unpadded(pipeline, trainer)
        schedule = follow(trainer, attn_impl=pipeline.args.attn_impl, row_ranks=row_ranks(pipeline.args))
        steps = f"{counted(schedule.steps_per_epoch, 'step')} an epoch, {schedule.total_steps:,} in all"
        ranks = counted(schedule.world_size, "rank" if row_ranks(pipeline.args) == 1 else "group")
        tell(f"{plan_line(trainer.train_dataset.plan)}; {steps} on {ranks}")
        return self._train(pipeline, trainer)

    def _train_unpadded(self, pipeline: Any, trainer: Any) -> Any:
        """Train the trainer's own batches, and tell how many positions were left out."""
        counts = [hooks.counts for hooks in unpad_models(pipeline, trainer)]
        models = counted(len(counts), "model")
        tell(f"{own_type(pipeline.args)} trains its own batches, without a plan; {models} will compute no padding")
        result = self._train(pipeline, trainer)
        real, padded = sum(one.real for one in counts), sum(one.padded for one in counts)
        tell(f"rank 0 computed {real:,} of {counted(padded, 'position')}; the others were padding")
        return result


def plan_line(plan: Plan) -> str:
    """Return samples, packs, fill and digest of a plan, in a line."""
    packs, fill = counted(len(plan.packs), "pack"), f"{plan.raw.fill:.2%} full"
    return f"{counted(plan.raw.num_samples, 'sample')} in {packs} ({fill}, plan {plan.checksum[:12]})"


def tell(text: str) -> None:
    """Print a line on one rank, whatever ms-swift logs."""
    if is_master():
        print(f"packplan: {text}", flush=True)
