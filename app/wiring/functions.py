"""Functions that a configuration names: ours, or the user's own."""

from __future__ import annotations

import pkgutil
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
        key: Key of the configuration, for the error.

    Raises:
        ConfigError: There is no such function.
    """
    if name in known:
        return known[name]
    try:
        found: Named = pkgutil.resolve_name(name)
    except Exception as error:  # noqa: BLE001  # whatever the user's own module raises
        why = f"{type(error).__name__}: {error}"
    else:
        if callable(found):
            return found
        why = "no function"
    reason = f"is {name}: neither one of {', '.join(known)}, nor a function as module:function ({why})"
    raise ConfigError.at(key, reason)
