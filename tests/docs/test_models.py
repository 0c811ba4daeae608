"""The page of models against measurements that were made apart from the probe, by hand."""

import json
from pathlib import Path

from tests.models_page import packing_families, unpacked_families

ROOT = Path(__file__).parents[2]

MEASURED = json.loads((Path(__file__).parent / "measured_models.json").read_text(encoding="utf-8"))
"""Result -> causal language models whose packed logits were compared with those alone."""


def test_no_model_passes_under_a_strategy_that_was_measured_to_leak():
    """Families whose layers run sample by sample were not measured that way, and are left out."""
    as_it_comes = {*MEASURED["equal packed as they come, and sample by sample"],
                   *MEASURED["equal packed as they come alone"]}  # fmt: skip
    by_sample = {*MEASURED["equal packed as they come, and sample by sample"],
                 *MEASURED["equal sample by sample alone"]}  # fmt: skip
    every, packing = set().union(*MEASURED.values()), packing_families()

    assert every <= packing.keys() | unpacked_families()
    for family in every & packing.keys():
        strategy, is_split = packing[family]
        if not is_split:
            assert strategy != "own" or family in as_it_comes
            assert strategy != "varlen" or family in by_sample


def test_the_code_knows_the_families_that_do_not_pack():
    """They are known by their names, before a model is loaded."""
    listed = json.loads((ROOT / "adapters" / "families.json").read_text(encoding="utf-8"))["unpacked"]

    assert sorted(unpacked_families()) == listed
    assert not unpacked_families() & packing_families().keys()
