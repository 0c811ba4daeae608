"""
Search for layers that carry a state along a row.

In such a layer, a sample's part of the output changes when another sample's part of the input does.
"""

import contextlib
from functools import partial
from typing import Any

import torch

from packplan.adapters.attention import split_states
from packplan.adapters.probe.rows import ProbeRow

_MOVED = 1e-5
"""Change of a sample's output, relative to the largest output, that is more than rounding."""

_ROUNDS = 4


def split_found_states(model: Any, row: ProbeRow) -> tuple[str, ...]:
    """
    Run a model's layers that carry a state sample by sample, innermost first, and return their
    classes.

    Args:
        model: Model that follows its rows.
        row: Row to test the layers with.
    """
    found: set[str] = set()
    for _ in range(_ROUNDS):
        try:
            new = _leaking_classes(model, row) - found
        except Exception:
            if not found:
                raise
            break  # the found layers cannot run sample by sample; the next measurement shows why
        if not new:
            break
        split_states(model, new)
        found |= new
    return tuple(sorted(found - _nested_classes(model, found)))


def _nested_classes(model: Any, classes: set[str]) -> set[str]:
    """Return the classes whose layers all lie within layers of the other classes."""
    places: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ in classes:
            places.setdefault(type(module).__name__, []).append(name)
    every = [name for names in places.values() for name in names]
    return {
        one
        for one, names in places.items()
        if all(any(name.startswith(f"{other}.") for other in every) for name in names)
    }


def _leaking_classes(model: Any, row: ProbeRow) -> set[str]:
    """Return the classes of the innermost layers whose samples are not apart."""
    leaks: dict[str, str] = {}
    running: list[str] = []

    def test_layer(name: str, module: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if running:
            return
        place = _token_argument(arguments, options, row)
        if place is None:
            return
        running.append(name)
        try:
            changed, named = _change_samples(arguments, options, place, row)
            if _has_moved(output, module.forward(*changed, **named), row):
                leaks[name] = type(module).__name__
        finally:
            running.clear()

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            is_own = not type(module).__module__.startswith("torch.")
            if name and is_own and not hasattr(module, "get_input_embeddings"):
                hooks.enter_context(module.register_forward_hook(partial(test_layer, name), with_kwargs=True))
        model(**row.packed(), use_cache=False)
    return {one for name, one in leaks.items() if not any(other.startswith(f"{name}.") for other in leaks)}


def _token_argument(arguments: tuple[Any, ...], options: dict[str, Any], row: ProbeRow) -> int | str | None:
    """Return the argument with a vector for each token of the row: its position or its name."""
    places: list[int | str] = [*range(len(arguments)), *options]
    for place, value in zip(places, [*arguments, *options.values()], strict=True):
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[:2] == (1, sum(row.lengths)):
            return place
    return None


def _change_samples(
    arguments: tuple[Any, ...], options: dict[str, Any], place: int | str, row: ProbeRow
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with other tokens in every second sample."""
    values = arguments if isinstance(place, int) else options
    tokens = values[place].clone()  # type: ignore[index]  # of either kind
    for span in row.spans[::2]:
        tokens[:, span] = -tokens[:, span].flip(1)
    if isinstance(place, int):
        return (*arguments[:place], tokens, *arguments[place + 1 :]), options
    return arguments, {**options, place: tokens}


def _has_moved(before: Any, after: Any, row: ProbeRow) -> bool:
    """Return whether samples changed whose tokens did not."""
    if isinstance(before, (tuple, list)):
        return any(_has_moved(one, other, row) for one, other in zip(before, after, strict=True))
    if not isinstance(before, torch.Tensor) or before.dim() < 2 or before.shape[1] != sum(row.lengths):
        return False
    scale = float(before.abs().max())
    moves = [float((before[:, span].float() - after[:, span].float()).abs().max()) for span in row.spans[1::2]]
    return not max(moves) <= _MOVED * scale
