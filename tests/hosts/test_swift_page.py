"""The commands of docs/use-it-in/swift.md as they stand."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.swift_plans import LENGTH, PLAIN, ROOT, Ran, write_records
from tests.network import free_port
from tests.processes import DEADLINE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "HOST_PYTHON" not in os.environ or find_spec("swift") is None,
        reason="`make test-hosts` runs it beside ms-swift",
    ),
]


def test_the_page_s_commands_train_and_go_on(demo, tmp_path):
    """`swift sft`, unmodified, on two ranks: each pack is trained as often as planned."""
    records = tmp_path / "records"
    records.mkdir()
    write_records(records, demo)
    console = Console(tmp_path, demo, records)
    write, begin, go_on = console.commands
    console.run(write, tmp_path / "written")
    told = console.run(begin, (whole := Ran(tmp_path / "whole")).folder)
    console.run(
        [*go_on, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-3")],
        (rest := Ran(tmp_path / "rest")).folder,
    )

    found = whole.plan(LENGTH["qwen2"])
    schedule = found.schedule(world_size=2, packs_per_step=2, epochs=2, seed=42)
    assert f"{schedule.total_steps} in all on 2 ranks" in told.split("'loss'", 1)[0], "told before the first step"
    whole.assert_planned(found, schedule)
    for rank in range(2):
        assert [one for one in whole.planned(found, schedule, rank) if one[0] > 3] == rest.trained(rank) != []


class Console:
    """The commands of docs/use-it-in/swift.md, typed for a tiny model on a CPU."""

    def __init__(self, folder: Path, demo: Path, records: Path) -> None:
        self.folder, spy = folder, folder / "spy.py"
        spy.write_text("import os\n\nfrom tests.e2e.plugin_run import Spy\n\nSpy(os.environ['RECORD'])\n")
        (folder / "start").mkdir()
        # The published torchvision is no CPU build, and ms-swift imports it first of all.
        (folder / "start" / "sitecustomize.py").write_text("import packplan.adapters\n")
        given = {"path/to/model": demo / "models" / "qwen2", "path/to/data.jsonl": records / "qwen2.jsonl"}
        page = (ROOT / "docs" / "use-it-in" / "swift.md").read_text(encoding="utf-8")
        (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
        lines = [[str(given.get(word, word)) for word in shlex.split(line)] for line in block.splitlines()]
        more = f"--model_type qwen2 --template qwen2_5 --max_length {LENGTH['qwen2']} --save_steps 3 --tuner_type full "
        more += f"--num_train_epochs 2 --gradient_accumulation_steps 1 {PLAIN} --external_plugins plugin.py {spy}"
        self.commands = [lines[0], *([*line, *more.split()] for line in lines[1:])]

    def run(self, words: list[str], record: Path) -> str:
        """Run a command, and return what it printed."""
        record.mkdir()
        environment = os.environ | {
            "PYTHONPATH": f"{self.folder / 'start'}{os.pathsep}{ROOT}", "RECORD": str(record), "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(free_port()), "MODELSCOPE_CACHE": str(self.folder / "cache"),
        }  # fmt: skip
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
        assert not done.returncode, done.stderr[-3000:]
        return done.stdout + done.stderr
