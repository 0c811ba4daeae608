"""Measures the peak memory of tensors."""

import weakref
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakOfTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Mode that counts the bytes of all existing tensors, and keeps the largest count as `peak`."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Start to count; the weights and gradients of *model* count from the start."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._held: dict[int, Any] = {}
        for weight in model.parameters():
            self._hold(weight)
            if weight.grad is not None:
                self._hold(weight.grad)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_iter(found):
            # What a collective returns only wraps the tensor that has the memory.
            if isinstance(one, torch.Tensor) and not isinstance(one, AsyncCollectiveTensor):
                self._hold(one)
        return found

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001  # identity of the memory
        if key in self._held:
            return

        def release(_: Any) -> None:
            self._held.pop(key, None)
            self._now -= size

        self._held[key] = weakref.ref(storage, release)
        self._now += size
        self.peak = max(self.peak, self._now)
