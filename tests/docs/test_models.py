"""The page of models against measurements that were made apart from the probe, by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

from packplan.adapters.families import is_unpacked

ROOT = Path(__file__).parents[2]

MEASURED = json.loads((Path(__file__).parent / "measured_models.json").read_text(encoding="utf-8"))
"""
What packed logits of 122 causal language models gave against those alone: as transformers comes,
and by attention sample by sample.
"""

ROW = re.compile(r"^\| (\S+) \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*)\|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, str]]:
    """Family -> its strategy, and the remark."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    return {family: (strategy, remark) for family, strategy, _, _, remark in ROW.findall(page) if family != "family"}


def test_no_model_passes_by_a_way_that_was_measured_to_leak():
    """But where its layers run sample by sample, which those measurements did not."""
    as_it_comes = {*MEASURED["equal packed as they come, and sample by sample"],
                   *MEASURED["equal packed as they come alone"]}  # fmt: skip
    by_sample = {*MEASURED["equal packed as they come, and sample by sample"],
                 *MEASURED["equal sample by sample alone"]}  # fmt: skip
    every, found = set().union(*MEASURED.values()), rows()

    assert every <= found.keys()
    for family in every:
        strategy, remark = found[family]
        if "by sample" not in remark:
            assert strategy != "own" or family in as_it_comes
            assert strategy != "varlen" or family in by_sample


def test_what_does_not_pack_is_known_to_the_code():
    """By each row of the page; `convert` says so of a command's model."""
    listed = json.loads((ROOT / "adapters" / "families.json").read_text(encoding="utf-8"))["unpacked"]

    assert sorted(family for family, (strategy, _) in rows().items() if strategy == "none") == listed
    assert is_unpacked("bloom")
    assert not is_unpacked("qwen3")


def test_at_least_a_hundred_of_them_pass():
    """And those whose positions are part of their attention do not."""
    found = rows()
    passing = [family for family in set().union(*MEASURED.values()) if found[family][0] != "none"]

    assert len(passing) >= 100
    assert not {"bloom", "mpt", "falcon", "xglm", "deepseek_v4"} & set(passing)
