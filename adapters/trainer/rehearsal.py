"""
The heaviest packs of a plan, trained once before the first step: a run that does not fit into
memory ends in its first minute.

Parameters, buffers, gradients, the optimizer, the random state and metrics are afterwards those of
a run without a rehearsal, bit for bit.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from swift.callbacks.lisa import LISACallback
from swift.trainers import Seq2SeqTrainer

from packplan.adapters.models import local_part, same_state
from packplan.adapters.trainer.loader import NORMALISER
from packplan.core.errors import PackplanError, RunError, counted
from packplan.core.lengths import IntArray
from packplan.core.memory import optimizer_bytes, written_bytes
from packplan.core.ports import RankGroup
from packplan.core.samples import column
from packplan.core.schedule import PackStats, heaviest_packs, shorter_pack

if TYPE_CHECKING:
    from packplan.adapters.trainer.static import PackTrainer

log = logging.getLogger(__name__)

_PRECISION = 1 / 16
"""Part of the heaviest pack's tokens to which the length that fits is found."""

_RISING = (0.5, 0.75)
"""Parts of a pack that are tried before it where ranks meet within a batch."""


def rehearse(trainer: PackTrainer, model: Any, stats: PackStats) -> None:
    """
    Train the heaviest packs of an epoch, and forget them.

    Args:
        trainer: Trainer that is about to take its first step.
        model: Model as the trainer calls it.
        stats: Packs of the epoch.

    Raises:
        RunError: A pack does not fit into the memory of a rank. The text has a length that does.
    """
    if reason := _hindrance(trainer):
        log.info("the heaviest packs are not tried before the first step: %s", reason)
        return
    if not trainer.is_sharded:
        # Ranks that exchange nothing may fail alone, and try something shorter together.
        model = trainer.accelerator.unwrap_model(model, keep_torch_compile=True)
    lengths, supervised = (
        column(trainer.train_dataset.planned, name).astype(np.int64) for name in ("length", "supervised")
    )

    def fits(packs: Sequence[Sequence[int]]) -> bool:
        return _fits(trainer, model, packs)

    heaviest = heaviest_packs(stats, supervised, size=trainer.args.per_device_train_batch_size)
    rehearsal = _Rehearsal(stats, lengths, fits, trainer.group, rising=trainer.is_sharded)
    started, device = time.perf_counter(), trainer.accelerator.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _left_unchanged(trainer, model), _room_for_optimizer(trainer):
        for batch in heaviest:
            rehearsal.try_out(batch)
    _log_success(max(int(stats.tokens[list(batch)].max()) for batch in heaviest), time.perf_counter() - started, device)


def _hindrance(trainer: PackTrainer) -> str | None:
    """Return the reason why a rehearsal would change the training, if there is one."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed updates the weights within the backward pass"
    if "layerwise" in str(trainer.args.optim):
        return f"{trainer.args.optim} updates the weights within the backward pass"
    if any(isinstance(one, LISACallback) for one in trainer.callback_handler.callbacks):
        return "LISA draws the weights to train in each step"
    return None


@attrs.frozen
class _Rehearsal:
    stats: PackStats
    lengths: IntArray
    """Tokens of each sample."""

    fits: Callable[[Sequence[Sequence[int]]], bool]
    """Trains a batch of packs; returns whether there was enough memory."""

    group: RankGroup

    rising: bool
    """
    Whether ranks meet within a batch, as shards do. One that fails there cannot try another, so it
    names the longest that it tried before.
    """

    def try_out(self, batch: Sequence[int]) -> None:
        """Train a batch of packs; RunError if a rank has too little memory."""
        packs = [self.stats.packs[position] for position in batch]
        fitted = self._rise(batch) if self.rising else 0
        if self.fits(packs) if self.rising else self._all_fit(packs):
            return
        raise _too_long(self._tokens(packs), fitted if self.rising else self._longest_that_fits(batch))

    def _rise(self, batch: Sequence[int]) -> int:
        """Train shorter batches; return the tokens of the longest. RunError if one fails."""
        fitted = 0
        for part in _RISING:
            packs = self._shortened(batch, part)
            if not all(packs):
                continue
            if not self.fits(packs):
                raise _too_long(self._tokens(packs), fitted)
            fitted = self._tokens(packs)
        return fitted

    def _longest_that_fits(self, batch: Sequence[int]) -> int:
        """Return the tokens of the longest shorter batch that fits, by bisection; 0 without one."""
        fitted, low, high = 0, 0.0, 1.0
        while high - low > _PRECISION:
            middle = (low + high) / 2
            packs = self._shortened(batch, middle)
            if not all(packs) or self._all_fit(packs):
                low, fitted = middle, self._tokens(packs) or fitted
            else:
                high = middle
        return fitted

    def _all_fit(self, packs: Sequence[Sequence[int]]) -> bool:
        return not self.group.any(not self.fits(packs))

    def _shortened(self, batch: Sequence[int], part: float) -> list[list[int]]:
        """Return packs of at most this part of the longest pack's tokens."""
        most = int(part * self.stats.tokens[list(batch)].max())
        return [shorter_pack(self.stats, self.lengths, position, most=most) for position in batch]

    def _tokens(self, packs: Sequence[Sequence[int]]) -> int:
        """Return the tokens of the longest of some packs."""
        return max(int(self.lengths[list(pack)].sum()) for pack in packs)


def _too_long(tokens: int, fitted: int) -> RunError:
    """
    Return the error of a pack that takes too much memory.

    Args:
        tokens: Tokens of the pack.
        fitted: Tokens of the longest pack that did not; 0 if none was found.
    """
    known = f"a pack of {counted(fitted, 'token')} fits" if fitted else "no shorter one was found that does"
    fact = (
        f"a pack of {counted(tokens, 'token')} does not fit into the memory of a rank, before the first step; {known}"
    )
    return RunError("memory", fact, {"tokens": tokens, "fits": fitted})


def _fits(trainer: PackTrainer, model: Any, packs: Sequence[Sequence[int]]) -> bool:
    """
    Train a batch as the trainer does, without an update; return whether there was enough memory.

    Args:
        trainer: Trainer of the run.
        model: Model as the trainer calls it.
        packs: Samples of each pack of a rank's batch.
    """
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
    else:
        return True
    finally:
        model.zero_grad(set_to_none=True)
    gc.collect()
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return False


@contextmanager
def _left_unchanged(trainer: PackTrainer, model: Any) -> Iterator[None]:
    """
    Restore the random state, the buffers and the metrics.

    Args:
        trainer: Trainer of the run.
        model: Model of the trainer.
    """
    metrics, trainer.custom_metrics = trainer.custom_metrics, {k: copy(v) for k, v in trainer.custom_metrics.items()}
    try:
        with same_state(model):
            yield
    finally:
        trainer.custom_metrics = metrics


@contextmanager
def _room_for_optimizer(trainer: PackTrainer) -> Iterator[None]:
    """Hold the memory that an optimizer without a state will take, on accelerators."""
    held: list[torch.Tensor] = []
    device = trainer.accelerator.device
    if not trainer.optimizer.state and device.type != "cpu":
        for weight in chain.from_iterable(group["params"] for group in trainer.optimizer.param_groups):
            own = local_part(weight)
            size = optimizer_bytes(str(trainer.args.optim), num_trained=own.numel(), itemsize=own.element_size())
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
    try:
        yield
    finally:
        held.clear()


def _log_success(tokens: int, seconds: float, device: torch.device) -> None:
    """
    Log that the heaviest packs fit.

    Args:
        tokens: Tokens of the longest.
        seconds: Seconds that all took.
        device: Device of this rank.
    """
    memory = ""
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
        memory = f", with {written_bytes(peak)} of {written_bytes(total)} at the peak"
    log.info("the heaviest packs, of up to %s, fit%s (tried in %.1f s)", counted(tokens, "token"), memory, seconds)
