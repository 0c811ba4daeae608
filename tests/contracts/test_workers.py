"""Workers: ranks and Ray actors do the same, and say why one failed."""

from pathlib import Path

import numpy as np
import pytest

from packplan.core.errors import DataSetError, RunError
from tests.contracts import page_policy
from tests.faults import parents
from tests.processes import descendants, each_ends, end, finished, lives, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def driver(server, tmp_path_factory):
    """Return a process that starts Ray and an actor, and the folder with its address."""
    folder = tmp_path_factory.mktemp("driver")
    process = server.start(parents.main, "actors", str(folder), log=folder / "log", env={"PYTHONPATH": Path.cwd()})
    yield process, folder
    left = descendants(process.pid)
    process.process.kill()
    end(left)


@pytest.fixture
def start_actors(monkeypatch, driver):
    """Return a function that starts workers as actors of this process, on the driver's servers."""
    from packplan.adapters.ranks.ray import RayWorkers

    process, folder = driver
    wait_for(lambda: (folder / "pids.json").exists() or not lives(process.pid), "Ray has not started")
    assert lives(process.pid), process.said[-3000:]
    monkeypatch.setenv("RAY_ADDRESS", (folder / "address").read_text())
    started = []

    def start(make, num_workers):
        started.append(RayWorkers(make, num_workers=num_workers))
        return started[-1]

    yield start
    for workers in started:
        workers.close()


def each_has_its_result(workers, shards):
    """Assert the law of all workers: results by worker, and a group that adds up over all."""
    results = workers.run_all_workers_sharded_data("add", shards, more=1)
    assert shards == [result["own"].tolist() for result in results]
    assert {float(sum(map(sum, shards)) + len(shards))} == {float(result["sum"]) for result in results}


def test_one_process_is_a_worker():
    """Its results, our errors as they are, others with their method and reason."""
    from packplan.adapters.ranks.torch_group import OneRank, RankWorkers
    from tests.contracts.light_worker import LightWorker

    workers = RankWorkers(LightWorker(), OneRank())
    each_has_its_result(workers, [[1, 2]])
    with pytest.raises(DataSetError, match="no shard"):
        workers.run_all_workers_sharded_data("refuse", ["shard"])
    with pytest.raises(RunError, match="worker 0 failed in break_down: KeyError: 'shard'"):
        workers.run_all_workers_sharded_data("break_down", ["shard"])
    workers.close()


def test_the_policy_of_the_page_trains_alike_on_ranks(server, demo, tmp_path):
    """One worker and two ranks: losses of two steps, of which one updated weights."""
    folder = str(demo / "models" / "qwen2")
    ranks = server.ranks(2, page_policy.main, folder, str(tmp_path), folder=tmp_path / "logs")
    expected = page_policy.trained(page_policy.shown().on_ranks(folder))

    assert [0, 0] == finished(ranks)
    assert expected[0] != expected[1]
    first, second = (np.load(tmp_path / f"{rank}.npy").tolist() for rank in range(2))
    assert pytest.approx(expected, rel=1e-5) == first == second


def test_actors_are_ranks_of_one_group_until_one_dies(start_actors):
    """That fails the call at once, with its reason, and ends who waits for it in a collective."""
    from tests.contracts.light_worker import LightWorker

    workers = start_actors(LightWorker, 2)
    each_has_its_result(workers, [[1, 2], [30]])
    pids = workers.process_ids

    with pytest.raises(RunError, match="worker 1 failed in die: its process died"):
        workers.run_all_workers_sharded_data("die", ["wait", "die"])

    wait_for(lambda: not any(map(lives, pids)), "an actor outlived its group")


def test_what_an_actor_raises_is_its_reason(start_actors):
    """With its class, where it is none of ours."""
    with pytest.raises(RunError, match=r"worker 0 failed in fail: KeyError: 'shard'"):
        start_actors(parents.Idle, 1).run_all_workers_sharded_data("fail", ["shard"])


def test_actors_end_with_their_driver(driver):
    """However that ends; the last test here, since another one would have to start Ray again."""
    process, folder = driver
    each_ends(folder, process.pid)
