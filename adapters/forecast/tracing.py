"""
Records the memory that a computation would take.

Floating-point tensors have sizes but no content. The tracer records when the memory block of each
tensor would be allocated and freed.

Integers and booleans are computed, since they are small and decide shapes. Examples are the lengths
of samples, the number of supervised tokens, and the grid of an image. A model whose shapes depend
on floating-point values cannot be traced. Operators take the code path of a CPU, except that
`tracing_as_on_gpu` changes attention. Buffers inside kernels are not recorded.
"""

import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from packplan.adapters.models import local_part, replace_attributes
from packplan.core.errors import ModelError
from packplan.core.forecast import MEMORY_KINDS, MemoryKind, StepTrace

_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


_DEVICE = torch.ops.prim.device.default
"""Operator that returns a tensor's device. It is the most frequent call, and allocates nothing."""


class MemoryTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """
    Dispatch mode that records the memory block of each tensor created under it.

    Attributes:
        clock: Number of allocations and frees so far, used as the time of a trace.
    """

    def __init__(self, *, vocabulary: int) -> None:
        """
        Prepare a tracer; `record` starts the recording.

        Args:
            vocabulary: Size of the logits' last dimension, by which the tracer recognises logits; 0
                if the model has none.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = 0
        self._vocabulary = vocabulary
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._numbers: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._allocated: list[int] = []
        self._freed: list[int] = []
        self._sizes: list[int] = []
        self._logits: list[bool] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record tensors until the context ends; ModelError if the model cannot be traced."""
        try:
            with self._record_resizes(), self._fake, self:
                yield
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ModelError("trace", f"the model cannot be traced{_model_place(error)} ({reason})") from error

    @contextmanager
    def _record_resizes(self) -> Iterator[None]:
        """Record resized storages too, since FSDP frees gathered weights by resizing them."""
        resize = torch.UntypedStorage.resize_

        def record_and_resize(storage: torch.UntypedStorage, size: int) -> Any:
            self._note_resize(storage, size)
            return resize(storage, size)

        with replace_attributes(torch.UntypedStorage, resize_=record_and_resize):
            yield

    def record_empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Record and return a tensor, or its replacement without content if it is floating-point.
        """
        if tensor.is_floating_point() and not isinstance(tensor, FakeTensor):
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.record_block(tensor)
        return tensor

    def record_block(self, tensor: torch.Tensor) -> int:
        """Record a tensor's memory block if the block is new, and return the block's index."""
        local = local_part(tensor)
        storage = local.untyped_storage()
        if storage._cdata not in self._numbers:  # noqa: SLF001  # identity of the memory
            width = local.shape[-1] if local.dim() else 0
            self._note_allocation(storage, storage.nbytes(), is_logits=width == self._vocabulary and local.dim() < 4)
        return self._numbers[storage._cdata]  # noqa: SLF001

    def step_trace(self, kinds: Mapping[int, MemoryKind], *, start: int, forward_end: int) -> StepTrace:
        """
        Return the recorded blocks that were in memory at *start* or later.

        Args:
            kinds: Kind of each block of weights, gradients and optimizer states, by block index.
            start: Value of `clock` when the forward pass started.
            forward_end: Value of `clock` when the forward pass ended.
        """
        freed = np.array(self._freed, dtype=np.int64)
        freed[freed < 0] = self.clock + 1
        known = np.full(len(freed), -1, dtype=np.int64)
        for number, kind in kinds.items():
            known[number] = MEMORY_KINDS.index(kind)
        # Weights may be as wide as the logits, but are not logits.
        logits = np.array(self._logits, dtype=np.bool_) & (known < 0)
        allocated, sizes = np.array(self._allocated, dtype=np.int64), np.array(self._sizes, dtype=np.int64)
        there = freed > start
        allocated = np.maximum(allocated - start, 0)
        return StepTrace(
            allocated[there], freed[there] - start, sizes[there], known[there], logits[there], forward_end - start
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """
        Run an operator, and record the memory of its results; floats among these have no content.
        """
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # a DTensor handles it, and its parts come back here
        kwargs = kwargs or {}
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        if tensors and not any(isinstance(one, FakeTensor) for one in tensors):
            with unset_fake_temporarily():
                output = func(*args, **kwargs)
        else:
            if func in _INDEXED:
                args = (args[0], [*_integer_indices(args[1])], *args[2:])
            output = func(*args, **kwargs)
            if not tensors and isinstance(output, torch.Tensor) and not output.is_floating_point():
                with unset_fake_temporarily():
                    output = func(*args, **kwargs)
        for one in tree_iter(output):
            if isinstance(one, torch.Tensor) and not isinstance(one, DTensor):
                self.record_block(one)
        return output

    def _note_allocation(self, storage: torch.UntypedStorage, size: int, *, is_logits: bool = False) -> None:
        key, number = storage._cdata, len(self._allocated)  # noqa: SLF001
        self.clock += 1
        self._allocated.append(self.clock)
        self._freed.append(-1)
        self._sizes.append(size)
        self._logits.append(is_logits)
        self._numbers[key] = number
        self._references[key] = weakref.ref(storage, lambda _: self._note_free(key))

    def _note_free(self, key: int) -> None:
        self.clock += 1
        self._freed[self._numbers.pop(key)] = self.clock
        del self._references[key]

    def _note_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata in self._numbers and storage.nbytes() != size:  # noqa: SLF001
            self._note_free(storage._cdata)  # noqa: SLF001
            self._note_allocation(storage, size)


def _integer_indices(indices: Any) -> Iterator[Any]:
    """
    Yield indices. A boolean mask becomes the positions of its true entries, so shapes are known.
    """
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                yield from index.nonzero(as_tuple=True)
        else:
            yield index


def _model_place(error: BaseException) -> str:
    """Return an error's place in the model's code, as " in FUNCTION of FILE"; "" if unknown."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "modeling" in Path(one.filename).name]
    return f" in {frames[-1].name} of {Path(frames[-1].filename).name}" if frames else ""


def replace_meta_weights(model: torch.nn.Module, tracer: MemoryTracer) -> None:
    """
    Replace a model's weights and buffers on the device `meta` by CPU tensors without content.

    Tied weights stay tied.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with tracer.record():
        for module in model.modules():
            for held in (module._parameters, module._buffers):  # noqa: SLF001  # setting keeps ties
                for name, one in held.items():
                    if one is None:
                        continue
                    if id(one) not in replaced:
                        empty: torch.Tensor = torch.empty(one.shape, dtype=one.dtype)
                        if isinstance(one, torch.nn.Parameter):
                            empty = torch.nn.Parameter(empty, requires_grad=one.requires_grad)
                        replaced[id(one)] = one, empty
                    held[name] = replaced[id(one)][1]  # type: ignore[assignment]  # of the same class
