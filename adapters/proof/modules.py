"""
Search for the module that mixes samples, or whose results for a packed sample and the sample alone
differ.

The calls of a model's modules are a tree. The search starts at the call of the model. Among the
calls inside a call, the search selects the first call whose output shows the fault while its inputs
do not. The search does not enter other calls, such as calls that only sort tokens for experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import attrs
import torch

from packplan.adapters.proof.batches import PackedBatch, Place, Shape
from packplan.adapters.proof.comparison import run_watched
from packplan.adapters.proof.gradients import Dependence, TensorNode, view_by_token, watching_embeddings

C = TypeVar("C")


@attrs.frozen
class NamedModule:
    """Module of a model, with its name in `named_modules`."""

    name: str
    """Empty for the model itself."""

    class_name: str

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.class_name})"


@attrs.frozen(eq=False)
class _ModuleCall:
    """One call of a module."""

    module: NamedModule
    inputs: list[Any]
    """Recorded parts of the module's arguments."""

    outputs: list[Any] = attrs.field(factory=list)
    """Recorded parts of the module's output."""

    children: list[_ModuleCall] = attrs.field(factory=list)
    """Calls of other modules during this call, in their order."""


def first_leak(model: torch.nn.Module, packed: PackedBatch) -> tuple[Dependence, NamedModule | None] | None:
    """
    Find the first sample whose logits depend on another sample, or do not depend on the sample
    itself. Return this dependence, and the module that mixes the samples.

    The module is None if it is not found. The result is None if there is no such sample.

    Args:
        model: Model in evaluation mode.
        packed: Packed rows.
    """
    watched, logits = run_watched(model, packed)
    leak = next((one for one in watched.logit_dependences(logits) if one.isolation != 0), None)
    return None if leak is None else (leak, first_mixing_module(model, packed, leak.reader))


@contextmanager
def _record_calls(model: torch.nn.Module, keep: Callable[[Any], Any | None]) -> Iterator[list[_ModuleCall]]:
    """
    Record module calls inside this context; afterwards the list has the calls of the model itself.

    A call whose output has no recorded part is replaced by the calls inside it.

    Args:
        model: Model whose calls are recorded.
        keep: Function that returns the part to record of a module's argument or output, or None.
    """
    calls: list[_ModuleCall] = []
    running = [calls]

    def begin_call(module: NamedModule, _: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        running[-1].append(call := _ModuleCall(module, _kept_parts((arguments, options), keep)))
        running.append(call.children)

    def end_call(_: Any, __: Any, ___: Any, output: Any) -> None:
        inside = running.pop()
        running[-1][-1].outputs.extend(_kept_parts(output, keep))
        if not running[-1][-1].outputs:
            running[-1][-1:] = inside

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            named = NamedModule(name, type(module).__name__)
            hooks.enter_context(module.register_forward_pre_hook(partial(begin_call, named), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end_call, with_kwargs=True))
        yield calls


def _kept_parts(value: Any, keep: Callable[[Any], Any | None]) -> list[Any]:
    """Return results of *keep*, except None, for all values nested in arguments or outputs."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [kept for one in value for kept in _kept_parts(one, keep)]
    kept = keep(value)
    return [] if kept is None else [kept]


def first_mixing_module(model: torch.nn.Module, packed: PackedBatch, reader: int) -> NamedModule | None:
    """
    Return the first module whose output mixes a sample with another sample, while its input does
    not; None if no such module is found.

    Args:
        model: Model in evaluation mode.
        packed: Packed rows.
        reader: Index of the sample whose logits depend on another sample.
    """
    with (
        torch.enable_grad(),
        watching_embeddings(model, packed) as watched,
        _record_calls(model, lambda value: TensorNode.from_value(value, packed.shape)) as calls,
    ):
        model(**watched.inputs)

    def mixes(results: Sequence[TensorNode]) -> bool:
        return any(one.size != 0 for result in results for one in watched.dependences(result, [reader]))

    found = _innermost(calls, lambda call: mixes(call.outputs) and not mixes(call.inputs), lambda call: call.children)
    return None if found is None else found.module


def _innermost(calls: Iterable[C], shows: Callable[[C], bool], inside: Callable[[C], Iterable[C]]) -> C | None:
    """
    Return the innermost call that shows a fault; None if no call shows one. The search takes the
    first such call, then the first such call inside it, and so on.
    """
    found = None
    while (inner := next(filter(shows, calls), None)) is not None:
        found, calls = inner, inside(inner)
    return found


def first_different_module(
    model: torch.nn.Module, packed: PackedBatch, alone: Mapping[str, Any], place: Place, *, limit: float
) -> NamedModule | None:
    """
    Return the first module whose outputs for a packed sample and for the sample alone differ, while
    its inputs agree. Return None if no such module is found.

    Args:
        model: Model in evaluation mode.
        packed: Packed rows.
        alone: The sample alone, as arguments of the model.
        place: Place of the sample in the rows.
        limit: Largest relative difference that rounding can cause.
    """
    tokens = place[1].stop - place[1].start
    with torch.no_grad():
        with _record_calls(model, partial(_copy_sample_part, shape=(1, tokens), place=(0, slice(tokens)))) as expected:
            model(**alone)
        with _record_calls(model, partial(_copy_sample_part, shape=packed.shape, place=place)) as found:
            model(**packed.inputs)

    def differs(pair: tuple[_ModuleCall, _ModuleCall]) -> bool:
        mine, own = pair
        if mine.module != own.module:  # the row takes another way than the sample
            return False
        return _differs(mine.outputs, own.outputs, limit) and not _differs(mine.inputs, own.inputs, limit)

    pair = _innermost(
        zip(found, expected, strict=False), differs, lambda one: zip(*(call.children for call in one), strict=False)
    )
    return None if pair is None else pair[0].module


def _copy_sample_part(value: Any, *, shape: Shape, place: Place) -> torch.Tensor | None:
    """Return a copy of one sample's part of a tensor, with tokens as the first axis."""
    view = view_by_token(value, shape)
    if view is None or not view.is_floating_point():
        return None
    part = view.detach()[place]
    return part.reshape(len(part), -1).float().clone()


def _differs(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], limit: float) -> bool:
    """
    Return whether any tensor differs from its expected tensor by more than *limit*, relative to the
    largest expected value. Pairs of other shapes do not count. False if the numbers differ.
    """
    if len(found) != len(expected):
        return False  # they cannot be compared
    return any(
        mine.shape == own.shape and not float((mine - own).abs().max()) <= limit * float(own.abs().max())
        for mine, own in zip(found, expected, strict=True)
    )
