"""How far a long stage has come, with the time left: on a terminal alone, and unless the user asks for quiet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_hidden: list[bool] = []


def hide() -> None:
    """Show no progress in this process from now on."""
    _hidden.append(True)


def is_hidden() -> bool:
    """Whether the user asked for quiet."""
    return bool(_hidden)


def progress(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return tqdm's bar over *items*; *options* are tqdm's. tqdm shows nothing itself where there is no terminal."""
    return tqdm(items, disable=True if is_hidden() else None, **options)
