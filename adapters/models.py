"""
Finds the model inside its adapters, restores modes, buffers and random states, and computes norms
of weights and of gradients.

Trainers check the root mean square of the trained weights before they save a checkpoint.

After a step with a learning rate of 1e30, for example, weights are finite but useless. The loss of
another forward pass may be finite too, since norm layers divide by the huge values. The root mean
square reveals the fault in one pass over the weights. Weights count as ruined if their root mean
square has grown more than a thousandfold since the first step. Normal runs stay far below this
limit. A step of AdamW moves a weight by about the learning rate. In a run from random weights, the
root mean square becomes a few times larger.
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
"""
Largest factor by which the weights' root mean square may grow in a run. Above this factor, the
weights count as ruined.
"""

_MIN_SIZE = 0.01
"""Smallest initial root mean square that is assumed, since adapters and biases may begin at 0."""


def set_media_token_ids(template: Any, processor: Any) -> None:
    """
    Set a template's media token ids from its processor and vocabulary.

    With the ids that are built into ms-swift, an image might be encoded as a single token.
    """
    for name in ("image_token_id", "video_token_id"):
        if hasattr(template, name) and hasattr(processor, name):
            setattr(template, name, getattr(processor, name))
    known = template.tokenizer.get_vocab()
    for name in ("begin_of_image", "end_of_image", "begin_of_video", "end_of_video"):
        if hasattr(template, f"{name}_token") and f"<|{name}|>" in known:
            setattr(template, f"{name}_token", known[f"<|{name}|>"])


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """
    Set a model to evaluation mode in this context, then restore the mode of each module.
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
    """Replace attributes of an object or a module in this context, then restore them."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def has_ranks() -> bool:
    """Return whether there are other ranks. Simulated ranks of a traced step do not count."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def local_part(tensor: Any) -> torch.Tensor:
    """
    Return this rank's part of a `DTensor` or a ZeRO 3 weight; other tensors are returned unchanged.
    """
    if hasattr(tensor, "ds_tensor"):
        part: torch.Tensor = tensor.ds_tensor.detach()
        start = dist.get_rank(tensor.ds_process_group) * part.numel()
        return part[: max(0, tensor.ds_numel - start)]  # the last part may end in filler
    whole: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return whole


def find_sharded_weight(model: torch.nn.Module) -> str | None:
    """
    Return the name of the first weight that is sharded over processes; None if no weight is.

    FSDP and ZeRO 3 shard weights. A weight counts as sharded even while it is gathered, since ZeRO
    3 leaves small weights gathered until a checkpoint is loaded.
    """
    for name, weight in model.named_parameters():
        is_empty = weight.numel() == 0 or weight.is_meta
        if is_empty or hasattr(weight, "ds_id") or "_flat_param" in name or isinstance(weight, DTensor):
            return name
    return None


@contextmanager
def hold_buffers_and_rng(model: torch.nn.Module) -> Iterator[None]:
    """Restore a model's buffers and the random states of Python, numpy and torch on exit."""
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
def root_mean_square(weights: Iterable[torch.Tensor], *, device: torch.device | None = None) -> float:
    """
    Return the root mean square of the trained weights; NaN or infinity if a weight is not finite.

    Args:
        weights: Weights of the model, or this rank's part of them.
        device: Device for the sum over all ranks; if it is given, every rank has to call this
            function. A weight that several ranks have in full then counts once. None sums over
            this rank alone.
    """
    sums = torch.zeros(2, dtype=torch.float64)  # sum of squares, number of elements
    for weight in weights:
        if not weight.requires_grad:
            continue
        part = local_part(weight)
        share = 1.0 if device is None else _counted_share(weight)
        norm = torch.linalg.vector_norm(part, dtype=torch.float64).cpu()
        sums += share * torch.stack([norm**2, torch.tensor(part.numel(), dtype=torch.float64)])
    if device is not None:
        sums = sums.to(device)  # ranks of other trainers may meet on their GPUs alone
        dist.all_reduce(sums)
    squares, number = sums.tolist()
    return math.sqrt(squares / max(1.0, number))


def _counted_share(tensor: Any) -> float:
    """Return the factor of this rank's part in a sum over ranks, so that copies count once."""
    if hasattr(tensor, "ds_tensor"):
        return dist.get_world_size(tensor.ds_process_group) / dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return 1.0 / dist.get_world_size()
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    parts: int = math.prod(size for placement, size in sizes if not placement.is_replicate())
    return parts / dist.get_world_size()


def is_ruined(rms: float, *, before: float) -> bool:
    """
    Return whether the root mean square of the weights has grown so much that they are useless.

    Args:
        rms: Root mean square of the trained weights now.
        before: Root mean square of the trained weights before the first step.

    >>> [is_ruined(rms, before=0.02) for rms in (0.5, 1e30, float("nan"))]
    [False, True, True]
    """
    return not rms <= _MAX_GROWTH * max(before, _MIN_SIZE)


def plain_model(model: Any) -> Any:
    """Return the model inside its adapters, or the model itself if it has no adapters."""
    if hasattr(model, "adapters"):  # a `SwiftModel`
        return model.base_model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load_by_model_class(model: Any, checkpoint: str) -> bool:
    """
    Load a checkpoint's weights with the model's own class; return whether that was possible.

    Only the class knows legacy names of weights; other loaders skip such weights with a warning.
    For a PEFT model, nothing is loaded, and false is returned.
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
    Return the gradient of *loss* for each trained weight that affects *loss*, by weight name.
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
    """
    Return, by weight name, the norm of the difference between two gradients of the weight.

    A gradient that is missing on one side counts as 0.
    """
    norms = {}
    for name in {**found, **expected}:
        mine, own = (part[name].double() if name in part else 0.0 for part in (found, expected))
        norms[name] = math.sqrt(_squared_norm(torch.as_tensor(mine - own)))
    return norms


def _squared_norm(gradient: torch.Tensor) -> float:
    return float(gradient.double().square().sum())
