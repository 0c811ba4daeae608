"""`use_plan` makes a trainer of transformers or TRL train the packs of a plan."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from transformers import DataCollatorWithPadding, Trainer, default_data_collator

from packplan.adapters.attention import using_native_attention
from packplan.adapters.attention.shared_rows import RowGroups
from packplan.adapters.hf.following import ServesPacks, insert_base_class, require_same_on_ranks, share_packs
from packplan.adapters.hf.packed_calls import HOOKED, Unpadding
from packplan.adapters.hf.pairs import TrainsPairs
from packplan.adapters.hf.refusals import (
    changed_meanings,
    find_plan_conflicts,
    is_preference_trainer,
    refuse_misuse,
    require_trainer,
)
from packplan.adapters.hf.unpad import is_bidirectional, unpad, unwrap
from packplan.adapters.loaders.batches import read_saved_progress
from packplan.adapters.loaders.packs import PackInputs, RowsOfPacks
from packplan.adapters.loaders.rows import (
    FACTS_FILE,
    Collate,
    RowFacts,
    RowSource,
    count_supervised,
    pad_rows,
    require_supervised_rows,
    token_type_columns,
)
from packplan.adapters.models import find_sharded_weight, replace_attributes
from packplan.adapters.proof.steps import failing_together, gather_from_ranks
from packplan.adapters.vision_tower import ensure_vision_forward
from packplan.core.batch import IGNORED_LABEL, count_row_groups
from packplan.core.errors import ArgumentError, ModelError, counted, format_lines
from packplan.core.schedule import EpochSchedule
from packplan.core.surface import Plan
from packplan.core.surface import plan as plan_lengths

log = logging.getLogger(__name__)


_PLANNED_ARGUMENTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed", "data_seed",
    "dataloader_drop_last",
)  # fmt: skip
"""Training arguments that decide the schedule of a plan."""


@failing_together()
def use_plan(
    trainer: Any,
    plan: Plan | int,
    *,
    eval_plan: Plan | int | None = None,
    sequence_parallel_size: int | Literal["auto"] = 1,
    max_sequence_parallel_size: int | None = None,
    check: bool = True,
) -> EpochSchedule:
    """
    Make a trainer train the packs of a plan; return the schedule of its epochs.

    ```py
    plan = packplan.plan([len(ids) for ids in rows["input_ids"]], 4096)
    trainer = Trainer(model, args, train_dataset=rows)
    schedule = use_plan(trainer, plan)
    schedule.total_steps  # known before the first step
    trainer.train()
    ```

    A batch is one pack. The trainer's own collator pads the samples of the pack, and the model
    leaves the padding out (see `unpad`). A step trains as many packs as it would train rows without
    a plan. With a `per_device_train_batch_size` of 8, for example, each rank computes eight packs,
    one after the other, in place of each batch of eight rows. The schedule depends on
    `per_device_train_batch_size`, `gradient_accumulation_steps`, `num_train_epochs`, `max_steps`,
    `data_seed` (else `seed`) and `dataloader_drop_last`. Settings that have another effect under a
    plan are logged as warnings.

    The loss of a step is the mean over the supervised tokens of all its batches on all ranks. With
    preference data, the loss is the mean over pairs of answers, or over rows with KTO.

    The trainer writes checkpoints. A run can resume from a checkpoint in the middle of an epoch,
    also on another number of ranks. All rows are read once before the first step, unless the
    checkpoint of a resumed run stores their lengths and digests. A row that is not one sample
    raises an error, and so do changed rows in a resumed run.

    Call `use_plan` on every rank, after the trainer is built. The model is probed first.

    Args:
        trainer: `Trainer` of transformers, or `SFTTrainer`, `DPOTrainer`, `RewardTrainer` or
            `KTOTrainer` of TRL. The rows of the trainer's data sets have to be tokenized, unless
            its collator tokenizes them.
        plan: Plan of the rows of `trainer.train_dataset`, made from their `row_lengths`. With a
            number, the rows are planned into packs of at most that many tokens.
        eval_plan: Plan of the rows of `trainer.eval_dataset`, or a packing length. The evaluation
            loss is then the mean over supervised tokens; with preference data, over pairs or rows.
            None keeps the trainer's own evaluation.
        sequence_parallel_size: Number of neighbouring ranks that share each row of packed samples.
            With `auto`, 2, 4, 8 … ranks share a pack longer than the packing length. Their number
            is the smallest with which no rank has more tokens than the packing length, but at most
            *max_sequence_parallel_size*. Every other pack is trained by one rank.
        max_sequence_parallel_size: Maximum number of ranks that share a pack under `auto`. None
            takes the largest power of two that divides the number of ranks.
        check: Whether a pack is compared with its samples alone before the first step, by the
            trainer's loss and the gradients of embeddings. `unpad` then also compares the first
            calls of the model. Neither comparison changes training by a single bit.

    Raises:
        ArgumentError: The trainer is not supported, a setting contradicts the plan, or a row is not
            one sample. Training also raises this error if an argument that decides the steps, or a
            data set, was set after `use_plan`.
        StaleError: The length of a row differs from its planned length.
        MismatchError: Ranks have different arguments, plans or rows. Training also raises this
            error if loss or gradients of the first pack differ from those of its samples alone.
        ModelError: The probe of `unpad` fails, or models of this kind cannot be packed.
    """
    if isinstance(trainer, _PlannedTraining):
        raise ArgumentError("host", "the trainer follows a plan already: build another trainer for another plan")
    refuse_misuse(trainer, plan, eval_plan)
    fault = find_plan_conflicts(trainer, row_ranks=sequence_parallel_size, evaluates=eval_plan is not None)
    pairs, args = is_preference_trainer(trainer), trainer.args
    call: dict[str, Any] = {"sequence_parallel_size": sequence_parallel_size, "check": check}
    call["max_sequence_parallel_size"] = max_sequence_parallel_size
    require_same_on_ranks(args, call | _describe_plans(trainer, plan=plan, eval_plan=eval_plan), fault)
    given = {name: getattr(args, name) for name in _PLANNED_ARGUMENTS}
    if args.data_seed is not None:
        del given["seed"]  # decides no order then
    plan, packs, eval_plan, eval_packs = _open_packs(trainer, plan, eval_plan)
    pad = partial(pad_rows, types=token_type_columns(trainer.model))
    collator = PackInputs(packs.source.collate or pad, of_pairs=pairs)
    schedule = _make_schedule(args, plan, row_ranks=sequence_parallel_size, most=max_sequence_parallel_size)
    groups, eval_degrees = share_packs(trainer, schedule, plan, eval_plan)
    trainer.unpaddings = unpaddings = _unpad_for_loss(trainer, groups, check=check)
    _keep_ranks_in_step(trainer, [one.model for one in unpaddings])
    trainer.unpadding, trainer.native, trainer.row_groups = unpaddings[0], unpaddings[0].native, unpaddings[0].groups
    if not (pairs or trainer.model_accepts_loss_kwargs) and trainer.compute_loss_func is None:
        trainer.compute_loss_func = token_mean
    for line in changed_meanings(args, plan, schedule):
        log.warning("%s", line)
    insert_base_class(trainer, _PlannedTraining)
    if pairs:
        insert_base_class(trainer, TrainsPairs)
    served: dict[str, Any] = {"packs": packs, "eval_packs": eval_packs, "collator": collator}
    trainer.serve(schedule, plan, "", **served, eval_degrees=eval_degrees, check=check)
    # Only now, since checkpoints store the values that the user has set.
    trainer._train_batch_size = args.per_device_train_batch_size = 1  # noqa: SLF001  # has no public name
    args.gradient_accumulation_steps = schedule.gradient_accumulation_steps
    trainer.planned_arguments = {name: (value, getattr(args, name)) for name, value in given.items()}
    return schedule


def row_lengths(trainer: Any, rows: Any = None) -> list[int]:
    """
    Return the number of tokens of each row of a trainer's data set, for `packplan.plan`.

    A row is counted after the trainer's collator has processed it. A pair of answers counts the
    tokens of both rows that the model computes for it.

    Args:
        trainer: Trainer that `use_plan` supports.
        rows: Rows by index; None takes `trainer.train_dataset`.

    Raises:
        ArgumentError: No plan can replace the batches of *trainer*, or a row is padded or is not
            one sample.
    """
    require_trainer(trainer)
    source = _open_rows(trainer, trainer.train_dataset if rows is None else rows)
    return [*source.read_facts(num_workers=trainer.args.dataloader_num_workers).lengths.tolist()]


def token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> Any:
    """
    Return a batch's part of the mean loss over all supervised tokens of a step. The parts of all
    batches of the step add up to that mean.

    Args:
        outputs: Outputs of a causal language model; `logits` of shape (rows, tokens, vocabulary).
        labels: Labels of shape (rows, tokens).
        num_items_in_batch: Number of supervised tokens of the whole step over all ranks. None
            counts the supervised tokens of *labels*.

    Raises:
        ArgumentError: *labels* have another shape than the logits.
    """
    if outputs["logits"].shape[:2] != labels.shape:
        found = f"the logits have shape {tuple(outputs['logits'].shape)}, but the labels {tuple(labels.shape)}"
        raise ArgumentError("host", f"{found}: pass no labels to the model, or call unpad(model) without logits=False")
    logits, targets = outputs["logits"][:, :-1].float(), labels[:, 1:].to(outputs["logits"].device)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / max(1, int(count_supervised(labels) if num_items_in_batch is None else num_items_in_batch))


def _find_row_collator(trainer: Any) -> Collate | None:
    """Return the collator of a trainer; None for transformers' defaults, which pad no labels."""
    collator = trainer.data_collator
    if collator is default_data_collator or type(collator) is DataCollatorWithPadding:
        return None
    return trainer._get_collator_with_removed_columns(collator, description="training")  # type: ignore[no-any-return]  # noqa: SLF001  # has no public name


def _open_rows(trainer: Any, rows: Any) -> RowSource:
    return RowSource(rows, _find_row_collator(trainer), of_pairs=is_preference_trainer(trainer))


def _describe_plans(trainer: Any, **plans: Plan | int | None) -> dict[str, Any]:
    """
    Return values that have to agree between ranks: facts of the plans, and numbers of rows of the
    data.
    """
    values: dict[str, Any] = {}
    for name in ("train_dataset", "eval_dataset"):
        if hasattr(rows := getattr(trainer, name), "__len__"):
            values[f"rows of {name}"] = len(rows)
    for name, plan in plans.items():
        tokens = plan.raw.packing_length if isinstance(plan, Plan) else plan
        values[f"packing length of {name}"] = tokens and int(tokens)
        values[name] = plan.checksum[:12] if isinstance(plan, Plan) else None
    return values


def _open_packs(
    trainer: Any, plan: Plan | int, eval_plan: Plan | int | None
) -> tuple[Plan, RowsOfPacks, Plan | None, RowsOfPacks | None]:
    """
    Return both plans with their packs. Rows are read now, unless a checkpoint may store their
    lengths and digests.
    """
    if getattr(trainer, "precompute_ref_log_probs", False):  # KTO of TRL before 1.0 does so when it makes loaders
        trainer.get_train_dataloader()
        if eval_plan is not None:
            trainer.get_eval_dataloader()
    plan, packs = _plan_packs(trainer, trainer.train_dataset, plan)
    eval_packs = None
    if eval_plan is not None:
        eval_plan, eval_packs = _plan_packs(trainer, trainer.eval_dataset, eval_plan)
    if packs.facts is None and not any(gather_from_ranks(any(Path(trainer.args.output_dir).glob(f"*/{FACTS_FILE}")))):
        packs.take_facts(_read_together(trainer, packs.source, decode=False))
    rows = "" if packs.facts is None else packs.facts.digest[:12]
    require_same_on_ranks(trainer.args, {"plan": plan.checksum[:12], "rows": rows})
    return plan, packs, eval_plan, eval_packs


def _plan_packs(trainer: Any, rows: Any, plan: Plan | int) -> tuple[Plan, RowsOfPacks]:
    """
    Return a plan and its packs. If *plan* is a packing length, the rows are planned by their
    lengths. The lengths are loaded from a checkpoint, or the rows are read.
    """
    source, facts = _open_rows(trainer, rows), None
    if not isinstance(plan, Plan):
        if isinstance(folder := trainer.args.resume_from_checkpoint, str) and rows is trainer.train_dataset:
            facts = _load_facts(folder, len(rows))
        facts = facts or _read_together(trainer, source, decode=True)
        plan = plan_lengths(facts.lengths.tolist(), plan)
    packs = RowsOfPacks(source, plan)
    if facts is not None:
        packs.take_facts(facts)
    return plan, packs


def _load_facts(folder: str, num_rows: int, plan: str | None = None) -> RowFacts | None:
    """Return the `RowFacts` that a checkpoint stores for a plan; None if any rank lacks them."""
    saved = read_saved_progress(Path(folder))
    facts = RowFacts.load(Path(folder), saved["data"])
    fits = facts is not None and len(facts.rows) == num_rows and plan in (None, saved["plan"])
    return facts if all(gather_from_ranks(fits)) else None


def _read_together(trainer: Any, source: RowSource, *, decode: bool) -> RowFacts:
    """
    Read each row on one rank, and return the `RowFacts` of all rows. Every rank has to call this
    inside `failing_together`.
    """
    args = trainer.args
    ranks: dict[str, Any] = {"rank": args.process_index, "world_size": args.world_size}
    parts = gather_from_ranks(source.read_facts(decode=decode, num_workers=args.dataloader_num_workers, **ranks))
    if args.world_size > 1:  # each row was read by one rank: compare some rows that all ranks read
        shown = range(0, len(source.rows), max(1, (len(source.rows) - 1) // 2))
        digests = zip(shown, source.digests(shown, source.fetch(shown)), strict=True)
        require_same_on_ranks(args, {f"digest of row {row}": digest.hex()[:12] for row, digest in digests})
    return RowFacts(np.concatenate([one.rows for one in parts]))


def _make_schedule(
    args: Any, plan: Plan, *, row_ranks: int | Literal["auto"], most: int | None = None
) -> EpochSchedule:
    """Return a plan's schedule under a trainer's arguments; at most *most* ranks share a pack."""
    if most is not None and row_ranks != "auto":
        fact = f"max_sequence_parallel_size needs sequence_parallel_size='auto', not {row_ranks}: leave it out"
        raise ArgumentError("host", fact)
    world_size = count_row_groups(args.world_size, 1 if row_ranks == "auto" else row_ranks)
    return plan.schedule(
        world_size=world_size, epochs=args.num_train_epochs, max_steps=args.max_steps,
        packs_per_step=world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps,
        drop_last=args.dataloader_drop_last, seed=args.seed if args.data_seed is None else args.data_seed,
        degrees=(most or "auto") if row_ranks == "auto" else 1,
    )  # fmt: skip


def _unpad_for_loss(trainer: Any, groups: RowGroups | None, *, check: bool) -> list[Unpadding]:
    """
    Add hooks to a trainer's model, and to its reference model if it has one; return the hooks.

    Hooks that a model already has are kept. New hooks omit logits of padding if the trainer has
    transformers' own loss.

    Raises:
        ModelError: The model is bidirectional, or the probe of `unpad` fails.
    """
    models = [unwrap(one) for one in (trainer.model, getattr(trainer, "ref_model", None)) if one is not None]
    if is_bidirectional(models[0].config) and not is_preference_trainer(trainer):
        name = models[0].config.model_type
        raise ModelError("probe", f"{name} attends in both directions, but use_plan trains the next token: use unpad")
    options: dict[str, Any] = {"logits": type(trainer).compute_loss is not Trainer.compute_loss, "groups": groups}
    hooks = ((HOOKED[module] for module in one.modules() if module in HOOKED) for one in models)
    return [next(own, None) or unpad(one, **options, check=check) for one, own in zip(models, hooks, strict=True)]


def _keep_ranks_in_step(trainer: Any, models: list[Any]) -> None:
    """
    Make vision towers run in every batch if the other ranks would wait for a rank without images.
    The other ranks wait under DeepSpeed and FSDP, if weights are sharded, and if DDP does not look
    for unused parameters.
    """
    args, rows, collate = trainer.args, trainer.train_dataset, _find_row_collator(trainer) or pad_rows
    unset = args.ddp_find_unused_parameters is None  # then transformers decides
    finds_unused = not args.gradient_checkpointing if unset else args.ddp_find_unused_parameters
    shares = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or find_sharded_weight(models[0]) is not None
    if args.world_size == 1 or (finds_unused and not shares) or not hasattr(models[0], "get_image_features"):
        return
    batches = (collate([rows[index]]) for index in range(len(rows)))
    seen = next((one for one in batches if any(name.startswith("pixel_values") for name in one)), None)
    if seen is not None:
        for model in models:
            ensure_vision_forward(model, seen)


class _PlannedTraining(ServesPacks):
    """Mixin that makes a trainer of transformers or TRL train planned packs."""

    unpadding: Unpadding
    """Hooks of the model that is trained."""

    unpaddings: list[Unpadding]
    """Hooks of the trained model, and of the reference model if there is one."""

    train_packs: RowsOfPacks
    compute_loss_func: Any
    planned_arguments: dict[str, tuple[Any, Any]]
    """Argument that decides the steps -> value before `use_plan`, and value in training."""

    def train(self, *args: Any, **options: Any) -> Any:
        """
        Train as `ServesPacks` does; ArgumentError if settings or data sets have changed since
        `use_plan`.
        """
        changed = []
        for name, (given, planned) in self.planned_arguments.items():
            if (now := getattr(self.args, name)) == given:
                setattr(self.args, name, planned)
            elif now != planned:
                changed.append(f"{name} was {given}, now {now}")
        for name, packs in (("train_dataset", self.train_packs), ("eval_dataset", self._eval_packs)):
            if packs is not None and (rows := getattr(self, name)) is not packs.source.rows:
                now = f"{len(rows):,} others" if hasattr(rows, "__len__") else type(rows).__name__
                changed.append(f"{name} had {counted(len(packs.source.rows), 'row')}, now {now}")
        advice = "settings have changed after use_plan: build a new trainer with them, and call use_plan again"
        with failing_together():
            fault = ArgumentError("host", format_lines(advice, changed)) if changed else None
            require_same_on_ranks(self.args, {}, fault)
        return super().train(*args, **options)

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        """Train, after loading `RowFacts` from the resumed checkpoint, or reading the rows."""
        packs, folder, state = self.train_packs, options.get("resume_from_checkpoint"), self.pack_batches.state
        with failing_together():
            if (facts := packs.facts) is None:  # `use_plan` found checkpoints, from which this run may go on
                facts = _load_facts(folder, len(packs.source.rows), state.plan) if folder else None
                packs.take_facts(facts := facts or _read_together(self, packs.source, decode=False))
            require_supervised_rows(facts.num_supervised)
            require_same_on_ranks(self.args, {"plan": state.plan[:12], "rows": facts.digest[:12]})
        self.pack_batches.state = attrs.evolve(state, data=facts.digest)
        return super()._inner_training_loop(*args, **options)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state and the `RowFacts` in a checkpoint."""
        if self.args.should_save and self.train_packs.facts is not None:
            self.train_packs.facts.save(Path(output_dir))
        super()._save_rng_state(output_dir)

    @contextmanager
    def prepared(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """
        Yield the inputs after the trainer's preparation; model calls in this context are not
        counted.
        """
        with ExitStack() as stack:
            for one in self.unpaddings:
                stack.enter_context(one.trial())
            yield stack.enter_context(super().prepared(inputs))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside this context, each rank computes whole samples without the hooks of `unpad`."""
        with ExitStack() as stack:
            for one in self.unpaddings:
                stack.enter_context(one.paused())
                stack.enter_context(using_native_attention(one.model, one.native))
            yield stack.enter_context(super().reference())

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Return the loss of a batch, computed without a cache, which would mix its samples."""
        if hasattr(self.model.config.get_text_config(), "use_cache"):
            inputs = {**inputs, "use_cache": False}
        own = None if self._evaluates_rows and self.compute_loss_func is token_mean else self.compute_loss_func
        with replace_attributes(self, compute_loss_func=own):
            return super().compute_loss(model, inputs, *args, **options)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, **options: Any) -> Any:  # noqa: FBT001  # the trainer passes it
        """
        Return loss, logits and labels of a batch. The logits and labels of a pack are one row of
        real tokens.
        """
        if self._evaluated is None:
            return super().prediction_step(model, inputs, prediction_loss_only, **options)
        mask = inputs.get("attention_mask")
        with replace_attributes(self.unpadding, omits_eval_logits=prediction_loss_only):
            outputs = super().prediction_step(model, inputs, prediction_loss_only, **options)
        return outputs if mask is None else _flatten_rows(outputs, mask.bool())


def _flatten_rows(value: Any, mask: torch.Tensor) -> Any:
    """
    Return values of shape (rows, positions, …) as one row of real tokens, and other values
    unchanged.
    """
    if isinstance(value, tuple):
        return tuple(_flatten_rows(one, mask) for one in value)
    has_rows = isinstance(value, torch.Tensor) and value.shape[:2] == mask.shape
    return value[mask.to(value.device)][None] if has_rows else value
