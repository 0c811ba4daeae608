"""The page of models against measurements made by hand, and against the code."""

import ast
import json
import re
from pathlib import Path

from tests.processes import ROOT

MEASURED = json.loads((Path(__file__).parent / "measured_models.json").read_text(encoding="utf-8"))
"""Result -> causal language models whose packed logits were compared with those alone."""

PACKING_PAGE, UNPACKED_PAGE = re.findall(
    r"^## Families that (?:pack|do not)\n(.*?)(?=^## |\Z)",
    (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL,
)  # fmt: skip
"""Sections of the page."""

STRATEGIES = {
    family.rstrip("*"): (strategy, family.endswith("*"))
    for strategy, families in re.findall(r"^\| `(\w+)` \| (.*) \|$", PACKING_PAGE, re.MULTILINE)
    for family in families.split(", ")
}
"""Family -> its strategy, and whether some of its layers run sample by sample."""

UNPACKED = {
    *(family for families in re.findall(r"^\| [^|`]{20,} \| ([^|]*) \|$", UNPACKED_PAGE, re.MULTILINE)
      for family in families.split(", ")),  # reasons are longer than names
    *re.findall(r"^\| ([\w.-]+) \| [\d.]+ \| \S+ \|$", UNPACKED_PAGE, re.MULTILINE),
}  # fmt: skip
"""Families that do not pack."""


def test_no_model_passes_under_a_strategy_that_was_measured_to_leak():
    """Families whose layers run sample by sample were not measured that way, and are left out."""
    as_it_comes = {*MEASURED["equal packed as they come, and sample by sample"],
                   *MEASURED["equal packed as they come alone"]}  # fmt: skip
    by_sample = {*MEASURED["equal packed as they come, and sample by sample"],
                 *MEASURED["equal sample by sample alone"]}  # fmt: skip
    every = set().union(*MEASURED.values())

    assert every <= STRATEGIES.keys() | UNPACKED
    for family in every & STRATEGIES.keys():
        strategy, is_split = STRATEGIES[family]
        if not is_split:
            assert strategy != "own" or family in as_it_comes
            assert strategy != "varlen" or family in by_sample


def test_the_code_knows_the_families_that_do_not_pack():
    """They are known by their names, before a model is loaded."""
    listed = json.loads((ROOT / "adapters" / "families.json").read_text(encoding="utf-8"))["unpacked"]

    assert sorted(UNPACKED) == listed, "python -m tools.models families docs/models.md writes the page"
    assert not UNPACKED & STRATEGIES.keys()


def test_no_list_of_families_is_in_the_code():
    """Properties of a model decide; `adapters/families.json` has what cannot be read off."""
    known = (STRATEGIES.keys() | UNPACKED) - {"git", "mamba", "opt"}  # words of other things
    assert {"llama", "qwen3_5", "gpt_oss", "bloom", "xlnet"} <= known
    files = [path for room in ("core", "adapters", "app") for path in (ROOT / room).rglob("*.py")]
    nodes = {path: ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in files}

    found = {
        str(path.relative_to(ROOT))
        for path, held in nodes.items()
        if any(isinstance(node, ast.Constant) and node.value in known for node in held)
    }
    assert {"core/work/text.py"} == found, "only this file names families, where no key of a config.json tells the work"
