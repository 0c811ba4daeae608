"""Names of model families stand where a family has a quirk, and nowhere else in the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.models_page import packing_families, unpacked_families

ROOT = Path(__file__).parents[2]

ALLOWED = ("core/work/text.py", "app/demo/")
"""
What no key of a config.json says of a family's work; models that are made to try things out.
"""


def families() -> set[str]:
    """Return the families that transformers knows, except names that are words of other things."""
    return (packing_families().keys() | unpacked_families()) - {"git", "mamba", "opt"}


def named_in(code: str, known: set[str]) -> Iterator[str]:
    """Yield the families that a module names in a text of its own."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and node.value in known:
            yield str(node.value)


def test_no_list_of_families_is_in_the_code():
    """What a model is decides; one file, `adapters/families.json`, has what cannot be read off."""
    known = families()
    assert {"llama", "qwen3_5", "gpt_oss", "bloom", "xlnet"} <= known
    assert len(known) > 200

    found = {
        str(path.relative_to(ROOT)): names
        for layer in ("core", "adapters", "app")
        for path in sorted((ROOT / layer).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(ALLOWED)
        and (names := sorted(set(named_in(path.read_text(encoding="utf-8"), known))))
    }

    assert {} == found


def test_a_list_of_families_is_found():
    """In a set, and as a key."""
    assert ["llama", "qwen3"] == sorted(named_in('KNOWN = {"llama"}\nTABLE = {"qwen3": 1}', {"llama", "qwen3", "phi"}))
