"""
Makes torchvision importable with a torch that is built for CPUs.

The torchvision on PyPI is built for CUDA. With a CPU-only torch, importing torchvision fails, since
torchvision adds meta implementations to two operators that are not registered. Qwen-VL's processor
needs only torchvision's pure-Python part, so declaring the two operators is enough. A torchvision
that is built for the installed torch is not changed. `packplan.adapters` calls `install` before
importing any library that imports torchvision.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_kept_alive: list[Any] = []


class OperatorDeclarer(MetaPathFinder):
    """Import finder that declares two operators of torchvision if they are not registered."""

    def find_spec(self, fullname: str, *_: object) -> None:
        """
        Declare the operators before the module that needs them is imported; always return None.
        """
        if fullname != "torchvision._meta_registrations":
            return
        sys.meta_path.remove(self)
        import torch

        if not hasattr(torch.ops.torchvision, "nms"):
            library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
            _kept_alive.append(library)


def install() -> None:
    """Install the import finder; the operators are declared when torchvision is imported."""
    sys.meta_path.insert(0, OperatorDeclarer())
