"""Trainers of ms-swift that train a plan's packs, or their own batches without padding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from swift.trainers import Seq2SeqTrainer

from packplan.adapters.attention import NAME
from packplan.adapters.attention.packed_row import prepend_text_positions
from packplan.adapters.hf.following import ServesPacks, insert_base_class, require_same_on_ranks, share_packs
from packplan.adapters.hf.packed_calls import Unpadding
from packplan.adapters.hf.refusals import find_plan_conflicts
from packplan.adapters.hf.unpad import separate_samples, unpad
from packplan.adapters.proof.steps import failing_together
from packplan.adapters.swift.packs import PackCollator, PlannedPacks
from packplan.adapters.vision_tower import SEEING
from packplan.core.align import align_plan
from packplan.core.batch import count_row_groups, pack_degrees
from packplan.core.config.identity import PREFERENCE_ARGUMENTS
from packplan.core.schedule import EpochSchedule
from packplan.core.surface import Plan

_MODELS = ("model", "ref_model", "reward_model", "value_model", "teacher_model")
"""Attributes of an ms-swift pipeline that hold a model or a list of models."""


@failing_together()
def follow_plan(
    trainer: Any, *, attn_impl: str | None, row_ranks: int, degrees: int | Literal["auto"] = 1, check: bool = True
) -> EpochSchedule:
    """
    Make a trainer of ms-swift train the packs of its data set; return their epoch schedule.

    Args:
        trainer: Trainer whose training data are `PlannedPacks`.
        attn_impl: `--attn_impl` of the command. None takes the fastest attention that passes the
            probe.
        row_ranks: Number of consecutive ranks that share each row.
        degrees: See `make_schedule`.
        check: Whether the first pack is compared with its samples alone, before the first step.

    Raises:
        ArgumentError: A setting contradicts the plan.
        MismatchError: Ranks have different arguments, plans or rows. Training also raises this
            error if loss or gradients of the first pack differ from those of its samples alone.
        ModelError: The probe fails: samples of a row influence each other.
    """
    packs, eval_packs, sharing = trainer.train_dataset, _eval_packs(trainer), row_ranks if degrees == 1 else degrees
    fault = find_plan_conflicts(trainer, row_ranks=sharing, evaluates=eval_packs is not None)
    digest = packs.facts.digest
    require_same_on_ranks(trainer.args, {"plan": packs.plan.checksum[:12], "rows": digest[:12]}, fault)
    world_size = count_row_groups(trainer.args.world_size, row_ranks)
    schedule = make_schedule(packs.plan, trainer.args, world_size=world_size, degrees=degrees)
    groups, eval_degrees = share_packs(trainer, schedule, packs.plan, None if eval_packs is None else eval_packs.plan)
    # Heads of other tasks pool each sample of a row, so no logits of tokens can be compared.
    ready = trainer.task_type == "causal_lm" and not trainer.is_fsdp_enabled
    for model in (getattr(trainer, "ref_model", None), trainer.model):
        if model is not None:
            inner, named = trainer.accelerator.unwrap_model(model), NAME if attn_impl is None else None
            attention = separate_samples(inner, named=named, ready=ready, groups=groups)
    insert_base_class(trainer, _PlannedSwiftTraining)
    trainer.native, trainer.row_groups = attention.native, groups
    compares = hasattr(trainer, "calculate_KL")  # KTO, within a pack
    trainer.loss_of_samples = "" if compares else {"causal_lm": "sum", "seq_cls": "mean"}.get(trainer.task_type, "")
    served: dict[str, Any] = {"packs": packs, "eval_packs": eval_packs, "eval_degrees": eval_degrees}
    trainer.serve(schedule, packs.plan, digest, **served, collator=PackCollator(trainer.data_collator), check=check)
    return schedule


def unpad_models(pipeline: Any) -> list[Unpadding]:
    """
    Make each model of an ms-swift pipeline skip padding; return the hooks of each model.

    Raises:
        ModelError: The probe of a model fails.
    """
    found = [getattr(pipeline, name, None) for name in _MODELS]
    models = {one: None for held in found for one in (held if isinstance(held, list) else [held]) if one is not None}
    SEEING.update(part for model in models for part in model.modules())  # ms-swift adds images to calls without any
    return [unpad(model) for model in models]


def make_schedule(plan: Plan, args: Any, *, world_size: int, degrees: int | Literal["auto"] = 1) -> EpochSchedule:
    """
    Return the schedule of a plan under ms-swift's training arguments.

    Args:
        plan: Plan of the training rows.
        args: Training arguments of any trainer of ms-swift.
        world_size: Number of data-parallel ranks: processes, or groups of processes that share each
            row.
        degrees: Maximum number of ranks that share a long pack, as in `Plan.schedule`.

    Raises:
        ArgumentError: *degrees* is not a power of two that divides the number of ranks, or dropping
            the remainder would leave no batch.
    """
    tokens = None if degrees == 1 else plan.packs.loads(plan.lengths)
    aligned = align_plan(
        plan.raw, world_size=world_size, dataloader_drop_last=args.dataloader_drop_last,
        batch_size=args.per_device_train_batch_size, tokens=tokens, max_degree=None if degrees == "auto" else degrees,
        degrees=None if tokens is None else pack_degrees(tokens, plan.raw.packing_length),
    )  # fmt: skip
    return EpochSchedule.from_plan(
        aligned, gradient_accumulation_steps=args.gradient_accumulation_steps, num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps, seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=args.train_dataloader_shuffle,
    )  # fmt: skip


def _eval_packs(trainer: Any) -> PlannedPacks | None:
    """
    Return the evaluation packs; None if there are none, or if the trainer is not a Seq2SeqTrainer.
    """
    packs = trainer.eval_dataset
    return packs if isinstance(trainer, Seq2SeqTrainer) and isinstance(packs, PlannedPacks) else None


class _PlannedSwiftTraining(ServesPacks):
    """Mixin that makes a trainer of ms-swift load and train planned packs."""

    fixed_arguments = PREFERENCE_ARGUMENTS
    loads_by_class = True
    template: Any

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return prepend_text_positions(super()._prepare_inputs(inputs))  # type: ignore[misc]  # of the trainer's class

    @contextmanager
    def prepared(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """
        Yield the inputs after the trainer's preparation, while the hooks of its template are
        active.
        """
        with self.template.forward_context(self.model, inputs), super().prepared(inputs) as prepared:
            yield prepared
