"""Search for layers that carry a state along a row, and so mix its samples."""

from typing import Any

from packplan.adapters.attention import split_states
from packplan.adapters.probe.rows import ProbeRow
from packplan.adapters.proof.modules import first_leak

_ROUNDS = 4


def split_found_states(model: Any, row: ProbeRow) -> tuple[str, ...]:
    """
    Run a model's layers that carry a state sample by sample, the first one first, and return their
    classes.

    Args:
        model: Model that follows its rows.
        row: Row to test the layers with.
    """
    found: set[str] = set()
    for _ in range(_ROUNDS):
        try:
            leak = first_leak(model, row.packed)
        except Exception:
            if not found:
                raise
            break  # the found layers cannot run sample by sample; the next measurement shows why
        kind = None if leak is None or leak[1] is None else _own_class(model, leak[1].name)
        if kind is None or kind in found:
            break
        split_states(model, {kind})
        found.add(kind)
    return tuple(sorted(one for one in found if not _lies_within(model, one, found - {one})))


def _own_class(model: Any, name: str) -> str | None:
    """Return the class of a module, or of the one around it if torch has it; None for a model."""
    module = model.get_submodule(name)
    while name and type(module).__module__.startswith("torch."):
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return None if not name or hasattr(module, "get_input_embeddings") else type(module).__name__


def _lies_within(model: Any, kind: str, others: set[str]) -> bool:
    """Return whether all layers of a class lie within layers of other classes."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    outer = [name for name, one in kinds.items() if one in others]
    return all(any(name.startswith(f"{one}.") for one in outer) for name, one in kinds.items() if one == kind)
