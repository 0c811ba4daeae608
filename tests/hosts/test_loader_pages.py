"""The page docs/use-it-in/torch.md on loops and loaders, by its own commands."""

import re
from collections import Counter

import attrs
import pytest

import packplan as pp
from tests.hosts.pages import hosted, plan_of
from tests.processes import descendants, wait_for

pytestmark = pytest.mark.slow


def trained_packs(printed):
    """Return how often each rank printed each step and pack."""
    return Counter(tuple(map(int, found)) for found in re.findall(r"rank (\d+) step (\d+) pack (\d+)", printed))


def planned_packs(schedule):
    """Return the steps and packs of all ranks."""
    steps = [(rank, step) for rank in range(schedule.world_size) for step in schedule.steps(rank=rank)]
    return Counter((rank, step.number, pack) for rank, step in steps for (pack,) in step.batches)


@hosted
def test_the_loop_goes_on_with_fewer_ranks(reader, made):
    """Of the epoch in which it was killed, each pack is trained that was not before."""
    at = reader("torch")
    first = at.run_until(at.commands[0], "rank 0 step 3 ")
    rest = trained_packs(at.run(at.commands[1]))

    plan = plan_of(made)
    whole = plan.schedule(world_size=2, packs_per_step=4, epochs=2)
    start = min(step for _, step, _ in rest) - 1
    resumed = attrs.evolve(plan.schedule(packs_per_step=4, epochs=2), start=whole.progress_at(start))
    assert planned_packs(resumed) == rest
    assert trained_packs(first) <= planned_packs(whole)


@hosted
def test_a_module_of_torch_trains_packs(reader):
    """Each pack once, and the page's own check passes: outputs are those of the samples alone."""
    at = reader("torch")
    trained = trained_packs(at.run(at.commands[2]))

    plan = pp.plan([*range(5, 45)], 64)
    assert planned_packs(plan.schedule(packs_per_step=2, epochs=1)) == trained
    page = at.folder / "own.py"
    page.write_text(page.read_text().replace("(sample[:, :, None] == sample[:, None, :])", "(sample[:, :, None] > 0)"))
    with at.typing(at.commands[2]) as started:
        assert 0 != started.wait()
    assert "Tensor-likes are not close" in at.printed


@hosted
def test_lightning_goes_on_in_the_middle_of_an_epoch(reader, made):
    """With the batch behind the checkpoint's last one, though Lightning has asked for its steps."""
    at = reader("torch")
    page = at.folder / "train_lightning.py"
    optimizers = "def configure_optimizers(self):\n"
    assert optimizers in page.read_text()
    asked = f"{optimizers}        self.trainer.estimated_stepping_batches\n"
    page.write_text(page.read_text().replace(optimizers, asked))
    first = trained_packs(at.run_until(at.commands[3], "rank 0 step 5 "))
    rest = trained_packs(at.run(at.commands[4]))

    schedule = plan_of(made).schedule(packs_per_step=2, epochs=2)
    planned = planned_packs(schedule)
    start = min(step for _, step, _ in rest) - 1
    # The process may save once more before it is killed.
    assert start in range(3, schedule.total_steps, 3), "a checkpoint of every third step"
    assert start % schedule.steps_per_epoch, "in the middle of an epoch"
    assert first <= planned
    assert {key: times for key, times in planned.items() if key[1] > start} == rest


@hosted
def test_accelerate_trains_each_pack_once_if_it_leaves_the_loader_alone(reader, made):
    """A loader that it prepares serves each rank a part of its packs; the run says so and ends."""
    at = reader("torch")
    trained, page = trained_packs(at.run(at.commands[-1])), at.folder / "train_accelerate.py"
    (built,) = re.findall(r"loader = (DataLoader\(.*\))  #", page.read_text())
    page.write_text(page.read_text().replace(built, f"accelerator.prepare({built})"))
    with at.typing(at.commands[-1]) as started:
        assert 0 != started.wait()

    assert "but the schedule has" in at.printed
    assert planned_packs(plan_of(made).schedule(world_size=2, packs_per_step=4, epochs=2)) == trained


@hosted
def test_ray_starts_lost_workers_again_where_they_were(reader, made, ray_folder):  # of its own
    """From the checkpoint of the last step that all workers reported."""
    at = reader("torch")
    log = at.folder / "rank0.txt"
    with at.typing(at.commands[5]) as started:
        wait_for(lambda: log.exists() and "rank 0 step 2 " in log.read_text(), "no worker has trained two steps")
        (worker, *_) = [one for one in descendants(started.pid) if "RayTrainWorker" in " ".join(one.cmdline())]
        worker.kill()
        assert 0 == started.wait(), at.printed[-3000:]

    trained = trained_packs("".join(path.read_text() for path in at.folder.glob("rank*.txt")))
    planned = planned_packs(plan_of(made).schedule(world_size=2, packs_per_step=4))
    again = {step for (_, step, _), times in trained.items() if times > 1}
    assert set(planned) == set(trained)
    assert len(again) <= 2, "the steps behind the last checkpoint"


@hosted
def test_grain_reads_on(reader, made):
    """Both reads together are what a rank trains."""
    at = reader("torch")
    read = [at.run(command) for command in at.commands[6:8]]

    packs = [int(pack) for printed in read for pack in re.findall(r"pack (\d+) of \d+ tokens", printed)]
    schedule = plan_of(made).schedule(world_size=2, packs_per_step=4, epochs=2)
    assert 5 == len(re.findall("pack", read[0]))
    assert [pack for step in schedule.steps(rank=0) for (pack,) in step.batches] == packs
