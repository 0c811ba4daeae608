"""
Makes torchvision importable beside a CPU-only torch.

The published torchvision is a CUDA build: beside a CPU-only torch its import dies because the
operators that it gives a meta implementation are not registered. Qwen-VL's processor needs only its
pure-Python part, so declaring the two operators is enough. A matching build needs nothing. Import
this before transformers or swift, in every process.
"""

from __future__ import annotations

import importlib
import sys

import torch

_kept_alive: list[torch.library.Library] = []


def ensure_torchvision() -> None:
    """Import torchvision, declaring its operators if it lacks them."""
    if _kept_alive or "torchvision" in sys.modules:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _kept_alive.append(library)
        importlib.import_module("torchvision")


ensure_torchvision()
