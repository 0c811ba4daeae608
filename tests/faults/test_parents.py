"""No orphan: whatever this project starts ends with what started it, also by SIGKILL."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from packplan.adapters.processes import ignore_foreign_sigterm
from tests.processes import DEADLINE_S, PATIENCE_S, ROOT, each_ends, finished, killed_at_end, lives, publish, wait_for

pytestmark = pytest.mark.slow


def pid_and_pause(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def start_pool(folder: Path) -> None:
    """Start processes that measure: they are busy when the parent dies, and wait for work."""
    from packplan.adapters.processes import hold_ctrl_c, open_pool

    with hold_ctrl_c():
        pool = open_pool(2, print, "ready")
        named = [pool.submit(pid_and_pause, 0.2) for _ in range(4)]
    pids = {future.result() for future in named}
    pool.submit(time.sleep, PATIENCE_S)
    publish(folder, sorted(pids))


class Endless:
    """Samples that take for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> None:
        (self.folder / f"{os.getpid()}.noted").touch()
        time.sleep(PATIENCE_S)


def start_loader(folder: Path) -> None:
    """Start the workers of a trainer's loader, each in the middle of a long sample."""
    from torch.utils.data import DataLoader

    from packplan.adapters.trainer.loader import prepare_worker

    start = partial(prepare_worker, num_workers=2, rank=0)
    options = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": start}
    _kept = iter(DataLoader(Endless(folder), **options))
    publish(folder, noted(folder, 2))


def noted(folder: Path, number: int) -> list[int]:
    """Wait for so many processes to have noted themselves."""
    wait_for(lambda: number == len([*folder.glob("*.noted")]), "not all processes have started")
    return [int(path.stem) for path in folder.glob("*.noted")]


@pytest.mark.parametrize("start", [start_pool, start_loader])
def test_processes_end_with_the_parent_that_started_them(server, tmp_path, start):
    """Those that measure, waiting or busy; workers of a loader in the middle of a sample."""
    parent = server.start(start, tmp_path, log=tmp_path / "log")
    each_ends(tmp_path, parent.pid)


VARIABLES = """
import json, os
from pathlib import Path
told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
told |= {name: bool(os.environ[name]) for name in ("MASTER_ADDR", "MASTER_PORT")}
Path(FOLDER, f"{os.getpid()}.noted").write_text(json.dumps(told))
"""

RANK = """
import os, time
from pathlib import Path
from packplan.app.cli.command import run_command
from tests.faults.test_parents import PATIENCE_S, noted, publish

def command():
    exec(NOTE, globals())
    if os.environ["RANK"] == "0":
        publish(Path(FOLDER), noted(Path(FOLDER), 2))
    time.sleep(PATIENCE_S)

run_command(command, verbose=False)
"""


def test_ranks_end_with_torchruns_agent(server, tmp_path):
    """Which cannot tell them when it is killed; these tests start ranks with the same variables."""
    folders = [tmp_path / name for name in ("launched", "started")]
    for folder in folders:
        folder.mkdir()
    launched, started = (f"FOLDER = {str(folder)!r}\n{VARIABLES}" for folder in folders)
    (script := tmp_path / "rank.py").write_text(f"NOTE = {launched!r}\n{RANK}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with killed_at_end(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as agent:
        each_ends(folders[0], agent.pid)
    assert [0, 0] == finished(server.ranks(2, exec, started, folder=tmp_path))

    theirs, ours = (sorted(path.read_text() for path in folder.glob("*.noted")) for folder in folders)
    assert theirs == ours


LATE = """
import multiprocessing, os, time
from packplan.adapters.processes import end_with_parent

def late():
    while multiprocessing.parent_process().is_alive():
        time.sleep(0.01)
    os.write(1, f"{os.getpid()}\\n".encode())
    end_with_parent()
    os.write(1, b"went on\\n")

multiprocessing.get_context("fork").Process(target=late).start()
os._exit(0)
"""


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    """The parent may die before its child has asked the kernel."""
    run = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, check=True, cwd=ROOT, timeout=DEADLINE_S
    )

    (pid,) = map(int, run.stdout.split())
    wait_for(lambda: not lives(pid), "it went on")


WATCHER = """
import resource, sys, time
from packplan.adapters.processes import end_with_process
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [open("/dev/null") for _ in range(1100)]
end_with_process(int(sys.argv[1]))
print("watching", flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_one_that_is_not_its_parent():
    """Also with more than a thousand open files; at once if the other is gone already."""
    watch = [sys.executable, "-c", WATCHER]
    with killed_at_end([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        with killed_at_end([*watch, str(other.pid)], stdout=subprocess.PIPE) as watcher:
            assert "watching\n" == watcher.stdout.readline()
            assert watcher.poll() is None
            other.kill()
            assert -signal.SIGKILL == watcher.wait(DEADLINE_S)
        other.wait()
    with killed_at_end([*watch, str(other.pid)], stdout=subprocess.PIPE) as late:
        assert -signal.SIGKILL == late.wait(DEADLINE_S)
        assert "" == late.stdout.read()


STARTERS = {
    "adapters/processes.py": {"multiprocessing", "concurrent"},
    "adapters/proof/first_calls.py": {"multiprocessing"},  # what runs at a process's end
    "adapters/ranks/heartbeat.py": {"multiprocessing"},
    "adapters/samples/encoder.py": {"concurrent"},  # threads, which end with their process
    "app/planning/epochs.py": {"concurrent"},  # a thread
    "benchmarks/beside.py": {"multiprocessing"},  # each asks to end with its parent
    "benchmarks/child.py": {"multiprocessing"},
    "benchmarks/forecast.py": {"concurrent"},  # threads
    "benchmarks/memory.py": {"concurrent"},  # threads
    "benchmarks/rows.py": {"multiprocessing"},
}
"""Modules that start processes; each kind ends with its parent, or is waited for at once."""


def test_nothing_else_starts_processes():
    """A new kind of process comes with its end."""
    imports = re.compile(r"^ *(?:from|import) (multiprocessing|concurrent|subprocess)\b", re.MULTILINE)
    folders = ("core", "adapters", "app", "benchmarks", "tools")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): set(imports.findall(path.read_text(encoding="utf-8"))) for path in modules}

    assert STARTERS == {path: names for path, names in found.items() if names}


def is_pending(number: int, pid: int) -> bool:
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


def heed_parent(pipe) -> None:
    ignore_foreign_sigterm()
    pipe.send("ready")
    while True:
        pipe.send(pipe.recv())


def test_a_worker_ends_by_the_sigterm_of_its_parent_alone():
    """It answers after one of another process, and ends by that of its own."""
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe()
    worker = fork.Process(target=heed_parent, args=(its,), daemon=True)
    worker.start()
    its.close()  # so that a dead worker is the end of the pipe
    assert "ready" == mine.recv()

    for _ in range(2):  # who takes the second has gone on after the first
        subprocess.run(["kill", str(worker.pid)], check=True)
        wait_for(lambda: not (worker.is_alive() and is_pending(signal.SIGTERM, worker.pid)), "it was not taken")
    mine.send("alive")
    assert "alive" == mine.recv()
    worker.terminate()
    worker.join(DEADLINE_S)
    assert 0 == worker.exitcode
