"""
Settings of a trainer that the devices of a run, or other settings, would have it ignore: read
without torch, whose import takes seconds.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packplan.adapters.versions import installed_version
from packplan.core.errors import Fault

_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"""Files of the drivers of GPUs that torch computes on, one of which is there where a GPU is."""


def surely_without_gpu(
    environment: Mapping[str, str] = os.environ, exists: Callable[[str], bool] = os.path.exists
) -> bool:
    """
    Return whether torch will certainly find no GPU; False also where only torch itself could tell.

    Args:
        environment: The variables of this process.
        exists: Whether there is a file of a name.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") in {"", "-1"} or sys.platform == "darwin":
        return True
    if (installed_version("torch") or "").endswith("+cpu"):
        return True
    return sys.platform == "linux" and not any(map(exists, _DRIVERS))


def device_faults(settings: Mapping[str, Any], *, on_cpu: bool) -> Iterator[Fault]:
    """
    Yield faults of settings that the devices would ignore, or that break the count of learners.

    Args:
        settings: Settings of the trainer.
        on_cpu: Whether training uses no GPU.
    """
    if settings.get("fp16") and on_cpu:
        yield Fault("training.fp16", "computes in float32 on a CPU, silently: use bf16, or remove it")
    if settings.get("fsdp") and on_cpu:
        reason = "would be dropped on a CPU, silently (by accelerate): remove it, or train on GPUs"
        yield Fault("training.fsdp", reason)
    if settings.get("fsdp_config") and not settings.get("fsdp"):
        yield Fault("training.fsdp_config", "has no effect without training.fsdp: set that, or remove it")
    deepspeed = settings.get("deepspeed")
    if isinstance(deepspeed, (str, Path)):
        with contextlib.suppress(OSError, ValueError):  # what is no file of JSON, ms-swift refuses
            deepspeed = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
    if isinstance(deepspeed, Mapping) and "tensor_parallel" in deepspeed:
        reason = (
            "asks for tensor parallelism, under which several ranks are one learner; plans count every rank: remove"
        )
        yield Fault("training.deepspeed", f"{reason} tensor_parallel")
