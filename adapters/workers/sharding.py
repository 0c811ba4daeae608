"""
Weights that the workers of a policy share: by FSDP 2, by tensor parallelism, or by both.

Ranks form a grid. Those of a row, which are neighbours, share each layer by the model's own
tensor-parallel plan. Those of a column hold the same part of it, compute different data, and sum
their gradients; under FSDP 2 they share that part's weights, gradients and optimizer states.

Rules: every rank of a column runs equally many passes with gradients, or without. Sums stay sums:
FSDP 2 divides by the ranks unless it is told not to, and losses are already divided by the counts
of the whole global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from packplan.adapters.models import local_part, sum_of_squares
from packplan.core.errors import ConfigError

_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
"""Styles of layers whose output is gathered, which have to divide evenly."""

_PARTIAL = "replicated_with_grad_allreduce"
"""
Style of weights that all ranks of a row hold whole, each with a part of their gradient.

Transformers sums what has been added up so far in each backward pass, so a second microbatch would
count the first one twice. Here they are summed once, after the global batch.
"""

_STYLES = frozenset({"colwise", "rowwise", "embedding_rowwise", "rowwise_rep", _PARTIAL}) | _GATHERED
"""Styles of layers whose gradients were proven equal to those of one rank."""

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a model that the ranks of a row divide."""


@attrs.frozen(eq=False)
class RankGrid:
    """Place of this rank in the grid, and the groups of ranks that it belongs to."""

    tp_size: int
    """Ranks that share each layer."""

    fully: bool
    """Whether weights are sharded by FSDP 2 over the ranks of a column."""

    cp_rank: int = 0
    """Rank among those that share a row of tokens."""

    context: dist.ProcessGroup | None = None
    """Ranks that share a row of tokens; None for one."""

    mesh: Any = None
    """Device mesh of the dimensions `data` and `tensor`; None for one rank."""

    @classmethod
    def from_sizes(cls, device: torch.device, *, cp_size: int, tp_size: int, fully: bool) -> RankGrid:
        """
        Build the groups; every rank of the run calls this.

        Args:
            device: Device of the weights.
            cp_size: Ranks that share each row of tokens.
            tp_size: Ranks that share each layer.
            fully: Shard weights by FSDP 2.
        """
        if not dist.is_initialized():
            return cls(tp_size, fully)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mesh = dist.device_mesh.init_device_mesh(
            device.type, (world_size // tp_size, tp_size), mesh_dim_names=("data", "tensor")
        )
        context = None
        # Every rank has to take part in creating every group.
        for first in range(0, world_size, cp_size * tp_size):
            for place in range(tp_size):
                ranks = range(first + place, first + cp_size * tp_size, tp_size)
                group = dist.new_group(list(ranks)) if cp_size > 1 else None
                context = group if rank in ranks else context
        return cls(tp_size, fully, rank // tp_size % cp_size, context, mesh)

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds a part of the weights."""
        return self.mesh is not None and (self.fully or self.tp_size > 1)

    def shard(self, model: Any) -> None:
        """
        Replace a model's weights by this rank's parts, in place.

        Raises:
            ConfigError: The model has no tensor-parallel plan, or one that is not supported.
        """
        if not self.is_sharded:
            return
        if self.tp_size > 1:
            apply_tensor_parallelism(model, self.mesh["tensor"], _plan(model, self.tp_size))
        if self.fully:
            kinds = set(getattr(model, "_no_split_modules", None) or ())
            layers = [module for module in model.modules() if type(module).__name__ in kinds]
            for module in (*layers, model):
                # Also the outermost one, or its weights of before an update would stay gathered.
                fully_shard(module, mesh=self.mesh["data"], reshard_after_forward=True)
            # It runs the vision tower before the model, which would be taken for the outermost one.
            register_fsdp_forward_method(model, "generate")
            for module in _fsdp_modules(model):
                module.set_gradient_divide_factor(1.0)
                # Only NCCL can divide while it sums.
                module.set_force_sum_reduction_for_comms(enable=True)

    def sum_gradients(self, model: Any) -> None:
        """Sum gradients over the ranks that computed other data; weights without one get zeros."""
        plan = model.tp_plan if self.tp_size > 1 else {}
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if self.mesh is not None and not self.fully:
                dist.all_reduce(local_part(weight.grad), group=self.mesh["data"].get_group())
            if plan.get(replace_layer_number_by_wildcard(name.rpartition(".")[0])) == _PARTIAL:
                dist.all_reduce(local_part(weight.grad), group=self.mesh["tensor"].get_group())


@contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """
    Gather the weights that FSDP 2 shards until the block ends, so that ranks may run any number of
    passes without gradients inside.
    """
    modules = _fsdp_modules(model)
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(reshard_after_forward=False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(reshard_after_forward=True, recurse=False)


@torch.no_grad()
def clip_gradients(weights: Sequence[Tensor], *, max_norm: float, sharded: bool) -> float:
    """
    Scale gradients down to a norm, and return their norm before.

    Args:
        weights: Weights with gradients, or this rank's parts.
        max_norm: Largest norm; 0 sets no limit.
        sharded: Whether ranks hold parts; all of them call this then.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = math.sqrt(sum_of_squares(gradients, sharded=sharded)[0])
    # As torch does, so that a norm near 0 divides nothing.
    if max_norm and (scale := max_norm / (norm + 1e-6)) < 1:
        for gradient in gradients:
            local_part(gradient).mul_(scale)
    return norm


@torch.no_grad()
def gathered_state(model: Any, *, keep: bool) -> dict[str, Tensor]:
    """
    Return all weights, gathered one by one; every rank calls this.

    Args:
        model: Model whose weights may be sharded.
        keep: Whether this rank keeps them, in the memory of its CPU; else it returns none.
    """
    state = {}
    for name, part in model.state_dict().items():
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        if keep:
            state[name] = whole.cpu()
    return state


def _fsdp_modules(model: Any) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _plan(model: Any, tp_size: int) -> dict[str, str]:
    """Return the styles of a model's layers; ConfigError where they cannot be shared."""
    key, name = "policy.tensor_parallel_size", type(model).__name__
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise ConfigError.at(key, f"is {tp_size}, but transformers has no tensor-parallel plan for {name}: set it to 1")
    if others := sorted(set(plan.values()) - _STYLES):
        reason = (
            f"is {tp_size}, but {name} has layers of the styles {', '.join(others)}, which are not proven: set it to 1"
        )
        raise ConfigError.at(key, reason)
    config = model.config.get_text_config()
    for size in _DIVIDED:
        if (number := getattr(config, size, tp_size)) % tp_size:
            raise ConfigError.at(key, f"is {tp_size}, which does not divide the model's {size} of {number:,}: lower it")
    # Ranks keep such a layer whole where it is tied to another one, or does not divide evenly.
    whole = config.tie_word_embeddings or config.vocab_size % tp_size
    return {name: style for name, style in plan.items() if style != _PARTIAL and not (whole and style in _GATHERED)}
