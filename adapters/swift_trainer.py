"""
ms-swift's trainer, fed with packs.

What it adds, each because the trainer goes wrong silently without it (measured; tests hold it):
the fourth position row that keeps samples apart, weights that resume as they were saved, an evaluation
that weighs tokens and not packs, errors that reach the caller, and a clean end on SIGTERM.
"""

from __future__ import annotations

import contextlib
import sys
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from accelerate.data_loader import SkipBatchSampler
from swift.dataloader import BatchSamplerShard
from swift.template import Template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from swift.trainers.patcher import PrinterCallbackNew, ProgressCallbackNew
from swift.utils import seed_worker
from torch.utils.data import DataLoader
from transformers import TrainerControl
from transformers.trainer_utils import EvalLoopOutput, get_last_checkpoint

from adapters.packed_dataset import PackedDataset, PackLoader, passing_errors
from adapters.swift_samples import IGNORED_LABEL
from adapters.trainer_callbacks import NotTwice, SaveOnSigterm
from core.config import RunConfig
from core.errors import ConfigError
from core.ports import RankGroup

TrainingArguments: typing.TypeAlias = Seq2SeqTrainingArguments

_LOGIT_ROWS = 2048
"""Rows of logits whose loss is computed at a time in evaluation, so that float32 copies stay small."""


def trainer_fields() -> dict[str, Any]:
    """Return the settings that ms-swift's training arguments know, with their types."""
    hints = typing.get_type_hints(TrainingArguments)
    return {name: hints[name] for name in TrainingArguments.__dataclass_fields__ if name in hints}


def training_arguments(
    config: RunConfig, *, per_device_train_batch_size: int, gradient_accumulation_steps: int, multimodal: bool
) -> TrainingArguments:
    """
    Build ms-swift's training arguments; ConfigError if it refuses them.

    Args:
        config: The run.

        per_device_train_batch_size: What training uses, 1 when packing.

        gradient_accumulation_steps: Batches of a rank in one optimizer step.

        multimodal: Whether some packs use weights that others do not.
    """
    training = config.training
    defaults: dict[str, Any] = {
        "check_model": False,  # asks a hub, for 20 s when there is none
        "eval_strategy": "epoch" if config.custom.val_jsonl else "no",
        "ddp_find_unused_parameters": multimodal,
        "data_seed": training.seed,
        "disable_tqdm": not sys.stderr.isatty(),
    }
    fixed = {
        "output_dir": training.output_dir,
        "per_device_train_batch_size": per_device_train_batch_size,
        "per_device_eval_batch_size": 1 if config.eval_packing else training.per_device_eval_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        # The plan is aligned before: nothing is left for the loader to drop, but incomplete padded batches.
        "dataloader_drop_last": training.dataloader_drop_last,
        "num_train_epochs": training.num_train_epochs,
        "max_steps": training.max_steps,
        "seed": training.seed,
        "tuner_type": training.tuner_type,
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
    }
    on_cpu = training.trainer.get("use_cpu") or not torch.cuda.is_available()
    if on_cpu:
        defaults["use_cpu"] = True
    if torch.distributed.is_initialized():
        defaults["ddp_backend"] = "gloo" if on_cpu else "nccl"
    try:
        arguments = TrainingArguments(**(defaults | dict(training.trainer) | fixed))
    except (ValueError, ImportError, TypeError, AssertionError) as error:
        raise ConfigError.of("training", f"is refused by ms-swift's training arguments: {error}") from error
    if arguments.n_gpu > 1:
        reason = (
            f"would tear each pack apart over {arguments.n_gpu} GPUs (DataParallel): start one process a GPU with "
            f"torchrun --nproc-per-node {arguments.n_gpu}, or set CUDA_VISIBLE_DEVICES to one"
        )
        raise ConfigError.of("training", reason)
    return arguments


class PackTrainer(Seq2SeqTrainer):
    """ms-swift's trainer over packs that a plan has aligned to the ranks."""

    def __init__(
        self,
        *,
        group: RankGroup,
        train_dataset: PackedDataset,
        eval_dataset: PackedDataset | None,
        num_eval_items: int,
        **options: Any,
    ) -> None:
        """
        Prepare training.

        Args:
            group: The ranks.

            train_dataset: Packs, a multiple of the ranks.

            eval_dataset: Packs, or None.

            num_eval_items: The first so many items count; the rest repeat some of them to fill the ranks.

            **options: Of ms-swift's trainer: model, args and template.
        """
        self.group = group
        self.num_eval_items = num_eval_items
        self.control: TrainerControl
        super().__init__(train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
        for callback in self.callback_handler.callbacks:
            # ms-swift's own start their clock when training begins, and fail on what is logged before.
            if isinstance(callback, (ProgressCallbackNew, PrinterCallbackNew)):
                callback.start_time, callback.start_step = time.time(), 0
        self.add_callback(SaveOnSigterm(group))
        self.add_callback(NotTwice())

    def _get_data_collator(self, args: Any, template: Template) -> Callable[[list[Any]], Any]:
        collate: Callable[[list[Any]], Any] = super()._get_data_collator(args, template)
        return passing_errors(collate)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:
        """Serve this rank's packs, in an order drawn anew from seed and epoch."""
        args = self.args
        sampler: Any = BatchSamplerShard(
            len(self.train_dataset),
            batch_size=self._train_batch_size,
            shuffle=args.train_dataloader_shuffle,
            drop_last=args.dataloader_drop_last,
            data_seed=args.data_seed,
        )
        if skip_batches:
            sampler = SkipBatchSampler(sampler, skip_batches=skip_batches)
        workers = args.dataloader_num_workers
        return PackLoader(
            self.train_dataset,
            device=self.accelerator.device,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=self.group.rank),
            **self._worker_options(),
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PackLoader:
        """Serve this rank's evaluation packs in the order of the plan."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        size = self.args.per_device_eval_batch_size
        return PackLoader(
            dataset,
            device=self.accelerator.device,
            batch_sampler=_EvalBatches(len(dataset), size, rank=self.group.rank, world_size=self.group.world_size),
            collate_fn=passing_errors(partial(_collate_as, self.template, grouped=dataset.grouped)),
            # Each evaluation has a loader of its own: workers that outlive it would pile up.
            **(self._worker_options() | {"persistent_workers": False}),
        )

    def _worker_options(self) -> dict[str, Any]:
        args = self.args
        return {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            **self._maybe_multiprocessing_context(args),
        }

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        positions, text = prepared.get("position_ids"), prepared.get("text_position_ids")
        # transformers separates packed samples only when the text positions come as a first, fourth row;
        # ms-swift strips it, and samples would attend to each other. Padded batches have a mask instead.
        if positions is not None and text is not None and "attention_mask" not in prepared and len(positions) == 3:
            prepared["position_ids"] = torch.cat([text[None], positions])
        return prepared

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,  # noqa: ARG002, FBT001  # the trainer's signature
        ignore_keys: list[str] | None = None,  # noqa: ARG002
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """
        Measure the token mean of the loss over all items once, whatever the ranks and packs.

        Items that only fill the ranks weigh nothing. Sums are in float64.
        """
        del description
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        model = self.model_wrapped if sharded else self.accelerator.unwrap_model(self.model, keep_torch_compile=True)
        if not sharded and next(model.parameters()).device != self.accelerator.device:
            model.to(self.accelerator.device)
        was_training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        try:
            with torch.no_grad(), self._media_hook(), self.accelerator.autocast():
                for number, inputs in enumerate(dataloader):
                    self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                    counted = number * self.group.world_size + self.group.rank < self._num_eval_batches()
                    sums += self._token_sums(model, inputs) * counted
        finally:
            model.train(was_training)
        if self.group.world_size > 1:
            torch.distributed.all_reduce(sums)
        loss, correct, tokens = sums.tolist()
        metrics = {
            f"{metric_key_prefix}_loss": loss / tokens if tokens else float("nan"),
            f"{metric_key_prefix}_token_acc": correct / tokens if tokens else float("nan"),
            f"{metric_key_prefix}_tokens": int(tokens),
        }
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=self.num_eval_items)

    def _num_eval_batches(self) -> int:
        size: int = self.args.per_device_eval_batch_size
        return -(-self.num_eval_items // size)

    def _token_sums(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return loss, correct tokens and counted tokens of a batch; float64 of shape (3,)."""
        with self.template.forward_context(self.model, inputs):
            inputs = self._prepare_inputs(inputs)
            for key in ("compute_loss_func", "loss_scale", "text_position_ids", "channel"):
                inputs.pop(key, None)
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device)
        sums = torch.zeros(3, dtype=torch.float64)
        for rows, targets in zip(logits.split(_LOGIT_ROWS), labels.split(_LOGIT_ROWS), strict=True):
            losses = F.cross_entropy(rows.float(), targets, ignore_index=IGNORED_LABEL, reduction="none")
            kept = targets != IGNORED_LABEL
            correct = (rows.argmax(-1) == targets) & kept
            sums += torch.stack([losses.double().sum(), correct.sum(), kept.sum()]).double().cpu()
        return sums

    @contextlib.contextmanager
    def _media_hook(self) -> Iterator[None]:
        # Images reach the model through a hook that `train` registers; before training it is missing.
        if self.template._handles or not self.model_meta.is_multimodal:  # noqa: SLF001  # no public question
            yield
            return
        self.template.register_post_encode_hook([self.accelerator.unwrap_model(self.model)])
        try:
            yield
        finally:
            self.template.remove_post_encode_hook()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_strictly(resume_from_checkpoint, model or self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_strictly(self.state.best_model_checkpoint, self.model):
            super()._load_best_model()

    def _load_strictly(self, checkpoint: str | None, model: Any) -> bool:
        """Load whole weights through the model's own class, which knows the names they were saved under."""
        plain = self.accelerator.unwrap_model(model)
        if checkpoint is None or hasattr(plain, "peft_config") or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False
        saved = type(plain).from_pretrained(checkpoint, dtype=plain.dtype)
        plain.load_state_dict(saved.state_dict(), strict=True)
        return True


class _EvalBatches:
    """
    Batches of item positions, dealt to the ranks in turn: batch b is on rank b % world_size.

    Every rank has the same number; what lacks at the end is repeated from the front.
    """

    def __init__(self, num_items: int, batch_size: int, *, rank: int, world_size: int) -> None:
        self._starts = range(0, num_items, batch_size)
        total = -(-len(self._starts) // world_size) * world_size
        self._mine = range(rank, total, world_size)
        self._num_items, self._size = num_items, batch_size

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._mine:
            start = self._starts[batch % len(self._starts)]
            yield list(range(start, min(start + self._size, self._num_items)))


def _collate_as(template: Template, batch: list[Any], *, grouped: bool) -> dict[str, Any]:
    """Collate packed or padded, whatever the template is set to for training."""
    before = template.packing, template.padding_free
    template.packing = template.padding_free = grouped
    try:
        collated: dict[str, Any] = template.data_collator(batch)
    finally:
        template.packing, template.padding_free = before
    return collated


def was_terminated(trainer: PackTrainer) -> bool:
    """Return whether SIGTERM ended training."""
    return any(isinstance(c, SaveOnSigterm) and c.received for c in trainer.callback_handler.callbacks)


def checkpoint_to_resume(wanted: str | None, output_dir: str) -> str | None:
    """Return the checkpoint's folder that *wanted* names, or None; ConfigError if there is none."""
    if wanted is None:
        return None
    found = get_last_checkpoint(output_dir) if wanted == "last" and Path(output_dir).is_dir() else wanted
    if found is None or not (Path(found) / "trainer_state.json").is_file():
        reason = f"is {wanted}, but there is no such checkpoint (in {output_dir}): remove it to start anew"
        raise ConfigError.of("training.resume_from_checkpoint", reason)
    return str(found)


def history(trainer: PackTrainer) -> list[Mapping[str, Any]]:
    """Return what the trainer logged, in order."""
    return list(trainer.state.log_history)
