"""Installs plans into ms-swift, from the file that `--external_plugins` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import swift
from swift.arguments import SftArguments
from swift.pipelines.train import sft
from swift.utils import is_master

from packplan.adapters.swift.packs import PlannedPacks
from packplan.adapters.swift.refusals import refuse_arguments, refuse_others, refuse_version
from packplan.adapters.swift.training import follow
from packplan.core.errors import DataSetError, counted


def install(*, planned: Mapping[str, Any] | None = None, any_version: bool = False) -> None:
    """
    Let `swift sft`, `swift pt` and `swift rlhf --rlhf_type dpo` train planned packs.

    Nothing changes for other commands, such as `swift infer`, which read the name of the plugin in
    a checkpoint.

    Args:
        planned: Plan that the command has to have, as `packplan plugin swift` writes it: `flags`,
            `ranks` and `checksum`. None takes the plan of whatever the command has.
        any_version: Try a version of ms-swift that the plugin was not shown with.

    Raises:
        ConfigError: ms-swift is of such a version.
    """
    if not any_version:
        refuse_version(swift.__version__)
    if sft.PackingDataset is PlannedPacks:
        return
    train, encode = sft.SwiftSft.train, sft.SwiftSft._encode_dataset  # noqa: SLF001  # has no public name

    def check(arguments: Any) -> None:
        refuse_arguments(arguments)
        if planned is not None:
            refuse_others(arguments, flags=planned["flags"], ranks=planned["ranks"])
        arguments.padding_free = True

    def encode_counted(pipeline: Any, *data_sets: Any, **options: Any) -> Any:
        before = [0 if rows is None else len(rows) for rows in data_sets]
        encoded = encode(pipeline, *data_sets, **options)
        after = [0 if rows is None else len(rows) for rows in encoded]
        for name, num, kept in zip(("training", "evaluation"), before, after, strict=True):
            if kept < num and is_master():
                of = f"{num - kept:,} of {counted(num, 'row')} of {name}"
                print(f"packplan: ms-swift left out {of}: longer than --max_length, or not to be encoded", flush=True)
        return encoded

    def train_planned(pipeline: Any, trainer: Any) -> Any:
        found = trainer.train_dataset.plan.checksum
        if planned is not None and found != planned["checksum"]:
            fact = (
                f"the data have changed since they were planned: their plan is {found[:12]} instead of "
                f"{planned['checksum'][:12]}, though all arguments are the same"
            )
            raise DataSetError(fact)
        follow(trainer, attn_impl=pipeline.args.attn_impl)
        return train(pipeline, trainer)

    SftArguments._check_padding_free = check  # noqa: SLF001  # demands flash attention, where none is needed
    sft.PackingDataset = PlannedPacks
    sft.SwiftSft._encode_dataset = encode_counted  # noqa: SLF001
    sft.SwiftSft.train = train_planned
