"""How far a long stage has come, with the time left: on a terminal alone, and unless the user asks for quiet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_state = {"hidden": False}


def hide(*, hidden: bool) -> None:
    """Show no progress in this process from now on, or show it again."""
    _state["hidden"] = hidden


def progress(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return tqdm's bar over *items*; *options* are tqdm's. tqdm shows nothing itself where there is no terminal."""
    return tqdm(items, disable=_state["hidden"] or None, **options)
