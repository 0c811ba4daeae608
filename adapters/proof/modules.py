"""
The module in which samples are mixed.

Modules are walked in the order in which they finish, so inner ones come first. A module mixes
samples if its output for one of them depends on another, and its inputs do not. If it does but the
modules around it do not, it orders tokens otherwise, as experts do, and is passed over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch

from packplan.adapters.proof.batches import PackedBatch, Place, Shape
from packplan.adapters.proof.comparison import watch_pass
from packplan.adapters.proof.gradients import Reach, Result, logit_reaches, view_by_token, watch_embeddings


@attrs.frozen
class NamedModule:
    """A module, named as `named_modules` does."""

    name: str
    """Empty for the model itself."""

    kind: str
    """Name of its class."""

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.kind})"


@attrs.frozen(eq=False)
class _Call:
    """One call of a module, with what it was given and returned."""

    module: NamedModule
    given: list[Any]
    returned: list[Any]


def first_leak(model: torch.nn.Module, packed: PackedBatch) -> tuple[Reach, NamedModule | None] | None:
    """
    Return the first sample whose logits depend on another one, and the module that mixes them; None
    if there is no such sample.

    Args:
        model: Model in evaluation mode.
        packed: Packed rows.
    """
    watched, logits = watch_pass(model, packed)
    leak = next((reach for reach in logit_reaches(watched, logits) if reach.size != 0), None)
    return None if leak is None else (leak, first_mixing_module(model, packed, leak.reader))


@contextmanager
def _calls(model: torch.nn.Module, keep: Callable[[Any], Any | None]) -> Iterator[list[_Call]]:
    """
    Collect the calls of a model's modules, in the order in which they end.

    Args:
        model: Model that computes inside.
        keep: Function from a tensor that a module takes or returns to the part to keep, or None.
    """
    calls: list[_Call] = []
    running: list[list[Any]] = []

    def begin(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        running.append(_kept((arguments, options), keep))

    def end(module: NamedModule, _: Any, __: Any, output: Any) -> None:
        calls.append(_Call(module, running.pop(), _kept(output, keep)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            named = NamedModule(name, type(module).__name__)
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(end, named)))
        yield calls


def _kept(value: Any, keep: Callable[[Any], Any | None]) -> list[Any]:
    """Return the results of *keep* on nested arguments or outputs, those that are not None."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [kept for one in value for kept in _kept(one, keep)]
    kept = keep(value)
    return [] if kept is None else [kept]


def first_mixing_module(model: torch.nn.Module, packed: PackedBatch, reader: int) -> NamedModule | None:
    """
    Return the first module in which a sample's numbers come to depend on another sample.

    Args:
        model: Model in evaluation mode.
        packed: Packed rows.
        reader: Sample whose logits depend on another.
    """
    with (
        torch.enable_grad(),
        watch_embeddings(model, packed) as watched,
        _calls(model, lambda value: Result.of(value, packed.shape)) as calls,
    ):
        model(**watched.inputs)

    def mixed(results: Sequence[Result]) -> bool:
        return any(reach.size != 0 for result in results for reach in watched.reaches(result, [reader]))

    calls = [call for call in calls if call.returned]
    for call in (*_from_first_block(calls, mixed), *calls):
        if mixed(call.returned) and not mixed(call.given) and _is_mixed_around(call, calls, mixed):
            return call.module
    return None


def _from_first_block(calls: list[_Call], mixed: Callable[[Sequence[Result]], bool]) -> list[_Call]:
    """
    Return the calls without those before the first block of layers that is mixed.

    A block's output holds that of the blocks before it. So most modules are not looked at.
    """
    blocks = [place for place, call in enumerate(calls) if call.module.name.rpartition(".")[2].isdecimal()]
    depths = {place: calls[place].module.name.count(".") for place in blocks}
    outer = [place for place in blocks if depths[place] == min(depths.values())]
    start = 0
    for place in outer:
        if mixed(calls[place].returned):
            break
        start = place + 1
    return calls[start:]


def _is_mixed_around(call: _Call, calls: list[_Call], mixed: Callable[[Sequence[Result]], bool]) -> bool:
    """Return whether the modules around a call's, which end after it, are mixed too."""
    later = calls[calls.index(call) + 1 :]
    name = call.module.name
    while name:
        name = name.rpartition(".")[0]
        around = next((one for one in later if one.module.name == name), None)
        if around is not None and not mixed(around.returned):
            return False
    return True


def first_different_module(
    model: torch.nn.Module, packed: PackedBatch, alone: Mapping[str, Any], place: Place, *, limit: float
) -> NamedModule | None:
    """
    Return the first module whose output for a sample differs from that for the sample alone.

    Args:
        model: Model in evaluation mode.
        packed: Packed rows.
        alone: The sample alone, as arguments of the model.
        place: Place of the sample in the rows.
        limit: Largest relative difference that rounding explains.
    """
    tokens = place[1].stop - place[1].start
    with torch.no_grad():
        with _calls(model, partial(_part, shape=(1, tokens), place=(0, slice(tokens)))) as expected:
            model(**alone)
        with _calls(model, partial(_part, shape=packed.shape, place=place)) as found:
            model(**packed.inputs)
    for mine, own in zip(found, expected, strict=False):
        if mine.module != own.module:
            return None  # the row takes another way than the sample
        if _differs(mine.returned, own.returned, limit) and not _differs(mine.given, own.given, limit):
            return mine.module
    return None


def _part(value: Any, *, shape: Shape, place: Place) -> torch.Tensor | None:
    """Return a copy of a tensor's part of one sample, with the tokens first."""
    view = view_by_token(value, shape)
    if view is None or not view.is_floating_point():
        return None
    part = view.detach()[place]
    return part.reshape(len(part), -1).float().clone()


def _differs(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], limit: float) -> bool:
    """Return whether one of some tensors differs from the expected one by more than a limit."""
    if len(found) != len(expected):
        return False  # they cannot be compared
    return any(
        mine.shape == own.shape and not float((mine - own).abs().max()) <= limit * float(own.abs().max())
        for mine, own in zip(found, expected, strict=True)
    )
