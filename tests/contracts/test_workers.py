"""Workers of reinforcement learning: ranks and Ray actors do the same, and say why one failed."""

from __future__ import annotations

import os
import time

import pytest

from core.errors import DataSetError, WorkerError
from tests.processes import lives

pytestmark = pytest.mark.slow

DEADLINE_S = 240


def of_this_process():
    """Return one worker, which is this process."""
    from adapters.ranks.torch_group import OneRank
    from adapters.workers.ranks import RankWorkers
    from tests.contracts.light_worker import LightWorker

    return RankWorkers(LightWorker(), OneRank())


def of_ray():
    """Return two actors."""
    from adapters.workers.ray import RayWorkers
    from tests.contracts.light_worker import LightWorker

    return RayWorkers(LightWorker, num_workers=2)


@pytest.fixture
def ray_workers(monkeypatch, ray_alone):
    """Two actors, which import from here."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())  # noqa: PTH109  # as a shell would say it
    workers = of_ray()
    yield workers
    workers.close()


def each_fails_with_its_reason(workers, shards):
    """
    State what holds for all workers: results come by worker, errors of ours pass, others are named.
    """
    results = workers.run_all_workers_sharded_data("add", shards, more=1)
    assert shards == [result["own"].tolist() for result in results]
    assert {float(sum(map(sum, shards)) + len(shards))} == {float(result["sum"]) for result in results}
    return results


def test_one_process_is_a_worker():
    """Its results, our errors as they are, others with their method and reason."""
    workers = of_this_process()
    each_fails_with_its_reason(workers, [[1, 2]])
    with pytest.raises(DataSetError, match="no shard"):
        workers.run_all_workers_sharded_data("refuse", ["shard"])
    with pytest.raises(WorkerError, match="worker 0 failed in break_down: KeyError: 'shard'"):
        workers.run_all_workers_sharded_data("break_down", ["shard"])
    workers.close()


def test_actors_are_ranks_of_one_group(ray_workers):
    """They add up over their group; what one raises ends them, with its reason."""
    each_fails_with_its_reason(ray_workers, [[1, 2], [30]])
    with pytest.raises(WorkerError, match=r"worker . failed in break_down: KeyError: '[ab]'"):
        ray_workers.run_all_workers_sharded_data("break_down", ["a", "b"])


def test_an_actor_that_dies_fails_the_call(ray_workers):
    """At once, with its reason, and the one that waits for it in a collective is ended."""
    started = time.monotonic()
    pids = ray_workers.process_ids

    with pytest.raises(WorkerError, match="worker 1 failed in die: its process died"):
        ray_workers.run_all_workers_sharded_data("die", ["wait", "die"])

    assert time.monotonic() - started < DEADLINE_S
    while any(map(lives, pids)):
        assert time.monotonic() - started < DEADLINE_S
        time.sleep(0.02)
