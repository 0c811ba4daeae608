"""The commands of docs/use-it-in/swift.md as they stand, killed and resumed."""

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.swift_plans import LENGTH, PLAIN, ROOT, Ran, write_records
from tests.network import free_port
from tests.processes import DEADLINE_S, descendants, end, is_whole, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "HOST_PYTHON" not in os.environ or find_spec("swift") is None,
        reason="`make test-hosts` runs it beside ms-swift",
    ),
]


def test_the_page_s_commands_are_killed_and_go_on(demo, tmp_path):
    """`swift sft`, unmodified, on two ranks: each pack is trained as often as planned."""
    records = tmp_path / "records"
    records.mkdir()
    write_records(records, demo)
    console, out = Console(tmp_path, demo, records), tmp_path / "out"
    write, begin, go_on = console.commands
    assert 0 == console.start(write, tmp_path / "written").wait(DEADLINE_S)
    first = Ran(tmp_path / "first")
    process = console.start(begin, first.folder)
    saved = partial(out.glob, "checkpoint-*/trainer_state.json")
    try:
        wait_for(lambda: any(map(is_whole, saved())) or process.poll() is not None, "no checkpoint")
    finally:
        console.kill(process)
    # The newest one may have been killed while it was written.
    whole = [state.parent for state in saved() if is_whole(state)]
    checkpoint = max(whole, key=step_of)
    rest = Ran(tmp_path / "rest")
    process = console.start([*go_on, "--resume_from_checkpoint", str(checkpoint)], rest.folder)
    assert 0 == process.wait(DEADLINE_S), console.told(rest)[-3000:]

    found = first.plan(LENGTH["qwen2"])
    schedule = found.schedule(world_size=2, packs_per_step=2, epochs=30, seed=42)
    before, after = console.told(first).split("'loss'", 1)[0], console.told(rest)
    assert f"{schedule.total_steps} in all on 2 ranks" in before, "told before the first step"
    assert f"{schedule.total_steps}/{schedule.total_steps}" in after
    for rank in range(2):
        done = [one for one in first.trained(rank) if one[0] <= step_of(checkpoint)]
        assert first.planned(found, schedule, rank) == [*done, *rest.trained(rank)]


class Console:
    """The commands of docs/use-it-in/swift.md, typed for a tiny model on a CPU."""

    def __init__(self, folder: Path, demo: Path, records: Path) -> None:
        self.folder, spy = folder, folder / "spy.py"
        spy.write_text("import os\n\nfrom tests.e2e.plugin_run import record\n\nrecord(os.environ['RECORD'])\n")
        (folder / "start").mkdir()
        # The published torchvision is no CPU build, and ms-swift imports it first of all.
        (folder / "start" / "sitecustomize.py").write_text("import packplan.adapters\n")
        given = {"path/to/model": demo / "models" / "qwen2", "path/to/data.jsonl": records / "qwen2.jsonl"}
        page = (ROOT / "docs" / "use-it-in" / "swift.md").read_text(encoding="utf-8")
        (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
        lines = [[str(given.get(word, word)) for word in shlex.split(line)] for line in block.splitlines()]
        more = f"--model_type qwen2 --template qwen2_5 --max_length {LENGTH['qwen2']} --save_steps 3 --tuner_type full "
        more += f"--num_train_epochs 30 --gradient_accumulation_steps 1 {PLAIN} --external_plugins plugin.py {spy}"
        self.commands = [lines[0], *([*line, *more.split()] for line in lines[1:])]

    def start(self, words: list[str], record: Path) -> subprocess.Popen[bytes]:
        """Start a command; what it prints goes to `log` in *record*."""
        record.mkdir()
        environment = os.environ | {
            "PYTHONPATH": f"{self.folder / 'start'}{os.pathsep}{ROOT}", "RECORD": str(record), "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(free_port()), "MODELSCOPE_CACHE": str(self.folder / "cache"),
        }  # fmt: skip
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        with (record / "log").open("w") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def told(self, ran: Ran) -> str:
        return (ran.folder / "log").read_text()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the command and all that it started, at once."""
        started = descendants(process.pid)
        process.kill()
        end(started)
        process.wait()


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))
