"""
Trainer of a stream. Packs are made during training, so their number is not known in advance.

Ranks run out of packs at different times. Before each step, one small collective decides whether
the step takes place. Without `training.packing_drop_last`, steps continue until no rank has a pack
left. Meanwhile, a rank without packs trains a pack whose tokens have weight 0. With
`training.packing_drop_last`, an epoch ends when any rank has too few packs for a step, and the
remaining packs of all ranks are dropped.

A checkpoint has the progress of every reader after its last trained pack. A resumed run again
prepares the packs that loaders had prepared ahead.
"""

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import attrs
import torch
from transformers import Trainer

from packplan.adapters.hf.telemetry import drop_pack_rates
from packplan.adapters.loaders.packs import PackLoader
from packplan.adapters.models import replace_attributes
from packplan.adapters.trainer.checkpoints import progress_entry
from packplan.adapters.trainer.loader import Batch, with_zero_weights
from packplan.adapters.trainer.streams.dataset import LENGTHS, PROGRESS, ReaderEnd, ReaderProgress, StreamCollator
from packplan.adapters.trainer.trainer import CheckedTrainer
from packplan.core.errors import DataSetError, counted, verb_for
from packplan.core.fingerprint import from_plain, to_plain
from packplan.core.packs import filled_tokens
from packplan.core.stream import RankState, ReaderState, StreamCounts, StreamOptions, StreamProgress, StreamState

log = logging.getLogger(__name__)

_FEW_UNDERFILLED = 0.05
"""
Largest share of all packs so far that may be evicted below the minimum fill ratio without a
warning.
"""


@attrs.frozen
class StreamTotals:
    """Counts of a stream's samples over all ranks and all epochs so far."""

    counts: StreamCounts

    trained: int
    """Number of samples in packs that were trained."""

    def __str__(self) -> str:
        counts, share = self.counts, self.counts.dropped_tokens / max(1, self.counts.tokens)
        waiting = counts.samples - self.trained - counts.dropped - counts.skipped
        return (
            f"{counted(counts.samples, 'sample')} read: {self.trained:,} trained, {counts.dropped:,} dropped in "
            f"{counted(counts.dropped_packs, 'pack')} ({share:.2%} of the tokens), {counts.skipped:,} "
            "skipped as too long, "
            f"{waiting:,} in untrained or incomplete packs. {counted(counts.long, 'long sample')} "
            f"{verb_for(counts.long, 'was a pack of its own', 'were packs of their own')}. "
            f"{counts.underfilled_packs:,} of {counted(counts.packs, 'pack')} "
            f"{verb_for(counts.underfilled_packs, 'was', 'were')} underfilled"
        )


class StreamTrainer(CheckedTrainer):
    """ms-swift's trainer for the packs of a `StreamDataset`."""

    def __init__(
        self,
        *,
        num_epochs: int | None,
        start: tuple[StreamProgress, RankState],
        resume_state: Callable[[StreamProgress], StreamState],
        **options: Any,
    ) -> None:
        """
        Prepare training.

        Args:
            num_epochs: Number of epochs after which training ends; None ends training after
                `max_steps`.
            start: Progress of all ranks, and of this rank, from which training starts.
            resume_state: Function that makes a checkpoint's resume state from the progress.
            **options: Options of `CheckedTrainer`; train_dataset is a `StreamDataset`.
        """
        self.num_epochs = sys.maxsize if num_epochs is None else num_epochs
        if num_epochs is not None:
            options["args"].max_steps = sys.maxsize
        self.start, self._rank_start = start
        self.resume_state = resume_state
        self.options = options["train_dataset"].options
        self._earlier, self._trained = self._rank_start.earlier, self._rank_start.trained
        self._lengths: list[tuple[int, ...]] = []
        # Packs of this rank that were evicted, and packs of all ranks, since this run's start.
        self._evicted, self._num_packs, self._has_warned = 0, 0, False
        self._epoch, self._first_step = self.start.epoch, self.start.step - self.start.epoch_step
        self._left_over: list[tuple[int, ...]] = []
        self._served: tuple[ReaderProgress, ...] = ()  # latest progress of each reader, newest last
        workers = options["args"].dataloader_num_workers
        super().__init__(packed=True, **options)
        self.data_collator = StreamCollator(self.data_collator)
        # ms-swift allows a data set without a length one worker; this one divides its samples.
        self.args.dataloader_num_workers = workers

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:  # noqa: ARG002  # a stream resumes by itself
        """Return the loader of this rank's packs."""
        # Persistent workers would not learn of the next epoch.
        return self._open_loader(self.train_dataset, collate_fn=self.data_collator, persistent_workers=False)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Return transformers' training counts, with this trainer's number of epochs."""
        _, *others, max_steps = super().set_initial_training_values(args, dataloader)
        return self.start.epoch if self.start.step >= max_steps else self.num_epochs, *others, max_steps

    def _init_training_state(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        super()._init_training_state(*arguments, **options)
        # No batch is skipped, since the data set goes on by itself. Generators are then restored
        # before the first batch, whose answers may need them.
        return self.start.epoch, 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch | ReaderEnd], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Any]:
        """
        Return the packs of the next step; [] after an epoch's last step.

        DataSetError is raised if the epoch had no step.
        """
        del num_batches  # a guess of the trainer
        size, batches = self.args.gradient_accumulation_steps, self._note_progress(epoch_iterator)
        with self.reading_together():
            window = list(islice(batches, size))
        if self.group.any(len(window) < size) if self.options.drop_last else not self.group.any(bool(window)):
            self._left_over = [batch[LENGTHS] for batch in chain(window, batches)]
            if self.state.global_step == self._first_step:
                raise DataSetError(self._no_step_reason())
            self.control.should_epoch_stop = True
            self._epoch += 1  # now logged as done, as with a plan
            if self._epoch >= self.num_epochs:
                self._request_last_eval_and_save()
            return [], None
        # Each is a dict of its own, since `training_step` takes entries out.
        window += [self._weightless_pack(window) for _ in range(size - len(window))]
        return window, self._get_num_items_in_batch(window, device)

    def _note_progress(self, items: Iterator[Batch | ReaderEnd]) -> Iterator[Batch]:
        """Yield batches, and record the latest progress of each reader, also when a reader ends."""
        for item in items:
            progress = item.progress if isinstance(item, ReaderEnd) else item[PROGRESS]
            self._served = (*(one for one in self._served if one.reader != progress.reader), progress)
            if not isinstance(item, ReaderEnd):
                yield item

    def _request_last_eval_and_save(self) -> None:
        """Request a final evaluation and checkpoint, unless the last step has made them."""
        args, state, control = self.args, self.state, self.control
        control.should_evaluate |= args.eval_strategy == "steps" and bool(state.global_step % state.eval_steps)
        control.should_save |= args.save_strategy == "steps" and bool(state.global_step % state.save_steps)

    def _weightless_pack(self, window: list[Batch]) -> Batch:
        """Return a pack whose tokens have weight 0, for a rank that has no packs left."""
        # It follows from the window and the data, so that a resumed run draws the same dropout.
        batch = window[-1] if window else self.data_collator.collate([self.train_dataset.filler_pack()])
        return {**with_zero_weights(batch), LENGTHS: (), PROGRESS: ReaderProgress(0, ReaderState())}

    def _no_step_reason(self) -> str:
        packs = counted(self.args.gradient_accumulation_steps, "pack")
        if not self.options.drop_last:
            return f"epoch {self._epoch} has no pack to train: set training.packing_allow_single_long: true"
        return (
            f"epoch {self._epoch} has no step, since a rank has fewer than {packs}: set training.packing_drop_last: "
            "false, lower training.effective_batch_size or training.packing_min_fill_ratio, or add data"
        )

    def _run_epoch(self, *, epoch: int, **options: Any) -> None:
        self._epoch, start = epoch, self.start
        self.train_dataset.set_epoch(epoch)
        if epoch == start.epoch:
            self.train_dataset.start_from(self._rank_start, start.segments)
        else:
            self._first_step = self.state.global_step
        self._show_no_total()
        self.lap_seconds()
        step = self.state.global_step
        super()._run_epoch(epoch=epoch, **options)
        if self._epoch_ended and self.state.global_step == step:
            self.control.should_training_stop = False  # the epoch's last step was before the resume
        if not (self.has_supervised or start.step or self.was_terminated):
            raise DataSetError(
                f"none of the samples of {counted(self.state.global_step, 'step')} had a supervised token, so nothing "
                "was learned: raise template.max_length if it truncates their answers"
            )
        counts = self._epoch_counts()
        left = 0 if self._epoch_ended else self.train_dataset.num_left(self._readers())
        *summed, left = self.sum_over_ranks(torch.tensor([*attrs.astuple(counts), left])).tolist()
        self._log_epoch(StreamCounts(*summed), 0.0 if self._epoch_ended else 1 - left / len(self.train_dataset.indices))
        self._earlier += counts
        self.train_dataset.start_from(RankState())
        self._left_over, self._served = [], ()

    def _log_epoch(self, total: StreamCounts, share: float) -> None:
        """Log an epoch's counts; *share* is the trained part of an unfinished epoch, else 0."""
        logs = {
            "epoch_samples": total.samples,
            "epoch_packs": total.packs,
            "epoch_fill_mean": total.filled_tokens / max(1, total.packs) / self.options.packing_length,
            "epoch_long_share": total.long / max(1, total.samples),
            "epoch_long_samples": total.long,
            "epoch_long_pack_share": total.long / max(1, total.packs),
            "epoch_skipped_share": total.skipped / max(1, total.samples),
            "epoch_skipped_samples": total.skipped,
            "epoch_dropped_samples": total.dropped,
            "epoch_dropped_packs": total.dropped_packs,
            "epoch_underfilled_packs": total.underfilled_packs,
        }
        self.state.epoch = self._epoch + share
        # Not this class's `log`, whose epochs are whole, nor ms-swift's, which would add the
        # accuracy of the steps since the last log.
        with self._estimated_total():
            Trainer.log(self, logs)

    def totals(self) -> StreamTotals:
        """
        Return the counts of samples over all ranks and all epochs so far. Every rank has to call
        this method.
        """
        counts = self._earlier + self._epoch_counts()
        *summed, trained = self.sum_over_ranks(torch.tensor([*attrs.astuple(counts), self._trained])).tolist()
        return StreamTotals(StreamCounts(*summed), trained)

    def _readers(self) -> tuple[ReaderState, ...]:
        """
        Return the progress of this rank's readers in the current epoch, up to the latest pack.
        """
        readers = [*self.train_dataset.start.readers] or [ReaderState()] * max(1, self.args.dataloader_num_workers)
        for one in self._served:
            readers[one.reader] = one.state
        return tuple(readers)

    def _epoch_counts(self) -> StreamCounts:
        """Return the counts of this rank's samples in the current epoch, up to the latest pack."""
        counts = sum((reader.counts for reader in self._readers()), StreamCounts())
        for lengths in self._left_over:
            counts = counts.with_pack_dropped(lengths, self.options)
        return counts

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        step = self.state.global_step
        progress = attrs.evolve(self.start, step=step, epoch=self._epoch, epoch_step=0, segments=())
        if not self._epoch_ended:
            segments = self.train_dataset.segments
            progress = attrs.evolve(progress, epoch_step=step - self._first_step, segments=segments)
        ranks = self.group.gather(json.dumps(to_plain(self._rank_state())))
        held = tuple(from_plain(RankState, json.loads(one)) for one in ranks)
        self.state.stateful_callbacks |= progress_entry(attrs.evolve(self.resume_state(progress), ranks=held))
        super()._save_checkpoint(*arguments, **options)

    def _rank_state(self) -> RankState:
        """Return this rank's progress after the last step, as saved in a checkpoint."""
        if self._epoch_ended:
            return RankState(earlier=self._earlier + self._epoch_counts(), trained=self._trained)
        readers, last = self._readers(), self._served[-1:]
        following = (last[0].reader + 1) % len(readers) if last else self.train_dataset.start.next_reader
        return RankState(readers, following, self._earlier, self._trained)

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        """Train on one pack, and record its samples' lengths for the log."""
        self._lengths.append(lengths := inputs.pop(LENGTHS))
        self._trained += len(lengths)
        # While a reader evicts packs, newer ones wait; none does at its end.
        if inputs.pop(PROGRESS).state.buffer and not self.options.reaches_min_fill(sum(lengths)):
            self._evicted += 1
        return super().training_step(model, inputs, *arguments, **options)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log the loss of a step, with statistics of all ranks since the last log."""
        if "loss" in logs:
            counts = self.totals().counts
            logs = {
                **logs,
                **self._window_stats(),
                "stream_samples": counts.samples,
                "stream_long_samples": counts.long,
                "stream_skipped_samples": counts.skipped,
                "stream_dropped_samples": counts.dropped,
            }
        if self.state.epoch is not None:
            # The trainer's share of the epoch is a guess: the number of packs is unknown.
            self.state.epoch = float(self._epoch)
        with self._estimated_total():
            super().log(drop_pack_rates(logs), *arguments, **options)

    @contextlib.contextmanager
    def _estimated_total(self) -> Iterator[None]:
        """
        Inside this context, set `max_steps` to an estimate if training ends after a number of
        epochs.
        """
        if self.args.max_steps < sys.maxsize:
            yield
            return
        left = 0 if self._epoch_ended else self.train_dataset.num_left(self._readers()) * self.group.world_size
        done = self._epoch + (0 if self._epoch_ended else max(0, 1 - left / len(self.train_dataset.indices)))
        step = self.state.global_step
        estimate = math.ceil(step * self.num_epochs / done) if done else step
        with replace_attributes(self.state, max_steps=max(step, estimate)):
            yield

    def _show_no_total(self) -> None:
        """Make progress bars show no total if training ends after a number of epochs."""
        for callback in self.callback_handler.callbacks if self.args.max_steps == sys.maxsize else ():
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.total = None

    @property
    def _epoch_ended(self) -> bool:
        """Whether this epoch has no further step."""
        return bool(self.control.should_epoch_stop)

    def _window_stats(self) -> dict[str, float]:
        length, packs = self.options.packing_length, [lengths for lengths in self._lengths if lengths]
        tokens = [sum(lengths) for lengths in packs]
        filled = filled_tokens(tokens, length).sum() / length
        numbers = [filled, sum(map(len, packs)), len(packs), sum(tokens), self._evicted]
        summed = self.sum_over_ranks(torch.tensor(numbers, dtype=torch.float64))
        fill, samples, num_packs, total, evicted = summed.tolist()
        self._lengths, self._num_packs = [], self._num_packs + int(num_packs)
        self._warn_of_evicted(int(evicted))
        return {
            "fill": fill / num_packs,
            "samples_per_pack": samples / num_packs,
            "tokens_per_second": total / self.lap_seconds(),
        }

    def _warn_of_evicted(self, evicted: int) -> None:
        """Log one warning on rank 0 if many packs of this run were evicted."""
        if self.group.rank or self._has_warned or evicted <= max(1, _FEW_UNDERFILLED * self._num_packs):
            return
        self._has_warned, options = True, self.options
        key = ("template.max_length", f"{options.packing_length:,}")
        if options.packing_buffer < attrs.fields(StreamOptions).packing_buffer.default:
            key = ("training.packing_buffer", f"{options.packing_buffer:,}")
        numbers = f"{evicted:,} of {counted(self._num_packs, 'pack')} so far ({evicted / self._num_packs:.0%})"
        fact = "were trained below training.packing_min_fill_ratio, since too few other samples fit into them"
        log.warning("%s %s: raise %s (now %s)", numbers, fact, *key)
