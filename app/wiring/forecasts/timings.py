"""
Timing of a run: by a stored calibration that fits it, else by a guess from the device's peak; and
its stored peak of memory. Without torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import cattrs
import numpy as np

from packplan.adapters.forecast.calibrations import DiskCalibrationStore, device_name, machine_name, num_cores
from packplan.adapters.forecast.peaks import DiskPeakStore
from packplan.adapters.model_folder import config_digest
from packplan.app.planning.deadline import Deadline
from packplan.app.wiring.attention import attention_by, stored_verdict
from packplan.core.config import RunConfig
from packplan.core.equality import AUTO
from packplan.core.errors import ConfigError, Difference, UserError
from packplan.core.fingerprint import Fingerprint
from packplan.core.forecast import Calibration, Timing, guessed_timing
from packplan.core.ports import Arrays, RankGroup, ReportProgress

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


def find_timing(config: RunConfig, *, world_size: int, attention: str | None, device: str | None = None) -> Timing:
    """
    Return the timing of a run: of a calibration that fits, else a guess.

    Args:
        config: The run.
        world_size: Data-parallel learners.
        attention: Attention that trains; None if it is not known, and any calibration's is taken.
        device: Device to guess for; None takes a calibration, or this machine's own.

    Raises:
        CorruptArtefactError: A calibration is damaged.
    """
    unused = [] if device is not None else list(_differences(config, world_size=world_size, attention=attention))
    for differences, calibration in unused:
        if not differences:
            return calibration.timing()
    why = min(("; ".join(map(str, differences)) for differences, _ in unused), key=len, default=None)
    here = device_name(on_cpu=bool(config.training.trainer.get("use_cpu")))
    return attrs.evolve(guessed_timing(device or here, cores=num_cores()), unused=why)


def _differences(
    config: RunConfig, *, world_size: int, attention: str | None
) -> Iterator[tuple[list[Difference], Calibration]]:
    """Yield each stored calibration, and how it differs from what a run needs."""
    try:
        key = calibration_key(config, world_size=world_size, attention=attention)
    except ConfigError:  # the model is not there
        return
    for stored, calibration in open_calibrations(config).entries():
        yield [one for one in stored.differences(key) if attention or one.key != "attention"], calibration


def attention_name(config: RunConfig) -> str | None:
    """Return the name of the attention that trains a run; None if it cannot be said yet."""
    try:
        verdict = stored_verdict(config)
        if verdict is None and config.model.attn_impl == AUTO:
            return None
        return attention_by(config, verdict, on_cpu=bool(config.training.trainer.get("use_cpu"))).name
    except UserError:
        return None


def shared_timing(config: RunConfig, group: RankGroup, *, attention: str, deadline: Deadline) -> Timing:
    """
    Return the timing that rank 0 finds, on every rank.

    Args:
        config: The run.
        group: All ranks.
        attention: Attention that trains.
        deadline: Limit of the wait for rank 0.
    """

    def find(_: ReportProgress) -> Arrays:
        found = find_timing(config, world_size=group.world_size, attention=attention)
        return {"timing": np.frombuffer(json.dumps(cattrs.unstructure(found)).encode(), dtype=np.uint8)}

    arrays = group.from_rank_zero(find, **deadline.wait())
    return cattrs.structure(json.loads(arrays["timing"].tobytes()), Timing)


def memory_key(config: RunConfig, *, world_size: int, **packed: str) -> Fingerprint:
    """
    Return everything that the peak of a run's step depends on.

    Args:
        config: The run.
        world_size: Data-parallel learners.
        **packed: Digest of the plan of `train`, for the plan's own peak; of its data, for the
            peaks of full packs of any length.
    """
    settings = json.dumps([attrs.asdict(config.model), attrs.asdict(config.training)], sort_keys=True, default=str)
    return Fingerprint(
        {
            "ranks": world_size,
            **packed,
            "config.json": config_digest(config.model),
            "settings": hashlib.sha256(settings.encode()).hexdigest(),
        }
    )


def find_peak(config: RunConfig, *, world_size: int, plan: Fingerprint) -> int | None:
    """
    Return the stored peak of a run's step on a rank in bytes; None if none is stored for it.

    Args:
        config: The run.
        world_size: Data-parallel learners.
        plan: Fingerprint of the plan of `train`.

    Raises:
        CorruptArtefactError: It is damaged.
    """
    return max(_peaks(config, world_size=world_size, plan=plan.digest).values(), default=None)


def find_full_peaks(config: RunConfig, *, world_size: int, data_digest: str) -> dict[int, int]:
    """
    Return the stored peaks of full packs of a run's data: packing length -> bytes of a rank.

    Args:
        config: The run.
        world_size: Data-parallel learners.
        data_digest: Digest of the records of `train`.

    Raises:
        CorruptArtefactError: They are damaged.
    """
    return _peaks(config, world_size=world_size, data=data_digest)


def _peaks(config: RunConfig, *, world_size: int, **packed: str) -> dict[int, int]:
    try:
        return open_peaks(config).load(memory_key(config, world_size=world_size, **packed))
    except ConfigError:  # the model is not there
        return {}


def open_peaks(config: RunConfig) -> DiskPeakStore:
    """Return the store of a run's peaks of memory, beside its plans."""
    return DiskPeakStore(Path(config.training.output_dir) / "static_packing" / "memory")


def open_calibrations(config: RunConfig) -> DiskCalibrationStore:
    """Return the store of a run's calibrations, beside its plans."""
    return DiskCalibrationStore(Path(config.training.output_dir) / "static_packing" / "calibrations")
