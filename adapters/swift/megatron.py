"""
The words of `megatron sft` as those of `swift sft` that have the same rows, packs and steps.

ms-swift resolves Megatron's arguments only where Transformer Engine and a GPU are. What decides the
data has the same names in both; of Megatron's own arguments those of the batch and of the ranks
count, and the others have to exist.
"""

import argparse
import ast
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import swift
from swift.arguments import BaseArguments

from packplan.core.config.refusals import refusals_of
from packplan.core.errors import ConfigError, Fault

_BATCH = {"micro_batch_size": 1, "global_batch_size": 16}
"""Arguments of a step's batch, in packs -> value where the command says none."""

_SHARING = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Arguments that let ranks share a row: only others train different packs."""

_SAME = ("num_train_epochs", "output_dir", "add_version", "train_dataloader_shuffle", "group_by_length")
"""Arguments beside those of data, model and template that mean the same in both commands."""


def as_sft(words: Sequence[str], *, started: int, world_size: int | None) -> tuple[list[str], int]:
    """
    Return the arguments of `swift sft` that a command of `megatron sft` is planned by, and its
    data-parallel ranks.

    Args:
        words: Arguments of `megatron sft`.
        started: Ranks that the command starts; not used if *world_size* is given.
        world_size: Data-parallel ranks; None divides those that are started by those that share a
            row.

    Raises:
        ConfigError: Ranks or batch do not divide, or an argument is refused.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (_BATCH | dict.fromkeys(_SHARING, 1)).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--train_iters", type=int, default=-1)
    own, rest = parser.parse_known_args(words)
    if below := [name for name in (*_BATCH, *_SHARING) if getattr(own, name) < 1]:
        _refuse(f"--{below[0]}", f"is {getattr(own, below[0])}, but has to be at least 1")
    for refusal in refusals_of(own, "plugin"):
        _refuse(f"--{refusal.setting}", str(refusal))
    sharing = own.tensor_model_parallel_size * own.pipeline_model_parallel_size
    if world_size is None:
        world_size, left = divmod(started, sharing)
        if left:
            _refuse("ranks", f"are {started}, which {sharing} that share a model do not divide: start others")
    size, packs = own.micro_batch_size, own.global_batch_size
    if packs % (size * world_size):
        reason = f"is {packs}, which {world_size} data-parallel ranks with batches of {size} do not divide: change it"
        _refuse("--global_batch_size", reason)
    batch = f"--per_device_train_batch_size {size} --gradient_accumulation_steps {packs // (size * world_size)}"
    return [*_shared(rest), *f"{batch} --max_steps {own.train_iters}".split()], world_size


def _shared(words: Sequence[str]) -> list[str]:
    """Return the arguments that `swift sft` has too; ConfigError if one is none of Megatron's."""
    shared, own = {field.name for field in fields(BaseArguments)} | {*_SAME}, _own_names()
    kept, keeps = [], False
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keeps = name in shared
            if not keeps and name not in own:
                _refuse(word, "is no argument of megatron sft: remove it")
        if keeps:
            kept.append(word)
    return kept


def _own_names() -> set[str]:
    """Return the names of Megatron's arguments, from their source: it cannot be imported here."""
    folder = Path(swift.__file__).parent / "megatron" / "arguments"
    sources = [folder / name for name in ("megatron_args.py", "sft_args.py")]
    classes = [node for source in sources for node in ast.parse(source.read_text(encoding="utf-8")).body]
    return {
        field.target.id
        for one in classes
        if isinstance(one, ast.ClassDef)
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _refuse(flag: str, reason: str) -> None:
    raise ConfigError("the command", (Fault(flag, reason),))
