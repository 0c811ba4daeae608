"""A million samples are inspected within CPU seconds, and planned within little memory."""

import time
from pathlib import Path

import pytest

from benchmarks.distributions import DISTRIBUTIONS
from packplan.app.plan import __main__ as plan
from tests.e2e import million
from tests.processes import finished

pytestmark = pytest.mark.slow


def cpu_seconds(*arguments: object) -> float:
    """Return the CPU time that a command takes in this process."""
    before = time.process_time()
    assert 0 == plan.main([*map(str, arguments)])
    return time.process_time() - before


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """The YAML of a run whose plan of a million samples is stored."""
    distribution = DISTRIBUTIONS["vlm-16384"]
    lengths = distribution.lengths(1_000_000, seed=0)
    return million.store(
        tmp_path_factory.mktemp("million"), lengths, packing_length=distribution.capacity, world_size=8
    )


def test_a_million_samples_are_looked_at_in_seconds(path):
    """Show in 1.5, another packing length in 3."""
    assert cpu_seconds("show", path, "--json") < 1.5
    assert cpu_seconds("whatif", path, "--max-length", "3000", "--world-size", "8") < 3


def test_another_rank_takes_a_plan_of_a_million_in_little_memory(server, path, tmp_path):
    """Below 72 MB beyond what it held; the plan comes from rank 0."""
    ranks = server.ranks(2, million.plan_as_rank, str(path), str(tmp_path), folder=tmp_path)

    assert [0, 0] == finished(ranks)
    assert 0 < int((tmp_path / "bytes1").read_text()) < 72e6
