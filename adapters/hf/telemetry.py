"""Statistics of packs in a trainer's log: fill, tokens and work of each step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from packplan.adapters.loaders.packs import PackLoader
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats
from packplan.core.surface import Plan
from packplan.core.work.model import SampleWorks, WorkModel


class TimesSteps:
    """Mixin that measures the seconds of training, and the seconds of waiting for batches."""

    _lap_start = 0.0
    _loaders: list[PackLoader]
    """Data loaders, one for each call of `train`."""

    @property
    def wait_seconds(self) -> float:
        """Seconds in which training has waited for batches, or made batches in this process."""
        return sum(loader.wait_seconds for loader in self._loaders)

    def lap_seconds(self) -> float:
        """Return the seconds of training since the last call, without evaluation and saving."""
        now = time.perf_counter()
        seconds, self._lap_start = now - self._lap_start, now
        return seconds

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        super()._maybe_log_save_evaluate(*arguments, **options)  # type: ignore[misc]  # of the trainer's class
        # Where a lap began inside, only the time since then is left out.
        self._lap_start += time.perf_counter() - max(start, self._lap_start)


class LogsPacks(TimesSteps):
    """Mixin that makes a trainer log statistics of its scheduled packs with each loss."""

    state: Any
    schedule: EpochSchedule
    pack_stats: Callable[[int], PackStats]
    """Function that returns statistics of the packs of an epoch."""

    evaluates_packs = True
    """Whether the evaluation counts packs as samples; its samples per second are then left out."""

    _stats: EpochStats | None = None
    _epoch_start, _logged_until, _waited = 0, 0, 0.0

    @contextmanager
    def logging_epoch(self, epoch: int) -> Iterator[None]:
        """
        Inside this context, log statistics of an epoch's steps. At its end, log statistics of the
        whole epoch.
        """
        self._stats = stats = EpochStats.from_schedule(self.pack_stats(epoch), self.schedule, epoch)
        self._epoch_start = self._logged_until = self.state.global_step
        self.lap_seconds()
        yield
        # Not the method of ms-swift or TRL, which would add means of the steps since the last log.
        Trainer.log(self, dict(stats.epoch_statistics(self.state.global_step - self._epoch_start)))

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """
        Log values as the trainer does. If they include a loss, statistics of the steps since the
        last log are added. Samples per second are left out, since packs would count as samples.
        """
        if "loss" in logs and self._stats is not None and self.state.global_step > self._logged_until:
            start, stop = self._logged_until - self._epoch_start, self.state.global_step - self._epoch_start
            seconds, positions = self.lap_seconds(), self._stats.num_positions(start, stop)
            self._logged_until = self.state.global_step
            logs = {**logs, **self._stats.statistics(start, stop), "tokens_per_second": positions / seconds}
            if (tokens := self._stats.num_tokens(start, stop)) < positions:
                logs["useful_tokens_per_second"] = tokens / seconds
            logs["data_wait_seconds"], self._waited = self.wait_seconds - self._waited, self.wait_seconds
        super().log(drop_pack_rates(logs, of_evaluation=self.evaluates_packs), *arguments, **options)  # type: ignore[misc]


def text_pack_stats(plan: Plan, model: Any) -> PackStats:
    """
    Return the statistics of a plan's packs, including the work of a model's text layers.

    Args:
        plan: Plan of the training data. A pair of answers counts as one sample.
        model: Model that is trained. Its work includes the tokens of images, but not the vision
            tower.
    """
    work, _ = WorkModel.from_config_or_estimated(model.config.to_dict())
    adapts = hasattr(model, "peft_config") or hasattr(model, "adapters")
    works = SampleWorks.from_lengths(work.trained(text=not adapts), plan.lengths)
    return PackStats.from_plan(plan.raw, plan.lengths, works=works)


def drop_pack_rates(logs: dict[str, float], *, of_evaluation: bool = True) -> dict[str, float]:
    """
    Remove samples per second from *logs*, since trainers would count packs as samples; return
    *logs*.

    Args:
        logs: Values to log.
        of_evaluation: Whether the evaluation has run on packs too.
    """
    for name in [name for name in logs if name.endswith("_samples_per_second")]:
        if of_evaluation or name.startswith("train_"):
            del logs[name]
    return logs
