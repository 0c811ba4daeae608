"""
Makes torchvision importable with a torch that is built for CPUs.

The published torchvision is a CUDA build: beside a CPU-only torch its import fails, because the
operators that it gives a meta implementation are not registered. Qwen-VL's processor needs only its
pure-Python part, so declaring the two operators is enough. A matching build needs nothing.
`packplan.adapters` installs this before anything is imported that imports torchvision.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_kept_alive: list[Any] = []


class OperatorDeclarer(MetaPathFinder):
    """Import finder that declares operators that torchvision's library lacks."""

    def find_spec(self, fullname: str, *_: object) -> None:
        """
        Return None; declare the operators once, before the module that needs them is imported.
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
    """Install the finder; the operators are declared when torchvision is imported."""
    sys.meta_path.insert(0, OperatorDeclarer())
