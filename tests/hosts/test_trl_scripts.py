"""TRL's own scripts train the same losses with two lines added, and compute fewer positions."""

import json
import os

import pytest

pytest.importorskip("trl")

pytestmark = pytest.mark.slow

SCRIPTS = ("dpo", "grpo", "sft") if "HOST_PYTHON" in os.environ else ("sft",)


@pytest.fixture(scope="module")
def folder(apart, tmp_path_factory):
    """A folder with what each run logged."""
    folder = tmp_path_factory.mktemp("scripts")
    apart("tests.hosts.trl_scripts:main", folder, *SCRIPTS, folder=folder)
    return folder


@pytest.mark.parametrize(("script", "ranks"), [*((script, 1) for script in SCRIPTS), (SCRIPTS[0], 2)])
def test_a_script_with_two_lines_trains_the_same(script, ranks, folder):
    """DPO, GRPO and SFT in the newest TRL; SFT with images where Pillow is installed."""
    for rank in range(ranks):
        padded, packed = (
            json.loads((folder / f"{script} {way} {ranks} {rank}.json").read_text()) for way in ("padded", "packed")
        )
        assert packed["losses"] == pytest.approx(padded["losses"], rel=2e-5, abs=1e-8)
        assert 3 == len(packed["losses"])
        assert 0 < packed["positions"] < padded["positions"]
