"""The commands of docs/use-it-in/swift.md as they stand."""

import os
import re

import pytest

from tests.e2e.plugin_run import LENGTH, PLAIN, Ran, write_records
from tests.hosts.pages import HOSTED, Reader
from tests.network import free_port
from tests.processes import ROOT

COMPILES_NOTHING = 'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False'

pytestmark = [pytest.mark.slow, pytest.mark.skipif(HOSTED, reason="ms-swift is not in this environment")]


def test_the_page_s_commands_train_and_go_on(demo, server, tmp_path):
    """
    `swift sft`, unmodified, on two ranks: each pack as often as planned, by ZeRO 3 too.

    All runs take the lengths that `plan build` has stored for the same command, and its plan.
    """
    write_records(tmp_path, demo)
    given = {"path/to/model": demo / "models" / "qwen2", "path/to/data.jsonl": tmp_path / "qwen2.jsonl"}
    spy = tmp_path / "spy.py"
    spy.write_text("import os\n\nfrom tests.e2e.plugin_run import Spy\n\nSpy(os.environ['RECORD'])\n")
    # The published torchvision is no CPU build, and ms-swift imports it first of all.
    (tmp_path / "sitecustomize.py").write_text("import packplan.adapters\n")
    limits = f"--max_length {LENGTH['qwen2']} --packing_length {LENGTH['qwen2']}"
    words = f"--model_type qwen2 --template qwen2_5 {limits} --save_steps 3 --tuner_type full "
    words += f"--num_train_epochs 2 --gradient_accumulation_steps 1 {PLAIN} --external_plugins plugin.py {spy}"
    at = Reader(server, "swift", tmp_path, given)
    write, begin, go_on, share = at.commands
    # The page's lines for a CPU; without the second one, DeepSpeed compiles for minutes.
    lines = "import deepspeed", COMPILES_NOTHING, 'deepspeed.init_distributed("gloo", auto_mpi_discovery=False)'
    (gloo := tmp_path / "gloo.py").write_text("\n".join(lines))

    def run(command, name, *more):
        (ran := Ran(tmp_path / name)).folder.mkdir()
        ours = f"PYTHONPATH={tmp_path}{os.pathsep}{ROOT}", f"RECORD={ran.folder}"
        free = f"MASTER_PORT={free_port()}", f"MODELSCOPE_CACHE={tmp_path / 'cache'}"
        return ran, at.run([*ours, *free, *command, *words.split(), *more])

    at.run(write)
    variables, command = begin[:1], begin[1:]
    _, built = run([*variables, "packplan", "plan", "build", *command], "built")
    whole, told = run(begin, "whole")
    rest, told_again = run(go_on, "rest", "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-3"))

    assert ["no row is measured" in text for text in (told, told_again)] == [True, True]
    (plan,) = {*re.findall(r"plan +([0-9a-f]{12})", built)}
    assert [plan, plan] == re.findall(r"plan +([0-9a-f]{12})", told + told_again)
    found = whole.plan(LENGTH["qwen2"])
    schedule = found.schedule(world_size=2, packs_per_step=2, epochs=2, seed=42)
    assert f"{schedule.total_steps} in all on 2 ranks" in told.split("'loss'", 1)[0], "told before the first step"
    whole.assert_planned(found, schedule)
    shared, same = run(["DS_ACCELERATOR=cpu", *share], "shared", str(gloo))
    shared.assert_planned(found, schedule)
    assert losses(told) == pytest.approx(losses(same), rel=1e-6)
    assert len(losses(told)) == schedule.total_steps
    for rank in range(2):
        assert [one for one in whole.planned(found, schedule, rank) if one[0] > 3] == rest.trained(rank) != []


def losses(printed):
    """Return the losses that a command has printed."""
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
