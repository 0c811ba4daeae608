"""
State of a model and of random numbers, weights of checkpoints, and norms of gradients.

Weights are also checked before they are saved.

The check uses the root mean square of the trained weights. After a step with a learning rate of
1e30, for example, weights are finite but useless. The loss of another forward pass may be finite
too, since norms divide by the huge values. The root mean square shows the fault in one pass over
the weights. Weights count as ruined if they are a thousand times as large as before the first step.
Normal runs stay far below: a step of AdamW moves a weight by about the learning rate, and runs from
random weights end at a few times their first size.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Gradients = dict[str, torch.Tensor]
"""Gradients of a model's weights, by name."""

_MAX_GROWTH = 1000.0
"""Growth of the root mean square, since the first step, above which weights count as ruined."""

_MIN_SIZE = 0.01
"""Least root mean square to compare with, since adapters and biases may begin at 0."""


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """
    Set a model to evaluation mode in this context; at its end, each module has its mode again.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def replace_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object or a module inside this context."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def local_part(tensor: Any) -> torch.Tensor:
    """
    Return this rank's part of a `DTensor` or a ZeRO 3 weight; any other tensor is returned itself.
    """
    if hasattr(tensor, "ds_tensor"):
        part: torch.Tensor = tensor.ds_tensor.detach()
        start = dist.get_rank(tensor.ds_process_group) * part.numel()
        return part[: max(0, tensor.ds_numel - start)]  # the last part may end in filler
    whole: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return whole


def find_sharded_weight(model: torch.nn.Module) -> str | None:
    """
    Return the name of the first weight that this process holds only in part; None if it holds all.

    Weights are held in part under FSDP and ZeRO 3. They count as such also while they are gathered:
    small weights stay gathered until a checkpoint is loaded.
    """
    for name, weight in model.named_parameters():
        is_empty = weight.numel() == 0 or weight.is_meta
        if is_empty or hasattr(weight, "ds_id") or "_flat_param" in name or isinstance(weight, DTensor):
            return name
    return None


@contextmanager
def hold_buffers_and_rng(model: torch.nn.Module) -> Iterator[None]:
    """Restore a model's buffers and the random state (Python, numpy, torch) after this context."""
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # that of others
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)  # noqa: NPY002  # see above
        for buffer, before in buffers:
            buffer.data.copy_(before)


@torch.no_grad()
def root_mean_square(weights: Iterable[torch.Tensor], *, sharded: bool = False) -> float:
    """
    Return the root mean square of the trained weights; nan or inf if one is not finite.

    Args:
        weights: Weights of the model, or this rank's part of them.
        sharded: Sum over all ranks, which all call this.
    """
    squares, number = sum_of_squares((one for one in weights if one.requires_grad), sharded=sharded)
    return math.sqrt(squares / max(1.0, number))


@torch.no_grad()
def sum_of_squares(tensors: Iterable[torch.Tensor], *, sharded: bool) -> tuple[float, float]:
    """
    Return the sum of squares of all elements, and the number of elements.

    Args:
        tensors: Tensors, or this rank's parts.
        sharded: Sum over all ranks, which all call this; copies on several ranks count once.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for tensor in tensors:
        part = local_part(tensor)
        share = _counted_share(tensor) if sharded else 1.0
        norm = torch.linalg.vector_norm(part, dtype=torch.float64).cpu()
        sums += share * torch.stack([norm**2, torch.tensor(part.numel(), dtype=torch.float64)])
    if sharded:
        dist.all_reduce(sums)
    squares, number = sums.tolist()
    return squares, number


def _counted_share(tensor: Any) -> float:
    """Return the weight of this rank's part in a sum over ranks, where copies count once."""
    if hasattr(tensor, "ds_tensor"):
        return dist.get_world_size(tensor.ds_process_group) / dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return 1.0 / dist.get_world_size()
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    parts: int = math.prod(size for placement, size in sizes if not placement.is_replicate())
    return parts / dist.get_world_size()


def is_ruined(rms: float, *, before: float) -> bool:
    """
    Return whether weights have lost their values, by a comparison of their root mean squares.

    Args:
        rms: Root mean square of the trained weights now.
        before: Root mean square before the first step.

    >>> [is_ruined(rms, before=0.02) for rms in (0.5, 1e30, float("nan"))]
    [False, True, True]
    """
    return not rms <= _MAX_GROWTH * max(before, _MIN_SIZE)


def load_by_model_class(model: Any, checkpoint: str) -> bool:
    """
    Load a checkpoint's weights by the model's own class; return whether that was possible.

    Only the class knows legacy names of weights; other loaders skip such weights with a warning.
    PEFT models are left unchanged.
    """
    if hasattr(model, "peft_config"):
        return False
    if hasattr(model, "adapters"):  # a `SwiftModel`, which transformers does not know
        for name in model.adapters:
            model.load_state_dict(model.load_state_file(str(Path(checkpoint, name))), adapter_name=name)
        return True
    saved = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(saved.state_dict(), strict=True)
    return True


def weight_gradients(model: torch.nn.Module, loss: torch.Tensor) -> Gradients:
    """
    Return the gradient of *loss* with respect to each trained weight that it depends on, by name.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    found = torch.autograd.grad(loss, [one for _, one in named], allow_unused=True)
    return {name: one for (name, _), one in zip(named, found, strict=True) if one is not None}


def add_gradients(total: Gradients, gradients: Gradients) -> float:
    """Add *gradients* to *total* in place; return the norm of *gradients* alone, in float64."""
    for name, one in gradients.items():
        total[name] = total[name] + one if name in total else one
    return math.sqrt(sum(map(_squared_norm, gradients.values())))


def difference_norms(found: Gradients, expected: Gradients) -> Mapping[str, float]:
    """Return the norm of each weight's gradient difference; a missing gradient counts as 0."""
    norms = {}
    for name in {**found, **expected}:
        mine, own = (part[name].double() if name in part else 0.0 for part in (found, expected))
        norms[name] = math.sqrt(_squared_norm(torch.as_tensor(mine - own)))
    return norms


def _squared_norm(gradient: torch.Tensor) -> float:
    return float(gradient.double().square().sum())
