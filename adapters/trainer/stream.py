"""
Trainer of a stream: packs come as they fill, so their number is unknown in advance.

Ranks run out at different times. Before each step they agree, by one small collective, whether all
of them have a whole window of packs. If one has not, the epoch ends for all, and the rest of the
others is logged. The stream's losses so far are logged with every loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import chain
from typing import Any

import attrs
import torch
from transformers import Trainer

from packplan.adapters.trainer.base import PackingTrainer
from packplan.adapters.trainer.dynamic_dataset import StreamCounts
from packplan.adapters.trainer.loader import LENGTHS, PackLoader
from packplan.core.config import LESS_DROPPED
from packplan.core.errors import agree, counted
from packplan.core.packs import filled

log = logging.getLogger(__name__)


@attrs.frozen
class StreamTotals:
    """Counts of a stream's samples, over all ranks and epochs so far."""

    counts: StreamCounts

    trained: int
    """Samples in packs that were trained."""

    def __str__(self) -> str:
        counts, share = self.counts, self.counts.dropped_tokens / max(1, self.counts.tokens)
        waiting = counts.samples - self.trained - counts.dropped - counts.skipped
        return (
            f"{counted(counts.samples, 'sample')} came: {self.trained:,} trained, {counts.dropped:,} dropped in "
            f"{counted(counts.dropped_packs, 'underfilled pack')} ({share:.2%} of the tokens), {counts.skipped:,} "
            "skipped as long, "
            f"{waiting:,} in packs that were not trained or not full; {counted(counts.long, 'long sample')} "
            f"{agree(counts.long, 'was a pack of its own', 'were packs of their own')}"
        )


class StreamTrainer(PackingTrainer):
    """ms-swift's trainer on a `DynamicDataset`; it ends after `max_steps`, in any epoch."""

    def __init__(
        self,
        *,
        packing_length: int,
        max_dropped_share: Decimal,
        extra: Callable[[], Mapping[str, tuple[float, int]]],
        **options: Any,
    ) -> None:
        """
        Prepare training.

        Args:
            packing_length: Tokens of a pack, to compute its fill.
            max_dropped_share: Share of tokens in dropped packs above which the log warns, once.
            extra: Function that returns sum and count by name, logged as means since its last call.
                Names are the same on every rank.
            **options: Options of `PackingTrainer`; train_dataset is a `DynamicDataset`.
        """
        self.packing_length, self.max_dropped_share, self.extra = packing_length, max_dropped_share, extra
        self._earlier, self._trained, self._has_warned = StreamCounts(), 0, False
        self._lengths: list[tuple[int, ...]] = []
        self._left_over = self._epoch = 0
        super().__init__(**options)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:  # noqa: ARG002  # a stream cannot skip
        """Return the loader of this rank's packs, which come as they fill."""
        return PackLoader(
            self.train_dataset,
            device=self.accelerator.device,
            batch_size=1,
            collate_fn=self.data_collator,
            # Persistent workers would not learn of the next epoch.
            **(self._worker_options() | {"persistent_workers": False}),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """Return a window of packs; if a rank has no whole one, return none and end the epoch."""
        del num_batches  # a guess of the trainer
        window = []
        for batch in epoch_iterator:
            window.append(batch)
            if len(window) == self.args.gradient_accumulation_steps:
                break
        if self.group.any(len(window) < self.args.gradient_accumulation_steps):
            self._left_over = len(window) + sum(1 for _ in epoch_iterator)
            self.control.should_epoch_stop = True
            self._epoch += 1  # now logged as done, as with a plan
            return [], None
        return window, self._get_num_items_in_batch(window, device)

    def _run_epoch(self, *, epoch: int, **options: Any) -> None:
        self._left_over, self._epoch = 0, epoch
        self.seconds_since_reading()
        super()._run_epoch(epoch=epoch, **options)
        counts = self._epoch_counts()
        self._earlier += counts
        self.callback_handler.train_dataloader.counts = StreamCounts()
        if not self.control.should_epoch_stop:
            return  # the last step or SIGTERM came before the end of the stream: counts are incomplete
        numbers = torch.tensor([*attrs.astuple(counts), self._left_over])
        *summed, left_over = self.sum_over_ranks(numbers).tolist()
        total = StreamCounts(*summed)
        logs = {
            "epoch_samples": total.samples,
            "epoch_packs": total.packs,
            "epoch_fill_mean": total.filled_tokens / max(1, total.packs) / self.packing_length,
            "epoch_long_share": total.long / max(1, total.samples),
            "epoch_long_samples": total.long,
            "epoch_long_pack_share": total.long / max(1, total.packs),
            "epoch_skipped_share": total.skipped / max(1, total.samples),
            "epoch_skipped_samples": total.skipped,
            "epoch_dropped_samples": total.dropped,
            "epoch_left_over_packs": left_over,
        }
        self.state.epoch = float(self._epoch)
        Trainer.log(self, logs)

    def totals(self) -> StreamTotals:
        """Return the counts of all samples so far; every rank calls this."""
        numbers = torch.tensor([*attrs.astuple(self._earlier + self._epoch_counts()), self._trained])
        *summed, trained = self.sum_over_ranks(numbers).tolist()
        return StreamTotals(StreamCounts(*summed), trained)

    def _epoch_counts(self) -> StreamCounts:
        """Return the counts of this rank's samples in the current epoch, up to its last pack."""
        counts: StreamCounts = self.callback_handler.train_dataloader.counts
        return counts

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        """Train on one pack, and record its samples' lengths."""
        self._lengths.append(inputs[LENGTHS])
        self._trained += len(inputs[LENGTHS])
        loss: torch.Tensor = super().training_step(model, inputs, *arguments, **options)
        return loss

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log a step's loss with the stats of the steps since the last one, over all ranks."""
        if "loss" in logs:
            logs = {**logs, **self._window_stats(), **self._lost_samples()}
        if self.state.epoch is not None:
            # The trainer's share of the epoch is a guess: the number of packs is unknown.
            self.state.epoch = float(self._epoch)
        super().log(logs, *arguments, **options)

    def _lost_samples(self) -> dict[str, int]:
        """Return the stream's lost samples so far; warn once if they exceed the limit."""
        totals = self.totals()
        counts = totals.counts
        if counts.drops_more_than(self.max_dropped_share) and not self._has_warned:
            self._has_warned = True
            if self.group.rank == 0:
                log.warning(
                    "the stream drops more than %s of its tokens (training.packing_max_dropped_share); so far %s. %s",
                    self.max_dropped_share,
                    totals,
                    LESS_DROPPED,
                )
        return {
            "stream_samples": counts.samples,
            "stream_long_samples": counts.long,
            "stream_skipped_samples": counts.skipped,
            "stream_dropped_samples": counts.dropped,
        }

    def _window_stats(self) -> dict[str, float]:
        tokens = [sum(lengths) for lengths in self._lengths]
        fill = filled(tokens, self.packing_length).sum() / self.packing_length
        extra = self.extra()
        numbers = torch.tensor(
            [fill, sum(map(len, self._lengths)), len(tokens), sum(tokens), *chain.from_iterable(extra.values())],
            dtype=torch.float64,
        )
        fill, samples, packs, total, *more = self.sum_over_ranks(numbers).tolist()
        self._lengths = []
        return {
            "fill": fill / packs,
            "samples_per_pack": samples / packs,
            "tokens_per_second": total / self.seconds_since_reading(),
            **{name: sum_ / num for name, sum_, num in zip(extra, more[::2], more[1::2], strict=True) if num},
        }
