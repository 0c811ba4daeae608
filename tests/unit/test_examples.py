"""Examples in docstrings give what they say."""

import doctest
from importlib import import_module

import pytest

from tests.processes import ROOT

MODULES = sorted(
    ".".join((*package, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for package, folders in ((["packplan"], ["core", "adapters", "app"]), ([], ["benchmarks", "tools"]))
    for folder in folders
    for path in (ROOT / folder).rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    """In every module that has any."""
    assert 0 == doctest.testmod(import_module(name)).failed
