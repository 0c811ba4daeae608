"""A function of an engine, replaced."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def replace(module: str, function: Callable[..., Any]) -> None:
    """
    Put a function in the place of a module's of the same name, also where its package imported it.

    Args:
        module: Name of the engine's module.
        function: Function that takes the same arguments.

    Raises:
        AttributeError: The module has no function of that name.
    """
    name = function.__name__
    original = getattr(import_module(module), name)
    package = module.partition(".")[0]
    for loaded, found in list(sys.modules.items()):
        if loaded.partition(".")[0] == package and getattr(found, name, None) is original:
            setattr(found, name, function)
