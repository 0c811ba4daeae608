"""
ms-swift's trainer on packs of a plan or of a stream.

The trainer has these fixes, without which training would go wrong, in most cases silently:

- the fourth row of position ids, which keeps samples apart
- a divisor of the loss that is summed over all ranks
- NEFTune noise that is scaled for each sample, not for a whole row
- an evaluation loss that is a mean over tokens, not over packs
- weights that are restored exactly as they were saved
- errors of loader processes that reach the caller
- a checkpoint and a clean end on SIGTERM
- an error before saving, if a loss, gradient or weight is not finite

With a plan, the packs of a step pass through these methods, from top to bottom. The table names the
class that defines each method: `PlanTrainer`, one of its base classes, or a class that loads data.
Few methods are defined by several of these classes, so `super()` usually calls a method of ms-swift
or transformers. `LogsPacks` adds statistics to the log, and `KeepsCheckpoints` checks weights and
adds digests.

| method | class | does |
|---|---|---|
| `train` | `CheckedTrainer` | raises an error that names a lost loader process |
| `_inner_training_loop` | `FollowsSchedule` | starts, or resumes from a checkpoint |
| `_inner_training_loop` | `ComputesPacks` | scales NEFTune's noise for each sample in training |
| `get_train_dataloader` | `PlanTrainer` | loads `PackedDataset` in the order of `PackBatches` |
| `set_initial_training_values` | `FollowsSchedule` | counts steps and epochs by the schedule |
| `_init_training_state` | `FollowsSchedule` | returns the epoch at which the schedule starts |
| `_run_epoch` | `FollowsSchedule` | selects the remaining batches of the epoch |
| `_serve_epoch` | `PlanTrainer` | selects the epoch's packs, and logs their statistics |
| `__iter__` | `PackLoader` | moves batches to the device, and raises errors that workers returned |
| `__iter__` | `PackBatches` | yields the pack indices of a batch |
| `__getitem__` | `PackedDataset` | encodes the samples of a pack, and compares them with the plan |
| `__call__` | `Collator` | joins samples into a row, or pads them, and weights their tokens |
| `get_batch_samples` | `FollowsSchedule` | compares the batches of a step with the schedule |
| `_get_num_items_in_batch` | `CheckedTrainer` | sums the weights of a step's tokens |
| `training_step` | `StopsAtNonFinite` | adds up the loss, for the check that it is finite |
| `_prepare_inputs` | `CheckedTrainer` | adds the row of positions that keeps samples apart |
| `compute_loss` | `ComputesPacks` | weights the loss, so that a row shared by ranks counts once |
| `compute_loss` | ms-swift's | divides the sum of weighted losses by the step's sum of weights |
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from swift.trainers import Seq2SeqTrainer
from swift.trainers.patcher import PrinterCallbackNew, ProgressCallbackNew
from transformers import TrainerCallback, TrainerControl, TrainerState

from packplan.adapters.attention.packed_row import prepend_text_positions
from packplan.adapters.finite import StopsAtNonFinite
from packplan.adapters.hf.following import ComputesPacks, FollowsSchedule
from packplan.adapters.hf.saving import KeepsCheckpoints
from packplan.adapters.hf.telemetry import LogsPacks, TimesSteps
from packplan.adapters.loaders.batches import EvalBatches, PackBatches
from packplan.adapters.loaders.packs import NORMALISER, PACK, PackLoader
from packplan.adapters.models import load_by_model_class, replace_attributes
from packplan.adapters.processes import wrap_process_errors
from packplan.adapters.trainer.checkpoints import CHECKPOINT_KEY, attention_entry
from packplan.adapters.trainer.console import RunConsole
from packplan.adapters.trainer.loader import Collator, PackedDataset, Reduction, prepare_worker, with_zero_weights
from packplan.core.equality import AttentionChoice, Precision
from packplan.core.errors import ConfigError
from packplan.core.ports import RankGroup
from packplan.core.schedule import PackStats

PLAIN_LOSS = {"router_aux_loss_coef": 0.0, "enable_dft_loss": False}
"""Values of ms-swift's training arguments that reduce the loss to the cross entropy."""


class SkipDuplicateFinalEval(TrainerCallback):
    """
    Callback that skips the second evaluation and save after the last step.

    Without this callback, ms-swift evaluates and saves at the last step, and again at the end of
    the epoch.
    """

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:  # noqa: ARG002
        """Cancel evaluation and saving if the last step has done both."""
        if state.global_step == state.max_steps:
            control.should_evaluate = control.should_save = False


class KeepIntervals(TrainerCallback):
    """
    Callback that restores this run's intervals of logging, saving and evaluation after a resume.
    """

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """
        Replace intervals that a checkpoint may have restored in *state* with this run's intervals.
        """
        state.compute_steps(args, state.max_steps)


class CheckedTrainer(KeepsCheckpoints, StopsAtNonFinite, ComputesPacks, TimesSteps, Seq2SeqTrainer):
    """
    ms-swift's trainer on packs, with the fixes that the module's docstring lists.

    Attributes:
        attention: Attention used in training; checkpoints store its name.
        learner: Data-parallel rank, and number of data-parallel ranks. Ranks that share rows count
            as one.
        has_supervised: Whether any step so far had a token whose weight in the loss is above 0.
    """

    checkpoint_key, loads_by_class = CHECKPOINT_KEY, True

    def __init__(
        self,
        *,
        group: RankGroup,
        attention: AttentionChoice,
        packed: bool,
        eval_dataset: PackedDataset | None,
        learner: tuple[int, int] | None = None,
        reduction: Reduction = "token",
        **options: Any,
    ) -> None:
        """
        Prepare training.

        Args:
            group: Ranks of the run.
            attention: Attention used in training.
            packed: Whether the samples of a training pack share a row.
            eval_dataset: Packs of the evaluation's raw plan, or None.
            learner: Data-parallel rank, and number of data-parallel ranks; None makes each rank a
                data-parallel rank.
            reduction: Weighting of samples of unequal length in the loss.
            **options: Options of ms-swift's trainer: model, args, template and train_dataset.

        Raises:
            ConfigError: The trainer refuses a combination of settings.
        """
        self.group, self.attention, self.reduction = group, attention, reduction
        self.last_save = options["args"].resume_from_checkpoint
        # If an evaluation has nothing to learn, ms-swift unsets `eval_strategy`, but not this.
        options["args"].eval_on_start &= eval_dataset is not None
        self.learner = learner or (group.rank, group.world_size)
        self.control: TrainerControl
        self.lap_seconds()
        self.has_supervised = False
        self._loaders = []
        try:
            super().__init__(eval_dataset=eval_dataset, **options)
        except ValueError as error:
            raise ConfigError.for_key("training", f"is refused by the trainer: {error}") from error
        self.data_collator: Any = Collator(self.template, packed=packed, reduction=reduction)
        for printing in (ProgressCallbackNew, PrinterCallbackNew):
            self.remove_callback(printing)
        self.keep_checkpoints(any_rank=group.any, replaces_handler=True, **attention_entry(attention.name))
        self._console = RunConsole(draws=not self.args.disable_tqdm)
        for own in (SkipDuplicateFinalEval(), KeepIntervals(), self._console):
            self.add_callback(own)

    @property
    def is_sharded(self) -> bool:
        """Whether checkpoints may be sharded, because FSDP or DeepSpeed is in use."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @property
    def precision(self) -> Precision:
        """Lowest precision of the model's weights and computation."""
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(self.accelerator.mixed_precision, "float32")
        used = {str(parameter.dtype).removeprefix("torch.") for parameter in self.model.parameters()} | {mixed}
        coarser: tuple[Precision, ...] = ("bfloat16", "float16")
        return next((name for name in coarser if name in used), "float32")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PackLoader:
        """Return the loader of this rank's evaluation packs, in the order of the plan."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        rank, world_size = self.learner
        size, ranks = self.args.per_device_eval_batch_size, {"rank": rank, "world_size": world_size}
        batches = EvalBatches(len(dataset), size, degrees=dataset.degrees, **ranks)
        return self._open_loader(
            dataset,
            batch_sampler=batches,
            collate_fn=Collator(self.template, packed=dataset.packed),
            persistent_workers=False,  # each evaluation opens a loader, so they would pile up
        )

    def _open_loader(self, dataset: Any, **options: Any) -> PackLoader:
        """Return a loader whose worker processes end when this process ends."""
        start = partial(prepare_worker, num_workers=self.args.dataloader_num_workers, rank=self.group.rank)
        options |= self._maybe_multiprocessing_context(self.args)
        return PackLoader(dataset, self.args, worker_init_fn=start, **options)

    def train(self) -> Any:
        """
        Train from the start or the checkpoint, and then end the loaders' processes.

        Raises:
            RunError: A loader's process was lost during training.
        """
        advice = (
            f"lower training.dataloader_num_workers (now {self.args.dataloader_num_workers:,}; 0 loads in the training "
            "process) or training.dataloader_prefetch_factor"
        )
        try:
            with wrap_process_errors("loading data", advice):
                return super().train(resume_from_checkpoint=self.args.resume_from_checkpoint)
        finally:
            self._console.close()
            for loader in self._loaders:
                loader.close()

    def _load_optimizer_and_scheduler(self, *arguments: Any, **options: Any) -> None:
        needed = {*chain(*self.optimizer.param_groups)}
        with self.loading_together("optimizer state"):
            super()._load_optimizer_and_scheduler(*arguments, **options)
            # The first step would fail on missing settings.
            if lacking := sorted(needed.difference(*self.optimizer.param_groups)):
                raise ValueError(f"it lacks {', '.join(lacking)}, which this training.optim needs")

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> torch.Tensor:
        """
        Return the sum of a step's token weights over all ranks, by which `compute_loss` divides; 1
        if the sum is 0. In the evaluation of packs, return the sum for the current batch instead.
        """
        if self._evaluated is not None:  # inside of `ComputesPacks.evaluation_loop`
            return torch.tensor(self._evaluated.weight or 1.0, device=device)
        weights = [batch[NORMALISER] for batch in batch_samples if self.counts(batch)]
        total = self.sum_over_ranks(torch.tensor(sum(weights), dtype=torch.float64))
        self.has_supervised |= bool(total)
        # A step without supervised tokens has a loss of 0, and not of 0 / 0.
        return torch.where(total > 0, total, 1.0).to(device, torch.float32)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs on the device, with the positions that keep samples apart."""
        if self._evaluated is not None and self._evaluated.next_is_repeated:
            inputs = with_zero_weights(inputs)  # counts in no metric
        rest = {key: value for key, value in inputs.items() if key not in (PACK, NORMALISER)}  # no model takes these
        return prepend_text_positions(super()._prepare_inputs(rest))

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """
        Evaluate only the loss of all packs, and return metrics that are means over tokens.

        Raises:
            MismatchError: A pack is missing, or another pack is loaded in its place.
        """
        with self.media_hook(), replace_attributes(self.args, prediction_loss_only=True, **PLAIN_LOSS):
            metrics: dict[str, float] = super().evaluate(*arguments, **options)
            return metrics

    @contextlib.contextmanager
    def media_hook(self) -> Iterator[None]:
        """
        Inside this context, let ms-swift's hook pass images to the model.

        If the hook is registered already, as it is during `train`, or if the model takes only text,
        the context does nothing.
        """
        if self.template._handles or not self.model_meta.is_multimodal:  # noqa: SLF001  # has no public name
            yield
            return
        self.template.register_post_encode_hook([self.accelerator.unwrap_model(self.model)])
        try:
            yield
        finally:
            self.template.remove_post_encode_hook()

    def _load_best_model(self) -> None:
        best, plain = self.state.best_model_checkpoint, self.accelerator.unwrap_model(self.model)
        if best is None or self.is_sharded or not load_by_model_class(plain, best):
            super()._load_best_model()


class PlanTrainer(LogsPacks, FollowsSchedule, CheckedTrainer):
    """ms-swift's trainer on the packs of a plan."""

    def __init__(self, *, pack_batches: PackBatches, pack_stats: Callable[[int], PackStats], **options: Any) -> None:
        """
        Prepare training.

        Args:
            pack_batches: Batch sampler of this rank's packs, in the order of their schedule.
            pack_stats: Function that returns statistics of the packs of an epoch, for the log.
            **options: Options of `CheckedTrainer`.
        """
        self.pack_stats = pack_stats
        learner = pack_batches.rank, pack_batches.schedule.world_size
        super().__init__(packed=options["train_dataset"].packed, learner=learner, **options)
        self.follow(pack_batches, around_epoch=self._serve_epoch)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:  # noqa: ARG002  # the schedule skips by itself
        """Return the loader of this rank's packs, in the order of the epoch schedule."""
        # Persistent workers would keep the packs of another epoch.
        fresh = {"persistent_workers": False} if self.schedule.epochs_differ else {}
        loader = self._open_loader(
            self.train_dataset, batch_sampler=self.pack_batches, collate_fn=self.data_collator, **fresh
        )
        self._loaders.append(loader)
        return loader

    def _serve_epoch(self, epoch: int) -> AbstractContextManager[None]:
        """
        Make the data set serve the packs of *epoch*; return the context that logs their statistics.
        """
        self.train_dataset.set_epoch(epoch)
        return self.logging_epoch(epoch)


def logit_inputs(prepared: dict[str, Any]) -> dict[str, Any]:
    """
    Return prepared inputs without labels and other keys that would make a forward pass compute a
    loss.
    """
    others = ("labels", "compute_loss_func", "loss_scale", "text_position_ids", "channel")
    return {key: value for key, value in prepared.items() if key not in others}
