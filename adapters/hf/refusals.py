"""Settings of a trainer under which it would not train a plan as it stands: refused by name."""

import os
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from torch.utils.data import IterableDataset

from packplan.core.errors import ArgumentError

_DRAWS = "draws batches by itself"

_SETTINGS = MappingProxyType(
    {
        "group_by_length": _DRAWS,
        "packing": "packs the rows before the plan",
        "eval_packing": "packs the rows before the plan",
        "auto_find_batch_size": "changes the batch size, but a batch is one pack",
        "ignore_data_skip": "lets a resumed run train packs twice",
    }
)
"""Arguments of a trainer that have to be off -> what they would do. Not every version has each."""


def refuse(trainer: Any) -> None:
    """
    Check that a trainer will follow a plan.

    Raises:
        ArgumentError: A setting or the data set stands against it; all are named.
    """
    if reasons := [*_of_rows(trainer.train_dataset), *_of_settings(trainer.args), *_of_ranks(trainer)]:
        raise ArgumentError("host", f"the trainer would not follow the plan: {'; '.join(reasons)}")


def _of_rows(rows: Any) -> Iterator[str]:
    if rows is None:
        yield "train_dataset is missing"
    elif isinstance(rows, IterableDataset) or not hasattr(rows, "__len__"):
        yield f"train_dataset is a {type(rows).__name__}, whose order no sampler decides: give rows by index"


def _of_settings(args: Any) -> Iterator[str]:
    for name, reason in _SETTINGS.items():
        if getattr(args, name, False):
            yield f"{name} is set, which {reason}"
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name, None):
            yield f"accelerator_config.{name} is set, which hands the batches of one rank out to all"
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        yield f"train_sampling_strategy is {strategy!r}, which {_DRAWS}"


def _of_ranks(trainer: Any) -> Iterator[str]:
    args = trainer.args
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        yield f"{started} processes were started, but the trainer sees {args.world_size}: on a CPU, set use_cpu=True"
    yield from of_sharing(trainer)
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield "average_tokens_across_devices is off, so ranks with few tokens would weigh as much as others"


def of_sharing(trainer: Any) -> Iterator[str]:
    """Yield what makes one process train on several GPUs, or ranks share rows."""
    if trainer.args.n_gpu > 1:
        yield f"one process trains on {trainer.args.n_gpu} GPUs: start one for each, with torchrun"
    sharing = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(sharing, name, None) or 1) > 1:
            yield f"parallelism_config.{name} is {size}, so ranks share rows"
