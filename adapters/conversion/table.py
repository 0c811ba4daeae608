"""
ms-swift's arguments of `swift sft`: read from a table, for importing ms-swift takes seconds.

The table is of one version of ms-swift; `make reference` writes it from the installed one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import cattrs

from packplan.adapters.versions import installed_version
from packplan.core.conversion import Argument

TABLE = Path(__file__).with_name("swift_arguments.json")


def stored_arguments() -> dict[str, Argument] | None:
    """Return the table's arguments; None if another version of ms-swift is installed."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if installed_version("ms-swift") not in {None, table["version"]}:  # converting needs none
        return None
    return cattrs.structure(table["arguments"], dict[str, Argument])


def as_table(arguments: Mapping[str, Argument]) -> str:
    """Return the text of the table of these arguments, those of the installed ms-swift."""
    lines = [f"    {json.dumps(name)}: {json.dumps(attrs.asdict(arguments[name]))}" for name in sorted(arguments)]
    head = f'{{\n  "version": {json.dumps(installed_version("ms-swift"))},\n  "arguments": {{\n'
    return head + ",\n".join(lines) + "\n  }\n}\n"
