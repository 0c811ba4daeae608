"""Installs plans into ms-swift, from the file that `--external_plugins` names."""

from __future__ import annotations

from typing import Any

import swift
from swift.arguments import SftArguments
from swift.pipelines.train import sft

from packplan.adapters.swift.packs import PlannedPacks
from packplan.adapters.swift.refusals import refuse_arguments, refuse_version
from packplan.adapters.swift.training import follow


def install(*, any_version: bool = False) -> None:
    """
    Let `swift sft`, `swift pt` and `swift rlhf --rlhf_type dpo` train planned packs.

    Nothing changes for other commands, such as `swift infer`, which read the name of the plugin in
    a checkpoint.

    Args:
        any_version: Try a version of ms-swift that the plugin was not shown with.

    Raises:
        ConfigError: ms-swift is of such a version.
    """
    if not any_version:
        refuse_version(swift.__version__)
    if sft.PackingDataset is PlannedPacks:
        return
    train = sft.SwiftSft.train

    def check(arguments: Any) -> None:
        refuse_arguments(arguments)
        arguments.padding_free = True

    def train_planned(pipeline: Any, trainer: Any) -> Any:
        follow(trainer, attn_impl=pipeline.args.attn_impl)
        return train(pipeline, trainer)

    SftArguments._check_padding_free = check  # noqa: SLF001  # demands flash attention, where none is needed
    sft.PackingDataset = PlannedPacks
    sft.SwiftSft.train = train_planned
