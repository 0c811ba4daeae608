"""What a configuration may name: one of ours, or a function of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from packplan.core.errors import ConfigError

Named = TypeVar("Named", bound=Callable[..., Any])


def named_function(name: str, known: Mapping[str, Named], *, key: str) -> Named:
    """
    Return a function by its name, or one of the user's own by `module:function`.

    Args:
        name: As the configuration says.
        known: Ours, by name.
        key: Of the configuration, for the error.

    Raises:
        ConfigError: There is no such function.
    """
    if name in known:
        return known[name]
    module, _, function = name.partition(":")
    try:
        found: Named = getattr(importlib.import_module(module), function)
    except Exception as error:  # noqa: BLE001  # whatever the user's own module raises
        why = f"{type(error).__name__}: {error}"
    else:
        if callable(found):
            return found
        why = "no function"
    reason = f"is {name}: neither one of {', '.join(known)}, nor a function as module:function ({why})"
    raise ConfigError.at(key, reason)
