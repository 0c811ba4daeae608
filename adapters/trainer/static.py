"""
Trainer of a plan: it follows the schedule as every host does, logs and tells the time.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer

from packplan.adapters.hf.following import FollowsSchedule
from packplan.adapters.loaders.batches import PackBatches
from packplan.adapters.samples.encoder import VIDEO_SECONDS
from packplan.adapters.trainer.base import PackingTrainer
from packplan.adapters.trainer.checkpoints import attention_to_state
from packplan.adapters.trainer.loader import PackLoader
from packplan.core.equality import AttentionChoice
from packplan.core.forecast import RunForecast
from packplan.core.schedule import EpochStats, PackStats


class PackTrainer(FollowsSchedule, PackingTrainer):
    """
    ms-swift's trainer on the packs of a plan.

    Attributes:
        forecast: Predicted seconds of the run; None if none were measured, or nothing is left.
        resumes_from: Folder of the checkpoint that the run goes on from; None at its beginning.
    """

    resumes_from: str | None = None

    def __init__(
        self,
        *,
        follower: PackBatches,
        pack_stats: Callable[[int], PackStats],
        attention: AttentionChoice,
        **options: Any,
    ) -> None:
        """
        Prepare training.

        Args:
            follower: Serves this rank's packs in the order of their schedule.
            pack_stats: Function that returns the packs of an epoch, with stats for the log.
            attention: Attention that trains, stored in checkpoints.
            **options: Options of `PackingTrainer`; train_dataset serves the packs of the raw plan;
                none where epochs have plans of their own.
        """
        self.pack_stats, self.attention = pack_stats, attention
        self.forecast: RunForecast | None = None
        self._began: float | None = None
        self._meter: _Meter | None = None
        self._video_seconds = self._waited = 0.0
        super().__init__(**options)
        self.follow(follower)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:  # noqa: ARG002  # the schedule skips by itself
        """Return the loader of this rank's packs, in the schedule's order of the epoch."""
        batches = _NamedPacks(self.follower, self.pack_stats) if self.schedule.differs else self.follower
        loader = self._loader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
        self._loaders.append(loader)
        return loader

    def _init_training_state(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        begun = super()._init_training_state(*arguments, **options)
        # A checkpoint holds its run's intervals of logging, saving and evaluating, but the settings
        # of this run apply.
        self.state.compute_steps(self.args, self.schedule.total_steps)
        return begun

    def _run_epoch(self, *, epoch: int, **options: Any) -> None:
        if self._began is None:
            self._began = time.perf_counter()
        stats = EpochStats.from_schedule(self.pack_stats(epoch), self.schedule, epoch)
        self._meter = _Meter(stats, epoch, self.state.global_step)
        self.seconds_since_reading()
        super()._run_epoch(epoch=epoch, **options)
        # Not ms-swift's method, which would add the accuracy of the steps since the last log.
        Trainer.log(self, self._meter.epoch_statistics(self.state.global_step))

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        """Train on one batch, and add up the seconds of its videos."""
        self._video_seconds += inputs[VIDEO_SECONDS]
        loss: torch.Tensor = super().training_step(model, inputs, *arguments, **options)
        return loss

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log a step's loss with the stats of the steps since the last one."""
        if "loss" in logs and self._meter is not None:
            logs = {**logs, **self._meter.read(self.state.global_step, self.seconds_since_reading())}
            waited = sum(loader.waited for loader in self._loaders)
            if self._video_seconds:
                logs |= {"video_seconds": self._video_seconds, "data_wait_seconds": waited - self._waited}
            self._video_seconds, self._waited = 0.0, waited
        super().log(logs, *arguments, **options)

    @property
    def real_seconds(self) -> float:
        """Seconds of training so far, evaluations and checkpoints included."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.state.stateful_callbacks.update(attention_to_state(self.attention.name))
        if self.forecast is not None:
            self.state.stateful_callbacks["packplan_seconds"] = {
                "steps": self.state.global_step - self.schedule.start.step,
                "real_seconds": self.real_seconds,
                "predicted_seconds": self.forecast.until(self.state.global_step),
                "predicted_total_seconds": self.forecast.seconds,
                "uncertainty": self.forecast.uncertainty,
            }
        super()._save_checkpoint(*arguments, **options)


class _NamedPacks:
    """Batches of the packs of an epoch, each as its index and its samples."""

    def __init__(self, batches: PackBatches, pack_stats: Callable[[int], PackStats]) -> None:
        self._batches, self._pack_stats = batches, pack_stats

    def set_epoch(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[tuple[int, list[int]]]]:
        packs = self._pack_stats(self._batches.epoch).packs
        for batch in self._batches:
            yield [(pack, packs[pack]) for pack in batch]


class _Meter:
    """Reads an epoch's stats step by step."""

    def __init__(self, stats: EpochStats, epoch: int, first_step: int) -> None:
        self._stats, self.epoch = stats, epoch
        self.first_step = self._read_until = first_step

    def read(self, step: int, seconds: float) -> Mapping[str, float]:
        """Return the stats of the steps since the last reading, with tokens per second."""
        start, stop = self._read_until - self.first_step, step - self.first_step
        self._read_until = step
        tokens = self._stats.tokens(start, stop)
        return {
            **self._stats.statistics(start, stop),
            "tokens_per_second": tokens.total / seconds,
            **({"useful_tokens_per_second": tokens.useful / seconds} if tokens.useful < tokens.total else {}),
        }

    def epoch_statistics(self, step: int) -> dict[str, float]:
        """Return the stats of the epoch up to *step*."""
        return dict(self._stats.epoch_statistics(step - self.first_step))
