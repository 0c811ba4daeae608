"""Checks that a trainer's settings and loss allow it to train a plan, or to use `balance`."""

import dataclasses
import logging
import os
from collections.abc import Iterator
from importlib.metadata import version
from numbers import Integral
from typing import Any, Literal

from transformers.integrations.deepspeed import deepspeed_config

from packplan.core.batch import count_row_groups
from packplan.core.config.refusals import active_refusals
from packplan.core.errors import ArgumentError, counted
from packplan.core.inspection import describe_long_samples
from packplan.core.lengths import as_whole_number
from packplan.core.schedule import EpochSchedule
from packplan.core.surface import Plan

log = logging.getLogger(__name__)

_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""Losses of GRPO that are sums or means over rows or tokens."""


PREFERENCE = ("DPOTrainer", "KTOTrainer", "RewardTrainer")
"""Trainers of TRL whose loss is a mean over pairs, or over rows, of preference data."""

_COMPARING = {
    "kto": "compares each answer with that of another row (its KL term): set loss_type='apo_zero_unpaired'",
    "aot": "sorts the pairs of a batch against each other: use another loss, such as 'sigmoid'",
    "sft": "is a mean over the tokens of a batch, not over its pairs: use another loss, such as 'sigmoid'",
}
"""Name of a loss that is not a mean over pairs or rows -> clause with the reason and a remedy."""


UNPLANNED_EVALUATION = (
    "the evaluation has no plan, so ranks that share a row would evaluate different rows: pass an eval_plan"
)


def library_class(trainer: Any) -> str | None:
    """
    Return the name of the class of transformers, TRL or ms-swift that a trainer derives from, or
    None.
    """
    libraries = ("transformers.", "trl.", "swift.")
    return next((kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith(libraries)), None)


def _name_in_trl(trainer: Any) -> str | None:
    """
    Return the name of the TRL class that a trainer derives from. Return None for trainers of
    ms-swift, and for trainers that derive from no class of TRL.
    """
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith(("trl.", "swift."))]
    return kinds[0].__name__ if kinds and kinds[0].__module__.startswith("trl.") else None


def is_preference_trainer(trainer: Any) -> bool:
    """Return whether a trainer derives from a trainer of TRL for preference data."""
    return _name_in_trl(trainer) in PREFERENCE


def require_trainer(trainer: Any) -> None:
    """Raise ArgumentError unless *trainer* is a trainer whose batches a plan can replace."""
    if not hasattr(trainer, "get_train_dataloader") or isinstance(trainer, type):
        kind = type(trainer).__name__
        raise ArgumentError("host", f"use_plan and row_lengths take a trainer of transformers or TRL, not a {kind}")
    if _name_in_trl(trainer) not in {None, "SFTTrainer", *PREFERENCE}:
        fact = f"{type(trainer).__name__} makes batches that no plan can replace: use unpad (with GRPO, also balance)"
        raise ArgumentError("host", fact)


def refuse_misuse(trainer: Any, plan: Any, eval_plan: Any) -> None:
    """
    Refuse arguments of `use_plan` that are no supported trainer, or no plans for its data sets.

    Args:
        trainer: Trainer to check, which may be an object of any type.
        plan: Plan of the training data, or a packing length, to check.
        eval_plan: Plan of the evaluation data, or a packing length, to check; None leaves these
            data unplanned.

    Raises:
        ArgumentError: An argument has a wrong type, or the trainer or its data sets cannot follow a
            plan.
    """
    require_trainer(trainer)
    fact = None
    if isinstance(trainer.eval_dataset, dict) and eval_plan is not None:
        fact = "eval_dataset is a dict of data sets, but eval_plan is for one data set: leave eval_plan out"
    elif trainer.train_dataset is None or (trainer.eval_dataset is None and eval_plan is not None):
        missing = "train_dataset" if trainer.train_dataset is None else "eval_dataset"
        fact = f"the trainer has no {missing}, whose rows would be packed: build the trainer with {missing}=…"
    for name, value in (("plan", plan), ("eval_plan", plan if eval_plan is None else eval_plan)):
        if fact is None and not isinstance(value, (Plan, Integral)):
            fact = (
                f"{name} is of type {type(value).__name__}: pass a whole number of tokens such as 4096, or the "
                "result of packplan.plan(lengths, packing_length)"
            )
        elif fact is None and isinstance(value, Integral):
            as_whole_number(name, value)  # type: ignore[arg-type]  # bools too, which it refuses
    if fact is not None:
        raise ArgumentError("host", fact)


def changed_meanings(args: Any, plan: Plan, schedule: EpochSchedule) -> Iterator[str]:
    """
    Yield a sentence for each setting of a trainer that has another effect, or none, under a plan.

    Long samples, rows that TRL may have truncated, and `eval_steps` without evaluation get a
    sentence too. A value of `save_steps`, `eval_steps` or `warmup_steps` gets a sentence if it is
    not the default and exceeds the schedule's number of steps.

    Args:
        args: Training arguments, before `use_plan` changes them.
        plan: Plan of the training data.
        schedule: Schedule of the plan under these arguments.
    """
    if text := describe_long_samples(plan.raw, plan.lengths, "a packing length of"):
        yield text
    rows, steps = args.per_device_train_batch_size, schedule.total_steps
    if rows > 1:
        yield f"per_device_train_batch_size={rows} trains {rows} packs instead of a batch of {rows} rows: set it to 1"
    limit = getattr(args, "max_length", None)  # an argument of TRL
    if limit and (at_limit := int((plan.lengths == limit).sum())):
        yield f"TRL may have truncated {counted(at_limit, 'row')} to {limit:,} tokens: max_length=None keeps rows whole"
    if args.eval_strategy == "no" and args.eval_steps:
        yield f"eval_steps is {args.eval_steps}, but nothing is evaluated: set eval_strategy to 'steps'"
    defaults = {one.name: one.default for one in dataclasses.fields(args)}
    defaults["eval_steps"] = defaults["logging_steps"]  # used if eval_steps is unset
    when = {"save_steps": args.save_strategy, "eval_steps": args.eval_strategy, "warmup_steps": "steps"}
    for name, number in ((name, getattr(args, name) or 0) for name in when if when[name] == "steps"):
        if number > steps and number != defaults[name]:
            yield f"{name} is {number:,}, but training ends after {counted(steps, 'step')}: lower {name}"


def find_plan_conflicts(trainer: Any, *, row_ranks: int | Literal["auto"], evaluates: bool) -> ArgumentError | None:
    """
    Return an error that names all settings of a trainer that contradict a plan; None if none does.

    Args:
        trainer: Trainer of transformers.
        row_ranks: Number of ranks that share each row, or `auto`.
        evaluates: Whether the evaluation data has a plan too.
    """
    sharing = [*_parallelism_conflicts(trainer), *_row_sharing_conflicts(trainer, row_ranks, evaluates=evaluates)]
    reasons = [*_plan_conflicts(trainer), *_preference_conflicts(trainer, row_ranks), *sharing]
    return ArgumentError("host", f"the trainer would not follow the plan: {'; '.join(reasons)}") if reasons else None


def _plan_conflicts(trainer: Any) -> Iterator[str]:
    """Yield each setting that contradicts a plan, with the reason."""
    args = trainer.args
    for refusal in active_refusals(args, "trainer"):
        yield f"{refusal.setting} is set, which {refusal}"
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in {"random", getattr(type(args), "train_sampling_strategy", "random")}:  # KTO has another default
        yield f"train_sampling_strategy is {strategy!r}, which makes its own batches: leave it out"
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        yield f"{started} processes were started, but the trainer uses {args.world_size}: on a CPU, set use_cpu=True"
    if args.world_size > 1 and not (args.average_tokens_across_devices or is_preference_trainer(trainer)):
        yield "average_tokens_across_devices is off, so ranks with few tokens would count as much as others: turn it on"


def _preference_conflicts(trainer: Any, row_ranks: int | Literal["auto"]) -> Iterator[str]:
    """Yield each setting of a preference trainer that plans do not support, with the reason."""
    if not is_preference_trainer(trainer):
        return
    losses = getattr(trainer.args, "loss_type", None) or []
    for loss in [losses] if isinstance(losses, str) else losses:
        if why := _COMPARING.get(loss.removesuffix("_unpaired")):
            yield f"loss_type is {loss!r}, which {why}"
    for name in ("use_liger_kernel", "generate_during_eval"):
        if getattr(trainer.args, name, False):
            yield f"{name} is set, which was not tested with plans of preference data: leave it out"
    if row_ranks != 1:
        yield "sequence_parallel_size is set, but ranks cannot share rows of preference data: leave it out"


def _row_sharing_conflicts(trainer: Any, row_ranks: int | Literal["auto"], *, evaluates: bool) -> Iterator[str]:
    """Yield reasons why the ranks of a trainer cannot share rows."""
    try:
        count_row_groups(trainer.args.world_size, 1 if row_ranks == "auto" else row_ranks)
    except ArgumentError as error:
        yield error.fact
    if row_ranks != 1 and trainer.args.eval_strategy != "no" and trainer.eval_dataset is not None and not evaluates:
        yield UNPLANNED_EVALUATION
    if row_ranks != 1 and getattr(trainer, "compute_metrics", None) is not None:
        yield "compute_metrics is set, which would count a row once for each rank that shares it: leave it out"


def _parallelism_conflicts(trainer: Any) -> Iterator[str]:
    """Yield each setting by which one process trains on several GPUs, or ranks share rows."""
    if trainer.args.n_gpu > 1:
        num = trainer.args.n_gpu
        yield f"one process trains on {num} GPUs: start one for each with torchrun --nproc-per-node {num}"
    sharing = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(sharing, name, None) or 1) > 1:
            yield f"parallelism_config.{name} is {size}, so ranks share rows: leave it out"


def warn_of_unclipped_gradients(args: Any, section: str) -> None:
    """
    Warn if DeepSpeed clips no gradients although `max_grad_norm` is set.

    Args:
        args: Training arguments.
        section: Section of the YAML in which the user sets these arguments.
    """
    if args.deepspeed and args.max_grad_norm and not deepspeed_config().get("gradient_clipping"):
        log.warning("gradients are not clipped, though %s.max_grad_norm is %s: set gradient_clipping to auto in the "
                    "file of %s.deepspeed", section, args.max_grad_norm, section)  # fmt: skip


def is_old_trl() -> bool:
    """Return whether TRL is older than 1.0; such versions divide and log some means differently."""
    return int(version("trl").partition(".")[0]) < 1


def refuse_balance_conflicts(trainer: Any) -> None:
    """
    Refuse a trainer whose loss would change if `balance` divided its batches.

    Raises:
        ArgumentError: The trainer is not TRL's `GRPOTrainer` or `RLOOTrainer` with its own loss, or
            some settings are not supported; the message names all of them.
    """
    kind = type(trainer)
    named = (one for one in kind.__mro__ if one.__name__ in {"GRPOTrainer", "RLOOTrainer"})
    base = next((one for one in named if one.__module__.startswith("trl.")), None)  # ms-swift has the same names
    methods = ("compute_loss", "_compute_loss")
    if base is None or any(getattr(kind, name, None) is not getattr(base, name, None) for name in methods):
        fact = f"balance takes TRL's GRPOTrainer or RLOOTrainer with its own loss, not a {kind.__name__}: use unpad"
        raise ArgumentError("host", fact)
    if reasons := [*_loss_conflicts(trainer), *_parallelism_conflicts(trainer)]:
        raise ArgumentError("host", f"balance cannot divide the trainer's batches: {'; '.join(reasons)}")


def _loss_conflicts(trainer: Any) -> Iterator[str]:
    """Yield each setting under which a batch's loss is not a sum over its rows or tokens."""
    args = trainer.args
    loss = getattr(args, "loss_type", None)
    if loss is not None and loss not in _LOSSES:
        yield f"loss_type is {loss!r}, but balance supports only {', '.join(_LOSSES)}"
    by_sequence = getattr(args, "importance_sampling_level", None) == "sequence"
    if loss == "luspo" and is_old_trl() and not (by_sequence and not trainer.beta):
        yield "loss_type is 'luspo', whose mean counts padding: set importance_sampling_level='sequence' and beta=0"
    for refusal in active_refusals(args, "balance"):
        yield f"{refusal.setting} is set, which {refusal}"
    if getattr(args, "top_entropy_quantile", 1.0) < 1:
        yield "top_entropy_quantile is below 1, which compares the tokens of a whole batch: set it to 1.0"
    weight = getattr(trainer, "router_aux_loss_coef", 0)
    if weight and getattr(trainer, "aux_loss_enabled", False):
        yield f"router_aux_loss_coef is {weight}, whose loss compares the tokens of a whole batch: set it to 0"
