"""`use_plan`: a trainer of transformers or TRL trains the packs of a plan by its schedule."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from transformers import DataCollatorWithPadding, Trainer, default_data_collator

from packplan.adapters.attention.shared_rows import new_row_group
from packplan.adapters.hf.following import ServesPacks, describe_training, insert_base_class, require_same_rows
from packplan.adapters.hf.packed_calls import HOOKED, Unpadding
from packplan.adapters.hf.refusals import changed_meanings, refuse_misuse, refuse_plan_conflicts
from packplan.adapters.hf.unpad import is_bidirectional, unpad, unwrap
from packplan.adapters.loaders.rows import (
    Collate,
    PackInputs,
    RowsOfPacks,
    count_supervised,
    pad_rows,
    token_type_columns,
)
from packplan.adapters.models import replace_attributes
from packplan.core.batch import IGNORED_LABEL, count_row_groups, resolve_accumulation
from packplan.core.errors import ArgumentError, ModelError
from packplan.core.schedule import EpochSchedule
from packplan.core.surface import Plan

log = logging.getLogger(__name__)


def use_plan(
    trainer: Any, plan: Plan, *, eval_plan: Plan | None = None, sequence_parallel_size: int = 1, check: bool = True
) -> EpochSchedule:
    """
    Make a trainer train the packs of a plan, and return the plan's epoch schedule.

    A batch is one pack: its samples, padded by the trainer's own collator, which the model computes
    without padding (see `unpad`). A step has as many packs as it had rows: with a
    `per_device_train_batch_size` of 8, eight packs are accumulated. This argument,
    `gradient_accumulation_steps`, `num_train_epochs`, `max_steps`, `data_seed` (else `seed`) and
    `dataloader_drop_last` decide the schedule, which has `steps_per_epoch` and `total_steps`.
    Settings that mean something else under a plan are logged as warnings.

    The loss of a step is the mean over its supervised tokens, over all ranks and batches.
    Checkpoints are the trainer's own, and resume in the middle of an epoch, also on another number
    of ranks. All rows are read once before the first step: a row that is not one sample is refused,
    and a resumed run has to have the same rows.

    Call it on every rank, after the trainer is built: the model is probed first.

    Args:
        trainer: `Trainer` of transformers, or `SFTTrainer` of TRL. Its data sets have tokenized
            rows, or rows that its collator tokenizes.
        plan: Plan of the lengths of `trainer.train_dataset`, as its collator makes them.
        eval_plan: Plan of the lengths of `trainer.eval_dataset`. Evaluation then gives the mean
            over its supervised tokens. None leaves evaluation as it is.
        sequence_parallel_size: Ranks that share each row of packed samples, one after the other.
        check: Compare the first pack with its samples alone, before the first step: the trainer's
            loss, and gradients of embeddings. `unpad` compares first calls too. Training goes on
            bit by bit as without.

    Raises:
        ArgumentError: The trainer trains no rows of a plan, a setting contradicts the plan, or a
            row is not one sample.
        StaleError: A row has another length than planned.
        MismatchError: Ranks have different plans or rows. In training: the first pack trains
            otherwise than its samples alone.
        ModelError: The probe of `unpad` fails.
    """
    if isinstance(trainer, _PlannedTraining):
        raise ArgumentError("host", "the trainer follows a plan already")
    refuse_misuse(trainer, plan, eval_plan)
    refuse_plan_conflicts(trainer, row_ranks=sequence_parallel_size, evaluates=eval_plan is not None)
    args, collate = trainer.args, _find_row_collator(trainer)
    train_rows = RowsOfPacks(trainer.train_dataset, plan, collate=collate)
    eval_rows = None
    if eval_plan is not None:
        eval_rows = RowsOfPacks(trainer.eval_dataset, eval_plan, collate=collate)
    data = train_rows.inspect(num_workers=args.dataloader_num_workers).digest
    require_same_rows(plan, data)
    world_size = count_row_groups(args.world_size, sequence_parallel_size)
    batch = resolve_accumulation(
        effective_batch_size=None,
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        world_size=world_size,
    )
    schedule = plan.schedule(
        world_size=world_size,
        packs_per_step=batch.effective_batch_size,
        epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        drop_last=args.dataloader_drop_last,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    unpadding = _unpad_for_loss(trainer, row_ranks=sequence_parallel_size, check=check)
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        trainer.compute_loss_func = token_mean
    for line in changed_meanings(args, plan, schedule):
        log.warning("%s", line)
    trainer._train_batch_size = args.per_device_train_batch_size = 1  # noqa: SLF001  # has no public name
    args.gradient_accumulation_steps = batch.gradient_accumulation_steps
    insert_base_class(trainer, _PlannedTraining)
    collator = PackInputs(collate or partial(pad_rows, types=token_type_columns(trainer.model)))
    trainer.unpadding, trainer.native, trainer.row_group = unpadding, unpadding.native, unpadding.group
    trainer.serve(schedule, plan, data, packs=train_rows, collator=collator, eval_packs=eval_rows, check=check)
    log.info("%s", describe_training(plan, schedule))
    return schedule


def token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> Any:
    """
    Return a batch's part of the mean loss over a step's supervised tokens.

    Args:
        outputs: Outputs of a causal language model; `logits` of shape (rows, tokens, vocabulary).
        labels: Labels of shape (rows, tokens).
        num_items_in_batch: Supervised tokens of the whole step over all ranks; None for those of
            *labels*.
    """
    logits, targets = outputs["logits"][:, :-1].float(), labels[:, 1:].to(outputs["logits"].device)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / max(1, int(count_supervised(labels) if num_items_in_batch is None else num_items_in_batch))


def _find_row_collator(trainer: Any) -> Collate | None:
    """Return the collator of a trainer; None for transformers' defaults, which pad no labels."""
    collator = trainer.data_collator
    if collator is default_data_collator or type(collator) is DataCollatorWithPadding:
        return None
    return trainer._get_collator_with_removed_columns(collator, description="training")  # type: ignore[no-any-return]  # noqa: SLF001  # has no public name


def _unpad_for_loss(trainer: Any, *, row_ranks: int, check: bool) -> Unpadding:
    """
    Return a trainer's hooks, or new ones, which omit logits of padding for transformers' own loss.

    Raises:
        ModelError: The model is bidirectional, or the probe of `unpad` fails.
    """
    model = unwrap(trainer.model)
    if is_bidirectional(model.config):
        raise ModelError("probe", f"{model.config.model_type} reads both ways, but a plan trains what follows")
    group = new_row_group(row_ranks, trainer.args.ddp_timeout_delta) if row_ranks > 1 else None
    default_loss = type(trainer).compute_loss is Trainer.compute_loss
    hooked = (HOOKED[module] for module in model.modules() if module in HOOKED)
    return next(hooked, None) or unpad(model, logits=not default_loss, group=group, check=check)


class _PlannedTraining(ServesPacks):
    """Methods of a trainer of transformers or TRL that trains planned packs."""

    unpadding: Unpadding

    @contextmanager
    def prepared(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield inputs as the trainer prepares them; calls inside the block are not counted."""
        with self.unpadding.trial(), super().prepared(inputs) as prepared:
            yield prepared

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Let samples be computed alone, without hooks."""
        with self.unpadding.paused(), super().reference():
            yield

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Return the loss of a batch, computed without a cache, which would mix its samples."""
        if self._has_use_cache:
            inputs = {**inputs, "use_cache": False}
        return super().compute_loss(model, inputs, *args, **options)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, **options: Any) -> Any:  # noqa: FBT001  # the trainer passes it
        """Return loss, logits and labels of a batch; those of a pack as one row of real tokens."""
        if self._evaluated is None:
            return super().prediction_step(model, inputs, prediction_loss_only, **options)
        mask = inputs.get("attention_mask")
        with replace_attributes(self.unpadding, omits_eval_logits=prediction_loss_only):
            outputs = super().prediction_step(model, inputs, prediction_loss_only, **options)
        return outputs if mask is None else _flatten_rows(outputs, mask.bool())

    @property
    def _has_use_cache(self) -> bool:
        return hasattr(self.model.config.get_text_config(), "use_cache")


def _flatten_rows(value: Any, mask: torch.Tensor) -> Any:
    """Return values of shape (rows, positions, …) as one row of real tokens; others unchanged."""
    if isinstance(value, tuple):
        return tuple(_flatten_rows(one, mask) for one in value)
    has_rows = isinstance(value, torch.Tensor) and value.shape[:2] == mask.shape
    return value[mask.to(value.device)][None] if has_rows else value
