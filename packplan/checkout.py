"""
Aliases for modules of a checkout: `core.plan` and `packplan.core.plan` are the same module object.

`python -m app.sft` and `import core.plan` import from the folders of the checkout, to which
`packplan/` links. Without aliases, each module would be loaded twice, once under each name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import cast


class AliasFinder(MetaPathFinder, Loader):
    """Finder that makes `import core.x` return the module `packplan.core.x`, for one top folder."""

    def __init__(self, folder: str) -> None:
        """Find modules below *folder*, which is core, adapters or app."""
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of module *fullname*, or None if it is not below the folder."""
        del path, target
        if not fullname.startswith(f"{self._folder}."):
            return None
        found = find_spec(f"packplan.{fullname}")
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, loader_state=found, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module `packplan.NAME` for the name in *spec*."""
        return import_module(f"packplan.{spec.name}")

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's original spec, which the import under this name has replaced."""
        module.__spec__ = cast(ModuleSpec, module.__spec__).loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of module *fullname*, which `python -m` runs."""
        found = cast(ModuleSpec, find_spec(f"packplan.{fullname}"))
        return cast(InspectLoader, found.loader).get_code(found.name)


def alias_installed_modules(folder: str) -> None:
    """
    Make *folder* (such as `core`) and all modules below it aliases of the modules in `packplan`.
    """
    sys.meta_path.insert(0, AliasFinder(folder))
    sys.modules[folder] = import_module(f"packplan.{folder}")
