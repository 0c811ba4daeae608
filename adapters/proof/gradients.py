"""
Dependence of results on samples, measured by gradients with respect to token embeddings.

If a result does not depend on a sample, its gradient at the sample is exactly 0, however the kernel
rounds. So no threshold is needed, and even the smallest dependence on another sample is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from packplan.adapters.proof.batches import PackedBatch, Shape
from packplan.core.errors import ModelError

_SEED = 11
"""Seed of random weights for the sum of a tensor's values that is differentiated."""


def view_by_token(value: Any, shape: Shape) -> torch.Tensor | None:
    """
    Return a view of a tensor whose first axes are rows and tokens; None if the tensor has no such
    axes.

    Args:
        value: Any argument or output of a module.
        shape: Number of rows of the batch, and number of tokens of each row. Rows and tokens of
            *value* may be one axis.
    """
    if not isinstance(value, torch.Tensor):
        return None
    rows, tokens = shape
    for axis in (1, 0, 2) if value.dim() > 2 else (0, 1):
        if axis < value.dim() and value.shape[axis] == rows * tokens:
            lengths = (*value.shape[:axis], rows, tokens, *value.shape[axis + 1 :])
            return value.view(lengths).movedim((axis, axis + 1), (0, 1))
    for axis in (1, 2):
        if rows > 1 and axis < value.dim() and value.shape[0] == rows and value.shape[axis] == tokens:
            return value.movedim(axis, 1)
    return None


@attrs.frozen(eq=False)
class TensorNode:
    """
    Node of the autograd graph that produced a tensor of a forward pass, with the tensor's shape.
    """

    edge: GradientEdge
    example: torch.Tensor
    """Tensor of the same shape, type and device, without memory of its own."""

    @classmethod
    def from_value(cls, value: Any, shape: Shape) -> TensorNode | None:
        """
        Return the node of a tensor; None if the tensor has no gradient, or no axes of rows and
        tokens.
        """
        if view_by_token(value, shape) is None or not value.requires_grad or not value.is_floating_point():
            return None
        return cls(get_gradient_edge(value), value.new_empty(1).expand(value.shape))


@attrs.frozen
class Dependence:
    """
    Gradients that measure how much one sample's result depends on another sample, and on itself.
    """

    reader: int
    """Index of the sample whose result is differentiated."""

    source: int
    """
    Index of the other sample on which the result depends most; `reader` if it depends on no other
    sample.
    """

    size: float
    """
    Largest gradient with respect to sample `source`; 0 if the result depends on no other sample.
    """

    own: float
    """
    Largest gradient with respect to sample `reader`; if the gradient is 0 or not finite, the test
    proves nothing.
    """

    @property
    def isolation(self) -> float:
        """`size` divided by `own`; infinity if `own` is 0, or if one of them is not finite."""
        if not self.own > 0 or not math.isfinite(self.own) or not math.isfinite(self.size):
            return math.inf
        return self.size / self.own


@attrs.frozen(eq=False)
class WatchedPass:
    """Forward pass of packed rows whose embeddings are recorded."""

    packed: PackedBatch

    inputs: dict[str, Any]
    """Arguments of the pass; if they include embeddings, these require a gradient."""

    sources: list[tuple[GradientEdge, int | None]] = attrs.field(factory=list)
    """
    Gradient edge of each recorded input, paired with None for embeddings of all tokens, or with the
    sample's index for pixels.
    """

    def logit_dependences(self, logits: torch.Tensor, readers: Iterable[int] | None = None) -> Iterator[Dependence]:
        """
        Yield, for each reader, the `Dependence` of its logits on the other sample with the largest
        gradient.

        Args:
            logits: Logits of the rows, which the pass has computed.
            readers: Indices of the samples to test; None takes all.

        Raises:
            ModelError: The logits have no gradient, or no module embeds the tokens.
        """
        result = TensorNode.from_value(logits, self.packed.shape)
        if result is None:
            reason = "the model's logits have no gradient, so a leak cannot be measured: load the model unquantised"
            raise ModelError("probe", reason)
        if not self.sources:
            raise ModelError("probe", "the model embeds tokens outside of any module, so a leak cannot be measured")
        yield from self.dependences(result, readers)

    def dependences(self, result: TensorNode, readers: Iterable[int] | None = None) -> Iterator[Dependence]:
        """
        Yield, for each reader, the `Dependence` of its part of a result on the other sample with
        the largest gradient.

        Args:
            result: Node of a tensor that the pass has computed.
            readers: Indices of the samples to test; None takes all.
        """
        drawn = torch.randn(result.example.shape, generator=torch.Generator().manual_seed(_SEED))
        weights = drawn.to(result.example)
        for reader in range(len(self.packed.places)) if readers is None else readers:
            largest = self._gradient_sizes(result, reader, weights)
            others = {number: size for number, size in enumerate(largest) if number != reader and size != 0}
            source = max(others, key=lambda one: math.inf if math.isnan(largest[one]) else largest[one], default=reader)
            yield Dependence(reader, source, others.get(source, 0.0), largest[reader])

    def _gradient_sizes(self, result: TensorNode, reader: int, weights: torch.Tensor) -> list[float]:
        """
        Return the largest gradient of one sample's part of a result with respect to each sample's
        embeddings.

        Args:
            result: Tensor of the pass that has axes of rows and tokens.
            reader: Index of the sample.
            weights: Weights of the result's values in the sum that is differentiated.
        """
        own, places = torch.zeros_like(weights), self.packed.places
        self._view_by_token(own)[places[reader]] = self._view_by_token(weights)[places[reader]]
        edges = [edge for edge, _ in self.sources]
        found = torch.autograd.grad([result.edge], edges, [own], retain_graph=True, allow_unused=True)
        sizes = torch.zeros(len(places), device=weights.device)
        for (_, sample), gradient in zip(self.sources, found, strict=True):
            if gradient is None:
                continue
            size = gradient.detach().abs().float()
            if sample is None:
                by_token = self._view_by_token(size).flatten(2).amax(2).to(sizes)
                sizes = torch.maximum(sizes, torch.stack([by_token[place].max() for place in places]))
            else:
                sizes[sample] = torch.maximum(sizes[sample], size.max().to(sizes))
        return sizes.tolist()

    def _view_by_token(self, value: torch.Tensor) -> torch.Tensor:
        view = view_by_token(value, self.packed.shape)
        assert view is not None  # noqa: S101  # a `TensorNode` and its gradient have the tokens
        return view


def open_source(embedded: torch.Tensor) -> tuple[GradientEdge, torch.Tensor]:
    """
    Return the gradient edge of embedded tokens, which then require a gradient, and the embedded
    tokens to continue with.
    """
    if embedded.requires_grad:
        return get_gradient_edge(embedded), embedded
    source = embedded.detach().requires_grad_()
    return get_gradient_edge(source), source.clone()  # later operations may write into the output


@contextmanager
def watching_embeddings(model: torch.nn.Module, packed: PackedBatch) -> Iterator[WatchedPass]:
    """
    Inside this context, record the embeddings of a forward pass of packed rows, with gradients.
    """
    watched = WatchedPass(packed, dict(packed.inputs))

    def collect_source(_: Any, __: Any, output: Any) -> Any:
        """Record the output of an embedding layer as a source, and make it require a gradient."""
        if view_by_token(output, packed.shape) is None or not torch.is_grad_enabled():
            return output
        edge, embedded = open_source(output)
        watched.sources.append((edge, None))
        return embedded

    given = packed.inputs.get("inputs_embeds")
    if isinstance(given, torch.Tensor):
        watched.inputs["inputs_embeds"] = collect_source(None, None, given.detach())
    with ExitStack() as hooks:
        for module in _embedding_modules(model):
            hooks.enter_context(module.register_forward_hook(collect_source))
        yield watched


@contextmanager
def changed_embeddings(model: torch.nn.Module, share: float) -> Iterator[None]:
    """
    Inside this context, the absolute value of each embedded number is larger or smaller by *share*,
    at random.
    """
    draw = torch.Generator().manual_seed(_SEED)

    def change(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, embedded.shape, generator=draw).to(embedded) * 2 - 1
        return embedded * (1 + share * signs)

    with ExitStack() as hooks:
        for module in _embedding_modules(model):
            hooks.enter_context(module.register_forward_hook(change))
        yield


def _embedding_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return all `nn.Embedding` modules, and the module that `get_input_embeddings` returns."""
    found: list[torch.nn.Module] = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    try:
        own: Any = model.get_input_embeddings()  # type: ignore[operator]  # of transformers' models
    except (AttributeError, NotImplementedError):
        return found
    return found if own is None or own in found else [*found, own]
