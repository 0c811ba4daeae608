"""Workers: ranks and Ray actors do the same, and say why one failed."""

import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from packplan.adapters.microbatches import BatchedData
from packplan.core.errors import ArgumentError, DataSetError, RunError
from tests.contracts.light_worker import LightWorker
from tests.processes import ROOT, descendants, each_ends, end, finished, lives, publish, wait_for

pytestmark = pytest.mark.slow


def drive(folder: Path) -> None:
    """Start Ray with an actor and room for two of another driver; write down its address."""
    import ray

    from packplan.adapters.ranks.ray import RayWorkers

    start = ray.init
    with mock.patch("ray.init", lambda **options: start(**options | {"num_cpus": 3})):
        workers = RayWorkers(LightWorker, num_workers=1)
    (folder / "address").write_text(ray.get_runtime_context().gcs_address)
    publish(folder, workers.process_ids)


@pytest.fixture(scope="module")
def driver(server, tmp_path_factory, ray_folder):  # a folder of its own
    """Return a process that starts Ray and an actor, and the folder with its address."""
    folder = tmp_path_factory.mktemp("driver")
    process = server.start(drive, folder, log=folder / "log", env={"PYTHONPATH": ROOT})
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

    workers = RankWorkers(LightWorker(), OneRank())
    each_has_its_result(workers, [[1, 2]])
    with pytest.raises(DataSetError, match="no shard"):
        workers.run_all_workers_sharded_data("refuse", ["shard"])
    with pytest.raises(RunError, match="worker 0 failed in break_down: KeyError: 'shard'"):
        workers.run_all_workers_sharded_data("break_down", ["shard"])
    workers.close()


LENGTHS = [9, 41, 5, 30, 2, 17, 61, 8, 12, 25, 33]


def train_page(model: str, folder: Path) -> None:
    """Train two steps of the page's policy as this rank; write down the losses."""
    code, module = ROOT / "docs" / "examples" / "policy.py", types.ModuleType("page_policy")
    exec(compile(code.read_text(), code.name, "exec"), module.__dict__)  # noqa: S102  # our own
    drawn = torch.Generator().manual_seed(3)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    fields = {
        "input_ids": torch.randint(20, 400, inside.shape, generator=drawn) * inside,
        "token_mask": inside.float(),
        "advantages": torch.randn(len(LENGTHS), generator=drawn),
    }
    workers = module.on_ranks(model)
    losses = [module.train(workers, BatchedData.from_fields(fields, lengths=LENGTHS)) for _ in range(2)]
    rank = workers._group.rank
    np.save(folder / f"{rank} of {workers.num_workers}.npy", losses)
    fields["input_ids"][0, 0] = 20 + rank
    if workers.num_workers > 1:
        with pytest.raises(ArgumentError, match=r"rank 1 has another batch or sharding than rank 0, .* make one batch"):
            module.train(workers, BatchedData.from_fields(fields, lengths=LENGTHS))


def test_the_policy_of_the_page_trains_alike_on_ranks(server, demo, tmp_path):
    """One worker and two ranks: losses of two steps; a batch of one rank's own is refused."""
    model = str(demo / "models" / "qwen2")
    ranks = server.ranks(2, train_page, model, tmp_path, folder=tmp_path / "logs")
    train_page(model, tmp_path)

    assert [0, 0] == finished(ranks)
    expected, first, second = (np.load(tmp_path / f"{of}.npy").tolist() for of in ("0 of 1", "0 of 2", "1 of 2"))
    assert expected[0] != expected[1]
    assert pytest.approx(expected, rel=1e-5) == first == second


def test_actors_are_ranks_of_one_group_until_one_dies(start_actors):
    """That fails the call at once, with its reason, and ends who waits for it in a collective."""
    workers = start_actors(LightWorker, 2)
    each_has_its_result(workers, [[1, 2], [30]])
    pids = workers.process_ids

    with pytest.raises(RunError, match="worker 1 failed in die: its process died"):
        workers.run_all_workers_sharded_data("die", ["wait", "die"])

    wait_for(lambda: not any(map(lives, pids)), "an actor outlived its group")


def test_what_an_actor_raises_is_its_reason(start_actors):
    """With its class, where it is none of ours."""
    with pytest.raises(RunError, match=r"worker 0 failed in break_down: KeyError: 'shard'"):
        start_actors(LightWorker, 1).run_all_workers_sharded_data("break_down", ["shard"])


def test_actors_end_with_their_driver(driver):
    """However that ends; the last test here, since another one would have to start Ray again."""
    process, folder = driver
    each_ends(folder, process.pid)
