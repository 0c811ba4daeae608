"""
The heaviest packs of a plan, trained once before the first step: a run that does not fit into
memory ends in its first minute.

Parameters, buffers, gradients, the optimizer, the random state and metrics are afterwards those of
a run without a rehearsal, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from swift.callbacks.lisa import LISACallback
from swift.trainers import Seq2SeqTrainer

from packplan.adapters.models import local_part, same_state
from packplan.adapters.trainer.loader import NORMALISER
from packplan.core.errors import PackplanError, RunError, counted
from packplan.core.memory import optimizer_bytes
from packplan.core.samples import column
from packplan.core.schedule import PackStats, heaviest_packs

if TYPE_CHECKING:
    from packplan.adapters.trainer.static import PackTrainer

log = logging.getLogger(__name__)


def rehearse(trainer: PackTrainer, model: Any, stats: PackStats) -> None:
    """
    Train the heaviest packs of an epoch forward and backward, and forget them.

    Args:
        trainer: Trainer that is about to take its first step.
        model: Model as the trainer calls it.
        stats: Packs of the epoch.

    Raises:
        RunError: A pack does not fit into the memory of a rank.
    """
    if reason := _hindrance(trainer):
        log.info("the heaviest packs are not tried before the first step: %s", reason)
        return
    if not trainer.is_sharded:
        # Ranks that exchange nothing may fail alone, and end together.
        model = trainer.accelerator.unwrap_model(model, keep_torch_compile=True)
    supervised = column(trainer.train_dataset.planned, "supervised").astype(np.int64)
    heaviest = heaviest_packs(stats, supervised, size=trainer.args.per_device_train_batch_size)
    started = time.perf_counter()
    with nothing_kept(trainer, model):
        for batch in heaviest:
            is_short = not _fits(trainer, model, [stats.packs[pack] for pack in batch])
            if is_short if trainer.is_sharded else trainer.group.any(is_short):
                tokens = int(stats.tokens[list(batch)].max())
                fact = f"a pack of {counted(tokens, 'token')} does not fit into the memory of a rank"
                raise RunError("memory", f"{fact}, before the first step", {"tokens": tokens})
    longest = counted(int(stats.tokens.max()), "token")
    log.info("the heaviest packs, of up to %s, fit (tried in %.1f s)", longest, time.perf_counter() - started)


def _hindrance(trainer: PackTrainer) -> str | None:
    """Return the reason why a rehearsal would change the training, if there is one."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed updates the weights within the backward pass"
    if "layerwise" in str(trainer.args.optim):
        return f"{trainer.args.optim} updates the weights within the backward pass"
    if any(isinstance(one, LISACallback) for one in trainer.callback_handler.callbacks):
        return "LISA draws the weights to train in each step"
    return None


def _fits(trainer: PackTrainer, model: Any, packs: Sequence[Sequence[int]]) -> bool:
    """Train a batch as the trainer does, without an update; return whether memory sufficed."""
    encoded = [trainer.train_dataset.encoded(0, pack) for pack in packs]
    for one in encoded:
        if isinstance(one, PackplanError):
            raise one
    batch = trainer.data_collator(encoded)
    weight = torch.tensor(max(batch[NORMALISER], 1.0), device=trainer.accelerator.device)
    try:
        # Not the trainer's own method, which counts the batch.
        Seq2SeqTrainer.training_step(trainer, model, batch, weight)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


@contextmanager
def nothing_kept(trainer: PackTrainer, model: Any) -> Iterator[None]:
    """
    Restore the random state, the buffers and the metrics at the end; on accelerators, hold the
    memory meanwhile that an optimizer without a state will take.

    Args:
        trainer: Trainer of the run.
        model: Model of the trainer.
    """
    held, device = [], trainer.accelerator.device
    if device.type != "cpu" and not trainer.optimizer.state:
        for own in (local_part(one) for group in trainer.optimizer.param_groups for one in group["params"]):
            size = optimizer_bytes(str(trainer.args.optim), num_trained=own.numel(), itemsize=own.element_size())
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
    metrics, trainer.custom_metrics = trainer.custom_metrics, {k: copy(v) for k, v in trainer.custom_metrics.items()}
    try:
        with same_state(model):
            yield
    finally:
        trainer.custom_metrics = metrics
        held.clear()
