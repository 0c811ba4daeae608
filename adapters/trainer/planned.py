"""
Trainer of a plan: it follows the schedule as every host does, and logs what it trains.
"""

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from packplan.adapters.hf.following import FollowsSchedule
from packplan.adapters.loaders.batches import PackBatches
from packplan.adapters.trainer.base import CheckedTrainer
from packplan.adapters.trainer.loader import PackLoader
from packplan.core.schedule import EpochStats, PackStats


class PlanTrainer(FollowsSchedule, CheckedTrainer):
    """ms-swift's trainer on the packs of a plan."""

    def __init__(self, *, follower: PackBatches, pack_stats: Callable[[int], PackStats], **options: Any) -> None:
        """
        Prepare training.

        Args:
            follower: Serves this rank's packs in the order of their schedule.
            pack_stats: Function that returns the packs of an epoch, with stats for the log.
            **options: Options of `CheckedTrainer`.
        """
        self.pack_stats = pack_stats
        self._stats: EpochStats | None = None
        self._epoch_start = self._logged_until = 0
        self._waited = 0.0
        super().__init__(**options)
        self.follow(follower)

    def get_train_dataloader(self, skip_batches: int = 0) -> PackLoader:  # noqa: ARG002  # the schedule skips by itself
        """Return the loader of this rank's packs, in the schedule's order of the epoch."""
        # Persistent workers would keep the packs of another epoch.
        fresh = {"persistent_workers": False} if self.schedule.differs else {}
        loader = self._loader(self.train_dataset, batch_sampler=self.follower, collate_fn=self.data_collator, **fresh)
        self._loaders.append(loader)
        return loader

    def _init_training_state(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        begun = super()._init_training_state(*arguments, **options)
        # A checkpoint holds its run's intervals of logging, saving and evaluating, but the settings
        # of this run apply.
        self.state.compute_steps(self.args, self.schedule.total_steps)
        return begun

    def _run_epoch(self, *, epoch: int, **options: Any) -> None:
        packs = self.pack_stats(epoch)
        self.train_dataset.packs = packs.packs
        self._stats = stats = EpochStats.from_schedule(packs, self.schedule, epoch)
        self._epoch_start = self._logged_until = self.state.global_step
        self.seconds_since_reading()
        super()._run_epoch(epoch=epoch, **options)
        # Not ms-swift's method, which would add the accuracy of the steps since the last log.
        Trainer.log(self, dict(stats.epoch_statistics(self.state.global_step - self._epoch_start)))

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log a step's loss with the stats of the steps since the last one."""
        if "loss" in logs and self._stats is not None:
            start, stop = self._logged_until - self._epoch_start, self.state.global_step - self._epoch_start
            seconds, tokens = self.seconds_since_reading(), self._stats.tokens(start, stop)
            self._logged_until = self.state.global_step
            logs = {**logs, **self._stats.statistics(start, stop), "tokens_per_second": tokens.total / seconds}
            if tokens.useful < tokens.total:
                logs["useful_tokens_per_second"] = tokens.useful / seconds
            waited = sum(loader.waited for loader in self._loaders)
            logs["data_wait_seconds"], self._waited = waited - self._waited, waited
        super().log(logs, *arguments, **options)
