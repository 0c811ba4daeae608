"""
Timing of a run, by a calibration that fits. Without torch.
"""

import math

import attrs
import cattrs

from packplan.adapters.forecast.kept import DiskCalibrations, device_name, machine_name
from packplan.adapters.model_folder import config_digest
from packplan.app.cli.command import duration
from packplan.app.planning.schedule import split_schedule
from packplan.app.planning.split import Split
from packplan.app.wiring.attention import attention_by, stored_verdict
from packplan.app.wiring.stores import artefacts_folder
from packplan.core.config.run import RunConfig
from packplan.core.equality import AUTO
from packplan.core.errors import ConfigError, UserError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.forecast import Calibration, RunForecast, StepTerms, Timing, forecast_run
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats
from packplan.core.work.model import SampleWorks

_SETTINGS = (
    "bf16", "fp16", "gradient_checkpointing", "fsdp", "deepspeed", "optim", "torch_compile", "use_cpu",
    "dataloader_num_workers",
)  # fmt: skip
"""Settings of the trainer that change the seconds of a step."""


def calibration_key(config: RunConfig, *, world_size: int, attention: str | None) -> Fingerprint:
    """
    Return everything that a calibration depends on.

    Args:
        config: The run.
        world_size: Data-parallel learners.
        attention: Attention that trains.
    """
    training, trainer = config.training, config.training.trainer
    settings = {f"training.{name}": str(trainer.get(name)) for name in _SETTINGS}
    return Fingerprint(
        {
            "machine": machine_name(),
            "device": device_name(on_cpu=bool(trainer.get("use_cpu"))),
            "ranks": world_size,
            "attention": attention,
            "config.json": config_digest(config.model),
            "model.torch_dtype": config.model.torch_dtype,
            "training.packing": training.packing,
            "training.sequence_parallel_size": training.sequence_parallel_size,
            "training.tuner_type": training.tuner_type,
            "training.freeze_llm": training.freeze_llm,
            "training.freeze_vit": training.freeze_vit,
            "training.logging_steps is 1": logs_each_step(config),
            **settings,
        }
    )


def logs_each_step(config: RunConfig) -> bool:
    """Return whether each step is logged, and so takes longer."""
    return bool(config.training.trainer.get("logging_steps") == 1)


def find_timing(config: RunConfig, *, world_size: int, attention: str | None) -> tuple[Timing | None, str | None]:
    """
    Return the timing of a run by a calibration that fits, and why those that are stored do not.

    Args:
        config: The run.
        world_size: Data-parallel learners.
        attention: Attention that trains; None if it is not known, and any calibration's is taken.

    Raises:
        CorruptArtefactError: A calibration is damaged.
    """
    try:
        key = calibration_key(config, world_size=world_size, attention=attention)
    except ConfigError:  # the model is not there
        return None, None
    unused = []
    for stored, measured in open_calibrations(config).entries():
        differences = [one for one in stored.differences(key) if attention or one.key != "attention"]
        if not differences:
            return cattrs.structure(measured, Calibration).timing(), None
        unused.append("; ".join(map(str, differences)))
    return None, min(unused, key=len, default=None)


def attention_name(config: RunConfig) -> str | None:
    """Return the name of the attention that trains a run; None if it cannot be said yet."""
    try:
        verdict = stored_verdict(config)
        if verdict is None and config.model.attn_impl == AUTO:
            return None
        return attention_by(config, verdict, on_cpu=bool(config.training.trainer.get("use_cpu"))).name
    except UserError:
        return None


def open_calibrations(config: RunConfig) -> DiskCalibrations:
    """Return the store of a run's calibrations, beside its plans."""
    return DiskCalibrations(artefacts_folder(config.training.output_dir) / "calibrations")


def run_forecast(
    config: RunConfig,
    timing: Timing,
    stats: PackStats,
    schedule: EpochSchedule,
    flops: SampleWorks,
    *,
    evaluated: Split | None = None,
) -> RunForecast:
    """
    Return the forecast of a run.

    Args:
        config: The run.
        timing: Seconds of its parts.
        stats: Packs of the epoch of its next step.
        schedule: Order of its packs.
        flops: Works of its samples in FLOPs.
        evaluated: Plan of its evaluation; None without one.
    """
    trained = EpochStats.from_schedule(stats, schedule, schedule.at(schedule.start.step).epoch)
    forward = None if evaluated is None else evaluation_terms(config, evaluated)
    return forecast_run(
        timing, trained, schedule, flops, evaluated=forward, every=_every(config, schedule),
        evaluates_first=bool(config.training.trainer.get("eval_on_start")),
    )  # fmt: skip


def evaluation_terms(config: RunConfig, planned: Split) -> StepTerms:
    """
    Return an evaluation as one step, since its ranks wait for each other at its end alone.

    Args:
        config: The run.
        planned: Plan of the evaluation.
    """
    schedule = split_schedule(config, "eval", planned.aligned)
    whole = attrs.evolve(schedule, gradient_accumulation_steps=schedule.batches_per_epoch)
    return StepTerms.from_epoch(
        EpochStats.from_schedule(planned.pack_stats(0), whole, 0), planned.works, meeting="step"
    )


def _every(config: RunConfig, schedule: EpochSchedule) -> tuple[int, int]:
    """Return the optimizer steps between two evaluations, and between two checkpoints."""
    trainer = config.training.trainer
    evaluates = trainer.get("eval_strategy", "epoch" if config.custom.val_jsonl else "no")
    eval_steps = trainer.get("eval_steps") or trainer.get("logging_steps", _LOGGING_STEPS)
    saves = trainer.get("save_strategy", "steps")

    def steps(strategy: str, every: float) -> int:
        if strategy == "no":
            return 0
        if strategy == "epoch":
            return schedule.steps_per_epoch
        return int(every) if every >= 1 else max(1, math.ceil(every * schedule.total_steps))

    evaluation = steps(evaluates, eval_steps) if config.custom.val_jsonl else 0
    return evaluation, evaluation if saves == "best" else steps(saves, trainer.get("save_steps", _SAVE_STEPS))


_LOGGING_STEPS, _SAVE_STEPS = 5, 500
"""Defaults of ms-swift."""


def told_forecast(forecast: RunForecast, world_size: int) -> str:
    """Return the measured seconds of a run in words, with their uncertainty and ranks."""
    return (
        f"predicted: {duration(forecast.seconds)} for {counted(forecast.last - forecast.first, 'optimizer step')} on "
        f"{counted(world_size, 'rank')} (+- {forecast.uncertainty:.1%}), {forecast.tokens_per_second:,.0f} tokens a "
        f"second; {forecast.timing.basis}"
    )


def told_error(forecast: RunForecast, step: int, real: float) -> str:
    """
    Return in words by how much a forecast was wrong.

    Args:
        forecast: Forecast of the run.
        step: Optimizer steps at the end.
        real: Seconds of the run.
    """
    predicted = forecast.seconds if step == forecast.last else forecast.until(step)
    wrong = f"{abs(predicted / real - 1):.1%} too {'long' if predicted > real else 'short'}"
    return f"trained for {duration(real)}; {duration(predicted)} were predicted, {wrong} ({forecast.timing.basis})"
