"""A trainer of transformers that trains the packs of a plan, as its schedule orders them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from accelerate.utils import gather_object
from transformers import DataCollatorWithPadding, default_data_collator

from packplan.adapters.hf.attention import separate_samples
from packplan.adapters.hf.following import FollowsSchedule
from packplan.adapters.hf.refusals import refuse
from packplan.adapters.loaders.positions import positions_of
from packplan.adapters.loaders.rows import BY_TOKEN, IGNORED_LABEL, PackInputs, Row, RowsOfPacks, learned
from packplan.core.errors import ArgumentError, MismatchError
from packplan.core.schedule import EpochSchedule
from packplan.core.surface import Plan


def use_plan(trainer: Any, plan: Plan, *, eval_plan: Plan | None = None) -> EpochSchedule:
    """
    Let a trainer train the packs of a plan, and return its schedule.

    A batch is one pack. `gradient_accumulation_steps`, `num_train_epochs`, `max_steps`, `data_seed`
    (else `seed`) and `dataloader_drop_last` of the trainer's arguments decide the schedule, which
    has `steps_per_epoch` and `total_steps`. The loss of a step is the mean over its learned tokens,
    over all ranks and batches. Checkpoints are the trainer's own, and resume in the middle of an
    epoch, also on another number of ranks. All rows are read once before the first step: a row that
    is no sample is refused, and a resumed run has to have the same rows. A collator of your own
    makes each row what is trained, without its padding.

    Call it on every rank, after the trainer is built: the model is probed first, see
    `separate_samples`.

    Args:
        trainer: `Trainer` of transformers, or `SFTTrainer` of TRL, whose data sets have tokenized
            rows.
        plan: Plan of the lengths of `trainer.train_dataset`.
        eval_plan: Plan of the lengths of `trainer.eval_dataset`. Evaluation then gives the mean
            over its learned tokens. None leaves evaluation as it is.

    Raises:
        ArgumentError: A setting, a data set or one of its rows stands against it.
        StaleError: A row is not as long as it was planned.
        MismatchError: Ranks have different plans or rows.
        ModelError: The model cannot be shown to keep samples apart.
    """
    if isinstance(trainer, _PlannedTraining):
        raise ArgumentError("host", "the trainer follows a plan already")
    refuse(trainer)
    args, collate = trainer.args, _collate_alone(trainer)
    train_rows = RowsOfPacks(trainer.train_dataset, plan, collate=collate)
    eval_rows = None
    if eval_plan is not None:
        eval_rows = RowsOfPacks(_one_data_set(trainer.eval_dataset), eval_plan, collate=collate)
    data = train_rows.inspect(num_workers=args.dataloader_num_workers).digest
    checksums = gather_object([(plan.checksum, data)])
    if len(set(checksums)) > 1:
        fact = "the ranks have different packs or rows: give all the same rows, in the same order"
        raise MismatchError("ranks_disagree", fact, {"checksums": tuple(checksums)})
    schedule = plan.schedule(
        world_size=args.world_size,
        packs_per_step=args.world_size * args.gradient_accumulation_steps,
        epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        drop_last=args.dataloader_drop_last,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    separate_samples(trainer.model)
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        trainer.compute_loss_func = token_mean
    kind = type(trainer)
    trainer.__class__ = type(f"Planned{kind.__name__}", (_PlannedTraining, kind), {})
    collator = PackInputs(positions_of(trainer.model))
    trainer.follow(schedule, plan.checksum, data=data, train_packs=train_rows, collator=collator, eval_packs=eval_rows)
    return schedule


def token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> Any:
    """
    Return the sum of the losses of the learned tokens, over their number.

    Args:
        outputs: Outputs of a causal language model; `logits` of shape (rows, tokens, vocabulary).
        labels: Shape (rows, tokens).
        num_items_in_batch: Learned tokens of the whole step over all ranks; None for those of
            *labels*.
    """
    logits, targets = outputs["logits"][:, :-1].float(), labels[:, 1:].to(outputs["logits"].device)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / max(1, int(learned(labels) if num_items_in_batch is None else num_items_in_batch))


def _collate_alone(trainer: Any) -> Callable[[Row], Row] | None:
    """Return what makes a row that the trainer would train; None if its collator only pads."""
    collator = trainer.data_collator
    if collator is default_data_collator or type(collator) is DataCollatorWithPadding:
        return None
    return partial(_collated, trainer._get_collator_with_removed_columns(collator, description="training"))  # noqa: SLF001  # has no public name


def _collated(collator: Callable[[list[Row]], Row], row: Row) -> Row:
    """Return a row as a collator makes it, alone and without padding."""
    batch = collator([row])
    mask = batch.get("attention_mask")
    if mask is None:
        return batch
    kept = mask != 0
    return {
        name: value[kept] if name in BY_TOKEN and getattr(value, "shape", None) == kept.shape else value
        for name, value in batch.items()
    }


def _one_data_set(rows: Any) -> Any:
    if rows is None or isinstance(rows, Mapping):
        found = "none" if rows is None else f"{len(rows)} by name"
        raise ArgumentError("host", f"eval_plan is of one eval_dataset, but the trainer has {found}")
    return rows


class _PlannedTraining(FollowsSchedule):
    """A trainer of transformers or TRL; see `FollowsSchedule`."""

    model: Any

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Return the loss of a batch; with a cache, samples would attend to each other."""
        if self._keeps_a_cache:
            inputs = {**inputs, "use_cache": False}
        return super().compute_loss(model, inputs, *args, **options)

    @property
    def _keeps_a_cache(self) -> bool:
        return hasattr(self.model.config.get_text_config(), "use_cache")
