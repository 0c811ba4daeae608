"""
Mixins for trainers that train packs by the schedule of a plan; `insert_base_class` adds them.

`FollowsSchedule` sets the numbers of steps and epochs, checks each batch, and resumes runs, in
trainers of transformers, TRL, ms-swift and `packplan sft`. `ComputesPacks` scales NEFTune's noise
for each sample, and averages the evaluation loss over supervised tokens. The trainer of a stream,
which has no schedule, uses only `ComputesPacks` of these mixins. `ServesPacks` adds data loaders of
packs to trainers of other libraries.

A mixin precedes the trainer's class among the base classes, so `super()` calls the trainer's own
method. The trainer's own method is an override of TRL or ms-swift if there is one, else the method
of transformers. `adapters/trainer/trainer.py` lists the methods that a step of `packplan sft`
calls.
"""

import dataclasses
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from packplan.adapters.attention import NAME, using_native_attention
from packplan.adapters.attention.packed_row import RealTokens, read_row
from packplan.adapters.attention.shared_rows import RowGroups, count_tokens, sharing_by
from packplan.adapters.finite import StopsAtNonFinite
from packplan.adapters.hf.first_pack import require_pack_as_alone
from packplan.adapters.hf.refusals import UNPLANNED_EVALUATION, library_class
from packplan.adapters.hf.saving import KeepsCheckpoints, find_damage
from packplan.adapters.hf.telemetry import LogsPacks, text_pack_stats
from packplan.adapters.loaders.batches import (
    TRAINER,
    EvalBatches,
    PackBatches,
    read_saved_progress,
    read_saved_trainer,
)
from packplan.adapters.loaders.packs import NORMALISER, PACK, PackLoader, refuse_other_packs
from packplan.adapters.loaders.rows import count_supervised
from packplan.adapters.model_folder import model_file_facts
from packplan.adapters.models import replace_attributes
from packplan.adapters.proof.steps import failing_together, gather_from_ranks
from packplan.adapters.trainer_state import COPY_AGAIN, find_other_parts, name_older
from packplan.core.batch import IGNORED_LABEL, pack_degrees
from packplan.core.config.identity import (
    FIXED_ARGUMENTS,
    flat_values,
    is_changeable,
    rank_differences,
    shared_arguments,
)
from packplan.core.equality import NATIVE
from packplan.core.errors import ArgumentError, MismatchError, PackplanError, fit_lines, format_lines
from packplan.core.fingerprint import Fingerprint, RunIdentity
from packplan.core.inspection import describe_few_positions, describe_resume, describe_training, format_table
from packplan.core.lengths import IntArray
from packplan.core.schedule import EpochSchedule, ResumeState
from packplan.core.surface import Plan

log = logging.getLogger(__name__)

_ROUTER = "router_aux_loss_coef"
"""Attribute of models and configurations: weight of the loss by which routers balance experts."""


class PackplanProgress(TrainerCallback, ExportableState):
    """Callback that stores the progress of a plan in checkpoints, under this class's name."""

    # Only a copy from a checkpoint has no batches; it is never saved.
    def __init__(self, pack_batches: Any = None, trainer: str | None = None) -> None:
        self.pack_batches, self.trainer, self.step = pack_batches, trainer, 0

    def state(self) -> dict[str, Any]:
        """Return the progress after the last step, and the trainer's class, for the checkpoint."""
        progress = self.pack_batches.state_dict(step=self.step)
        return {"args": {}, "attributes": {"progress": progress, TRAINER: self.trainer}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # transformers passes them
        """
        Record the current step, and correct `state.epoch` in an epoch that was resumed midway.
        """
        self.step, schedule = state.global_step, self.pack_batches.schedule
        start, window = schedule.start, schedule.gradient_accumulation_steps
        if start.epoch_step and self.step <= schedule.last_step(start.epoch):
            total = start.epoch_step * window + schedule.num_remaining_batches(start.epoch)
            state.epoch = start.epoch + min((start.epoch_step + self.step - start.step) * window, total) / total


@contextmanager
def noise_by_sample(trainer: Any) -> Iterator[None]:
    """
    Inside this context, scale NEFTune's noise for each sample of a row as if the sample were alone.

    NEFTune adds random noise to the embeddings of tokens in training. The absolute value of the
    noise is at most `neftune_noise_alpha / sqrt(tokens * hidden_size)`. In transformers, `tokens`
    is the number of tokens of the whole row. For a row with samples of 8 and 32 tokens,
    transformers uses 40 tokens for both samples. Inside this context, 8 tokens are used for the
    first sample, and 32 for the second.

    Two hooks replace the NEFTune hook of transformers. The first hook finds the samples by the
    position ids or the mask of the model's call. The second hook adds the noise to the embeddings.
    Without `neftune_noise_alpha`, the context does nothing.

    Args:
        trainer: Trainer whose `train` is running, after transformers has added its NEFTune hook.
    """
    alpha: float | None = trainer.neftune_noise_alpha
    if alpha is None:
        yield
        return
    trainer.neftune_hook_handle.remove()
    call: dict[str, Any] = {}

    def read_samples(model: Any, _: Any, given: dict[str, Any]) -> None:
        if not model.training:
            return
        row, places = read_row(given.get("position_ids"), given.get("attention_mask")), None
        if row is None:  # padded: each row of the batch is a sample
            tokens = RealTokens.from_mask(given["attention_mask"])
            row, places = tokens.row, tokens.places
        # For each real token: the length of its sample, and its place in a padded batch.
        call["lengths"], call["places"] = row.boundaries.diff()[row.sample_ids], places

    def add_noise(embeddings: Any, _: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not (embeddings.training and embeddings.neftune_noise_alpha):
            return embedded
        lengths, places = call["lengths"], call["places"]
        # Padding has noise too, which changes nothing; `unpad` may have left it out before.
        if places is not None and len(places) != embedded.shape[:2].numel():
            lengths = lengths.new_ones(embedded.shape[:2].numel()).index_copy(0, places, lengths)
        bounds = alpha / (lengths.reshape(embedded.shape[:2]) * embedded.shape[-1]).sqrt()
        noise: torch.Tensor = torch.empty_like(embedded).uniform_(-1, 1) * bounds[..., None].to(embedded.dtype)
        return embedded + noise

    with (
        trainer.model.register_forward_pre_hook(read_samples, prepend=True, with_kwargs=True),
        trainer.model.get_input_embeddings().register_forward_hook(add_noise),
    ):
        yield


class FollowsSchedule:
    """Mixin that makes a trainer train packs in the order of a schedule."""

    args: Any
    accelerator: Any
    state: Any
    control: Any
    callback_handler: Any
    pack_batches: PackBatches
    reading_together: Callable[[], AbstractContextManager[None]]

    def follow(
        self, pack_batches: PackBatches, *, around_epoch: Callable[[int], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """
        Make the trainer train the batches of the sampler *pack_batches*, in its schedule's order.

        Args:
            pack_batches: Batch sampler of this rank's packs.
            around_epoch: Function that takes an epoch's number and returns the context in which the
                epoch is trained. In `packplan sft`, the function also selects the packs of the
                epoch.
        """
        self.pack_batches, self._around_epoch = pack_batches, around_epoch
        self._progress = PackplanProgress(pack_batches, library_class(self))
        self._expected: Iterator[list[int]] = iter(())
        self.callback_handler.add_callback(self._progress)

    @property
    def schedule(self) -> EpochSchedule:
        """Epoch schedule that decides the trainer's batches."""
        return self.pack_batches.schedule

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        """
        Train from the start, or from the checkpoint that was passed to `train`.

        The training loop of transformers calls four methods of this class: first
        `set_initial_training_values` and `_init_training_state`, then `_run_epoch` for each epoch,
        and `get_batch_samples` for each step.
        """
        if (folder := options.get("resume_from_checkpoint")) is None:
            self.pack_batches.restart()  # at its start already, unless this trainer has trained before
        else:
            with failing_together():
                self.pack_batches.load_state_dict(read_saved_progress(Path(folder)))
        self._progress.step = self.schedule.start.step
        return super()._inner_training_loop(*args, **options)  # type: ignore[misc]  # of the trainer's class

    def set_initial_training_values(self, *args: Any) -> Any:
        """
        Return the trainer's training counts, with the steps and epochs of the schedule.

        The counts include the steps before a resume, even if another number of ranks trained them.
        """
        _, _, *others, _, _ = super().set_initial_training_values(*args)  # type: ignore[misc]
        schedule = self.schedule
        return schedule.num_epochs, schedule.steps_per_epoch, *others, schedule.batches_per_epoch, schedule.total_steps

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        super()._init_training_state(*args, **options)  # type: ignore[misc]
        # The trainer may have restored a copy of the callback, which follows nothing.
        self.callback_handler.remove_callback(PackplanProgress)
        self.callback_handler.add_callback(self._progress)
        return self.schedule.start.epoch, 0  # the sampler begins where the checkpoint ended

    def _run_epoch(self, *, epoch: int, **options: Any) -> None:
        """Train the remaining batches of an epoch; `get_batch_samples` checks each of them."""
        schedule = self.schedule
        options["steps_in_epoch"] = schedule.num_remaining_batches(epoch)
        options["num_update_steps_per_epoch"] = schedule.num_remaining_steps(epoch)
        self.pack_batches.set_epoch(epoch)  # the sampler is elsewhere if the last epoch was stopped early
        self._expected = iter(schedule.batches(epoch, rank=self.pack_batches.rank))
        with self._around_epoch(epoch):
            super()._run_epoch(epoch=epoch, **options)  # type: ignore[misc]
        if not schedule.num_remaining_batches(epoch):  # the epoch's last step was before the resume
            self.control.should_training_stop = False

    def get_batch_samples(self, batches_left: Any, num_batches: int, *args: Any) -> Any:
        """
        Return the batches of a step and their loss divisor.

        MismatchError is raised if the schedule expects other packs in this step.
        """
        with self.reading_together():
            batches = [*islice(batches_left, num_batches)]
            refuse_other_packs(batches, islice(self._expected, num_batches))
        return super().get_batch_samples(iter(batches), num_batches, *args)  # type: ignore[misc]


@attrs.define(eq=False)
class _LossSums:
    """Sums that give the mean loss over this rank's supervised tokens, without repeated batches."""

    batches: EvalBatches
    expected: Iterator[list[int]] = attrs.field(default=attrs.Factory(lambda sums: iter(sums.batches), takes_self=True))
    """Pack indices of each batch that is not evaluated yet."""

    sums: torch.Tensor = attrs.field(factory=lambda: torch.zeros(2, dtype=torch.float64))
    """Weighted sum of losses, and sum of their weights; shape (2,)."""

    num_evaluated: int = 0
    weight: float = 0
    """
    Weight of the current batch's loss: the number of its supervised tokens, or the sum of the loss
    weights of its tokens.
    """

    @property
    def next_is_repeated(self) -> bool:
        """Whether the next batch repeats earlier packs, to give all ranks equally many batches."""
        return not self.batches.is_counted(self.num_evaluated)

    def add(self, loss: torch.Tensor, *, counts: bool) -> None:
        """
        Add the mean loss of the next batch, times `weight`, unless the batch is repeated or another
        rank counts it.
        """
        if self.weight and counts and not self.next_is_repeated:
            self.sums += torch.tensor([float(loss) * self.weight, self.weight], dtype=torch.float64)
        self.num_evaluated += 1


class ComputesPacks:
    """
    Mixin that computes the loss of packs, in training and evaluation.

    Training scales NEFTune's noise for each sample of a pack. Evaluation on `EvalBatches` returns
    the mean loss over supervised tokens, and counts each pack once.
    """

    accelerator: Any
    args: Any
    reading_together: Callable[[], AbstractContextManager[None]]
    row_groups: RowGroups | None = None
    """Groups of ranks that share rows; None if each rank has rows of its own."""

    _evaluated: _LossSums | None = None
    _evaluates_rows = False
    _metrics: dict[str, Any]
    _total_train_tokens: int

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        """Train with NEFTune's noise scaled for each sample."""
        with noise_by_sample(self):
            return super()._inner_training_loop(*args, **options)  # type: ignore[misc]  # of the trainer's class

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """
        Evaluate packs by their mean loss over tokens, and other data by the trainer's own method.
        """
        if not isinstance(getattr(dataloader, "batch_sampler", None), EvalBatches):
            with sharing_by(1), replace_attributes(self, _evaluates_rows=True):  # each rank has other rows
                return super().evaluation_loop(dataloader, *args, **options)  # type: ignore[misc]  # of the trainer's class
        self._evaluated = evaluated = _LossSums(dataloader.batch_sampler)
        dataloader.reading = self.reading_together
        groups = self.row_groups
        whole = groups is not None and groups.packing_length is not None and not dataloader.batch_sampler.shares
        try:
            # ms-swift would multiply losses by the number of ranks, for a mean over all ranks.
            with sharing_by(1 if whole else None), replace_attributes(self.args, average_tokens_across_devices=False):
                output = super().evaluation_loop(dataloader, *args, **options)  # type: ignore[misc]
        finally:
            self._evaluated = None
        refuse_other_packs([], evaluated.expected)  # every expected batch was evaluated
        loss, weight = self.sum_over_ranks(evaluated.sums).tolist()
        name = f"{options.get('metric_key_prefix', 'eval')}_loss"
        if weight:
            output.metrics[name] = loss / weight
        else:
            del output.metrics[name]
            log.warning("%s is left out: no sample of the evaluation has a supervised token", name)
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """
        Return loss, logits and labels of a batch. In an evaluation of packs, its loss is added to
        the mean over tokens.
        """
        if self._evaluated is None:
            return super().prediction_step(model, inputs, *args, **options)  # type: ignore[misc]
        refuse_other_packs([inputs], islice(self._evaluated.expected, 1))
        self._evaluated.weight = self.count_learned(inputs)
        counts = self.counts(inputs)
        outputs = super().prediction_step(model, inputs, *args, **options)  # type: ignore[misc]
        self._evaluated.add(outputs[0], counts=counts)
        return outputs

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """
        Return the loss of a batch, weighted in training so that a row shared by ranks counts once.
        """
        groups = None if self._evaluated is not None else self.row_groups
        if groups is None:
            return super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]  # of the trainer's class
        num, seen = count_tokens(inputs), getattr(self, "_total_train_tokens", None)
        loss = super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]  # of the trainer's class
        weight = groups.weight_of(num)
        if seen is not None and model.training:  # TRL has added the tokens of all ranks
            self._total_train_tokens = seen + int(self.sum_over_ranks(torch.tensor(num * groups.is_first(num))))
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss if weight == 1 else loss * weight

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of a batch once, however many ranks share it."""
        gather, groups = self.accelerator.gather, self.row_groups
        counted = groups is None or groups.is_first(count_tokens(inputs))
        with replace_attributes(self.accelerator, gather=lambda tokens: gather(tokens * counted)):
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]  # of the trainer's class

    def _compute_acc(self, *args: Any, **options: Any) -> None:
        """Compute token accuracy as ms-swift does; compute none if ranks share only some rows."""
        if self.row_groups is None or self.row_groups.packing_length is None:
            super()._compute_acc(*args, **options)  # type: ignore[misc]  # of ms-swift's trainer

    def sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks."""
        return torch.as_tensor(self.accelerator.reduce(numbers.to(self.args.device)))

    def counts(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether this rank counts the tokens of a batch that other ranks may share."""
        return self.row_groups is None or self.row_groups.counts(count_tokens(inputs))

    def count_learned(self, inputs: dict[str, Any]) -> float:
        """
        Return the number of supervised tokens of a batch, or the sum of its tokens' loss weights.
        """
        return float(inputs[NORMALISER]) if NORMALISER in inputs else count_supervised(inputs["labels"])


class ServesPacks(KeepsCheckpoints, StopsAtNonFinite, ComputesPacks, LogsPacks, FollowsSchedule):
    """Mixin that makes a trainer of another library load and evaluate packs."""

    model: Any
    eval_dataset: Any
    _checks_first_pack = False

    native: str = NATIVE
    """Name of the attention of transformers that computes single samples for comparison."""

    fixed_arguments: frozenset[str] = FIXED_ARGUMENTS
    """Names of training arguments that a resumed run may not change."""

    loss_of_samples: str = "sum"
    """Relation of a batch's loss to the losses of its samples: "sum", "mean", or "" for neither."""

    def serve(
        self,
        schedule: EpochSchedule,
        plan: Plan,
        digest: str,
        *,
        packs: Any,
        collator: Any,
        eval_packs: Any,
        eval_degrees: IntArray | None = None,
        check: bool = True,
    ) -> None:
        """
        Make the trainer load the packs of a plan, and keep its checkpoints safe (see
        `KeepsCheckpoints`). Print a table of the planned run.

        Args:
            schedule: Order of the packs, in which a group of ranks that share rows counts as one
                rank.
            plan: Plan of the training data.
            digest: Digest of the training rows.
            packs: Data set that returns a training pack by its index.
            collator: Function that turns a list of packs into inputs of the model. The key `PACK`
                of the inputs has the index of the pack, or a list of indices.
            eval_packs: Data set of evaluation packs, whose loss is the mean over supervised tokens.
                None keeps the trainer's own evaluation.
            eval_degrees: Number of ranks that share each evaluation pack; None if it is the same
                for all packs.
            check: Whether a pack of the first step is compared with its samples alone, before the
                step.
        """
        self.train_packs, self._eval_packs, self.collate = packs, eval_packs, collator
        self._eval_degrees = eval_degrees
        self._checks_first_pack, self.evaluates_packs = check, eval_packs is not None
        self._loaders, stats = [], text_pack_stats(plan, self.model)
        self.pack_stats = lambda _: stats
        # Consecutive ranks share rows where the schedule has fewer ranks than were started.
        rank, size = self.args.process_index // (self.args.world_size // schedule.world_size), schedule.world_size
        facts: dict[str, Any] = {"plan": plan.checksum, "data": digest, "identity": self._identity()}
        facts["inputs"] = {"packing_length": plan.raw.packing_length}
        batches = PackBatches(schedule, rank, size, state=ResumeState.from_schedule(schedule, **facts))
        self.follow(batches, around_epoch=self.logging_epoch)
        self.keep_checkpoints()
        self.show(_start_table(self, plan, schedule))
        # A plan does not tell whether rows have images, and has one length for both rows of a pair.
        text = describe_few_positions(plan.lengths, self.model.config.to_dict(), media=True)
        if text and library_class(self) not in {"DPOTrainer", "RewardTrainer"}:
            self.show(f"warning: {text}")

    def show(self, text: str) -> None:
        """Print lines on rank 0, whatever the log level."""
        if self.is_world_process_zero():  # type: ignore[attr-defined]  # of the trainer's class
            print(fit_lines(f"packplan: {text}"), flush=True)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """
        Train as the trainer does. A checkpoint is verified before anything is loaded from it.

        Args:
            resume_from_checkpoint: Folder of a checkpoint. True takes the last checkpoint in the
                output folder, and None trains from the start.
            *args: Further arguments of the trainer's own `train`.
            **options: Options of the trainer's own `train`.

        Raises:
            ArgumentError: The checkpoint has no progress of a plan, another trainer saved it, a
                file has changed, or this run cannot load its optimizer.
            CorruptArtefactError: The trainer's state in the checkpoint is damaged.
            StaleError: The checkpoint is from another plan, other data or another run.
            SystemExit: SIGTERM ended training before its last step, on all ranks, after a
                checkpoint was saved. The exit status is 143.
        """
        with failing_together():
            last = resume_from_checkpoint
            last = get_last_checkpoint(self.args.output_dir) if last is True else last
            require_same_on_ranks(self.args, {"checkpoint": last and Path(last).name})
            if last:
                self.last_save = str(last)
                self._verify(Path(last))
        result = super().train(resume_from_checkpoint, *args, **options)  # type: ignore[misc]
        if self.was_terminated:
            text = "SIGTERM: a checkpoint is saved at step {:,} of {:,}; resume_from_checkpoint {} continues from there"
            text += ". Training ends here with exit status 143 (SystemExit)"
            self.show(text.format(self.state.global_step, self.schedule.total_steps, self.last_save))
            self.wait_for_all()  # the first rank is the last one to write
            raise SystemExit(128 + signal.SIGTERM)
        return result

    def _verify(self, folder: Path) -> None:
        """
        Refuse a checkpoint of another trainer, with damaged files, or with an optimizer that this
        run cannot load.
        """
        if (saved := read_saved_trainer(folder)) not in {None, own := library_class(self)}:
            text = f"{folder} was saved by {saved}, but this is {own}: to start from its weights, load the model from"
            raise ArgumentError("host", f"{text} that folder, and leave out resume_from_checkpoint")
        engine, args = self.accelerator.state.deepspeed_plugin, self.args
        stage = None if engine is None else engine.hf_ds_config.get_value("zero_optimization.stage", 0)
        fact = find_other_parts(folder, stage=stage, num_ranks=args.world_size)
        fact = fact or find_damage(folder, share=args.process_index, num_shares=args.world_size)
        if fact := next(filter(None, gather_from_ranks(fact)), None):
            older = name_older(folder) if fact.endswith(COPY_AGAIN) else ""
            raise ArgumentError("host", f"{folder} cannot be resumed from: {fact}{older}")

    def set_initial_training_values(self, *args: Any) -> Any:
        """Return the training counts of the schedule, and print where a resumed run continues."""
        if self.schedule.start.step:
            self.show(f"training continues {describe_resume(self.schedule)}")
        for one in self.pack_batches.changes:
            self.show(f"a setting has changed since {self.last_save}, and this run's value is used: {one}")
        return super().set_initial_training_values(*args)

    def _identity(self) -> RunIdentity:
        """
        Return the settings and digests of model files that a resumed run may not change, and the
        settings that it may change.
        """
        settings = {name: getattr(self.args, name) for name in self.fixed_arguments if hasattr(self.args, name)}
        reference = {"ref_model": _model_facts(getattr(self, "ref_model", None))}
        fixed = Fingerprint(flat_values({**settings, **reference}) | _model_facts(self.model))
        names = (one.name for one in dataclasses.fields(self.args) if is_changeable(one.name))
        others = {name: getattr(self.args, name) for name in names if name not in settings}
        return RunIdentity(fixed, Fingerprint(flat_values(others)))

    def get_batch_samples(self, *args: Any) -> Any:
        """
        Return the batches of a step and their loss divisor.

        Before the first step, one pack of the step is compared with its samples alone.
        """
        batches, num_items = super().get_batch_samples(*args)
        if self._checks_first_pack and batches:
            require_pack_as_alone(self, batches, num_items)
            self._checks_first_pack = False
            self.lap_seconds()
        return batches, num_items

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside this context, each rank computes whole samples, by transformers' own attention."""
        with sharing_by(1), using_native_attention(self.model, self.native):
            yield

    @contextmanager
    def prepared(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the inputs after the trainer's own preparation for a step."""
        yield self._prepare_inputs(inputs)  # type: ignore[attr-defined]  # of the trainer's class

    def get_train_dataloader(self, *_: Any, **__: Any) -> Any:
        """Return the data loader of this rank's training packs."""
        self._loaders.append(loader := self._make_loader(self.train_packs, self.pack_batches))
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """
        Return the data loader of the evaluation packs, or the trainer's own loader for other data.
        ArgumentError is raised if ranks share rows, but the evaluation data have no plan.
        """
        own = eval_dataset is None or eval_dataset is self.eval_dataset or isinstance(eval_dataset, str)
        if own and self._eval_packs is None and self.row_groups is not None:
            raise ArgumentError("host", UNPLANNED_EVALUATION)
        if self._eval_packs is None or not own:
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]  # of the trainer's class
        ranks: dict[str, Any] = {"rank": self.pack_batches.rank, "world_size": self.schedule.world_size}
        batches = EvalBatches(len(self._eval_packs), 1, degrees=self._eval_degrees, **ranks)
        return self._make_loader(self._eval_packs, batches)

    def _make_loader(self, packs: Any, batches: Any) -> PackLoader:
        return PackLoader(packs, self.args, batch_sampler=batches, collate_fn=self.collate)

    def _get_num_items_in_batch(self, batches: list[dict[str, Any]], *args: Any, **options: Any) -> Any:
        """
        Return the divisor of a step's loss: the number of the step's supervised tokens, at least 1.
        Return None in the evaluation of packs, where the loss of each batch is a mean over its own
        tokens.
        """
        if self._evaluated is not None:
            return None
        # Only one of the ranks that share a row counts its tokens.
        batches = [one if self.counts(one) else _without_labels(one) for one in batches]
        num_items = super()._get_num_items_in_batch(batches, *args, **options)  # type: ignore[misc]
        return num_items if num_items is None or self._evaluates_rows else torch.as_tensor(num_items).clamp(min=1)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Return the loss of a batch; pack indices are not passed to the model."""
        inputs = {key: value for key, value in inputs.items() if key != PACK}
        num_items, config = options.get("num_items_in_batch"), self.model.config.get_text_config()
        with ExitStack() as stack:
            if getattr(config, "output_router_logits", False) and num_items is not None:
                # Each batch of each rank adds a loss of routers: weight it by the batch's share.
                share = count_supervised(inputs["labels"]) / float(num_items)
                for owner in [config, *(one for one in self.model.modules() if _ROUTER in vars(one))]:
                    stack.enter_context(replace_attributes(owner, **{_ROUTER: (share * getattr(owner, _ROUTER, 0.0))}))
            return super().compute_loss(model, inputs, *args, **options)  # type: ignore[misc]


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a batch in which all labels are ignored."""
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED_LABEL)} if "labels" in batch else {**batch}


def _model_facts(model: Any) -> dict[str, Any]:
    """Return facts of a model's files, or its name on a hub, or {} for a model built in memory."""
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return (model_file_facts(Path(name)) or {"model.model": name}) if name else {}


def insert_base_class(trainer: Any, base: type) -> None:
    """Give a trainer a new class of the same name, derived from *base* and its previous class."""
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (base, kind), {})


def _start_table(trainer: Any, plan: Plan, schedule: EpochSchedule) -> str:
    """Return the table that describes a trainer's run: data, packs, steps and attention."""
    unit = "rank" if schedule.world_size == trainer.args.world_size else "group"
    rows = describe_training(plan.raw, plan.lengths, schedule, unit=unit)
    attention = trainer.model.config._attn_implementation  # noqa: SLF001  # has no public name
    own = {"plan": plan.checksum[:12], "attention": "varlen" if attention == NAME else attention}
    return format_table(f"{type(trainer).__name__} trains planned packs", rows | own)


def share_packs(
    trainer: Any, schedule: EpochSchedule, plan: Plan, eval_plan: Plan | None
) -> tuple[RowGroups | None, IntArray | None]:
    """
    Return the groups of ranks that share a schedule's rows, and the degree of each evaluation pack.
    The groups are None if no ranks share rows. The degrees are None without an evaluation plan, or
    if all packs have the same degree.

    Args:
        trainer: Trainer of transformers.
        schedule: Schedule of the plan.
        plan: Plan of the training data.
        eval_plan: Plan of the evaluation data, or None.
    """
    args, length = trainer.args, plan.raw.packing_length
    if schedule.degrees is None:
        return RowGroups.make([args.world_size // schedule.world_size], args.ddp_timeout_delta), None
    degrees, eval_degrees = schedule.pack_degrees(0), None
    if eval_plan is not None:
        eval_degrees = pack_degrees(eval_plan.packs.loads(eval_plan.lengths), length, schedule.most_ranks)
        degrees = np.concatenate([degrees, eval_degrees])
    return RowGroups.make(np.unique(degrees), args.ddp_timeout_delta, packing_length=length), eval_degrees


def require_same_on_ranks(args: Any, values: Mapping[str, Any], fault: PackplanError | None = None) -> None:
    """
    Raise MismatchError on every rank if arguments or values differ between ranks.

    Args:
        args: Training arguments of this rank.
        values: Further values of this rank: name -> value. None counts as absent.
        fault: Error of this rank, raised if nothing differs.
    """
    try:
        found = gather_from_ranks({**flat_values(values), **shared_arguments(args.to_dict())})
    except RuntimeError as error:
        fact = "another rank has ended or trains without a plan: see its error, and call use_plan on every rank"
        raise MismatchError("ranks_disagree", fact) from error
    if differences := rank_differences(found):
        fact = format_lines("the ranks differ; give all of them the same arguments and rows", differences)
        raise MismatchError("ranks_disagree", fact, {"differences": differences})
    if fault is not None:
        raise fault
