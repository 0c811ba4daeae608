"""One rank whose model computes no padding, under each way to share a model among ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from packplan.hf import unpad
from tests.e2e.test_unpad import batch_of, build, padded


def main(out: str) -> None:
    """Compare each case with its padded pass, and write the largest differences."""
    torch.use_deterministic_algorithms(mode=False)
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        found = {name: differences(make, rank) for name, make in CASES.items()}
    finally:
        dist.destroy_process_group()
    Path(out, f"found{rank}.json").write_text(json.dumps(found))


def differences(make: Callable[[], tuple[Any, Any]], rank: int) -> list[float]:
    """Return the largest differences of loss and gradients, and the share of positions computed."""
    model, hooks = make()
    model.train()
    batch = batch_of(padded().roll(rank, 0), seed=rank)
    loss, gradients = step(model, batch)
    with hooks.paused():
        due, expected = step(model, batch)
    apart = max(float((one - expected[name]).abs().max()) for name, one in gradients.items())
    assert len(gradients) == len(expected) > 0
    return [abs(loss - due), apart, hooks.counts.real / hooks.counts.padded]


def step(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step, those of sharded weights whole."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), {name: whole(one.grad).clone() for name, one in trained(model)}


def trained(model: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, one) for name, one in model.named_parameters() if one.grad is not None)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ddp_before() -> tuple[Any, Any]:
    model = build("qwen2")
    hooks = unpad(model)
    return DistributedDataParallel(model), hooks


def ddp_after() -> tuple[Any, Any]:
    model = DistributedDataParallel(build("qwen2"))
    return model, unpad(model)


def shard(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp_before() -> tuple[Any, Any]:
    model = build("qwen2")
    hooks = unpad(model)
    return shard(model), hooks


def fsdp_after() -> tuple[Any, Any]:
    model = shard(build("qwen2"))
    return model, unpad(model)


def fsdp_experts() -> tuple[Any, Any]:
    model = build("qwen3_moe")
    hooks = unpad(model, logits=False)
    return shard(model), hooks


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    one.__name__: one for one in (ddp_before, ddp_after, fsdp_before, fsdp_after, fsdp_experts)
}
