"""Ranks that were given different runs end before the first step, with the same words."""

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from packplan.adapters.ranks.torch_group import weight_digests
from packplan.app import measure, rl, sft
from packplan.app.opening import ranks
from packplan.app.opening.ranks import join_ranks
from packplan.app.opening.runs import read_config
from packplan.app.opening.trainers import open_checkpoint, warn_of_overwriting
from packplan.app.plan import __main__ as plan
from packplan.app.sft import stream
from packplan.core.config.identity import rank_differences
from packplan.core.errors import MismatchError, RunError
from packplan.core.schedule import ResumeState
from tests.fakes import ScriptedGroup
from tests.network import free_port
from tests.processes import finished
from tests.stored import asked

pytestmark = pytest.mark.slow


def other_model(folder: Path, to: Path) -> Path:
    """Copy a model, and change the least bit of one weight."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    weights["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def on_rank(cases):
    """Run commands, by words of each rank and port; say on standard error when each runs."""
    rank, installed = int(os.environ["RANK"]), ranks.installed_version
    for name, (command, words, port) in cases.items():
        os.environ["MASTER_PORT"] = str(port)
        if name == "build" and rank:
            ranks.installed_version = lambda package: "0.0.1" if package == "numpy" else installed(package)
        print(f"<{name}>", file=sys.stderr)
        print(f"</{name}> {command(words[rank])}", file=sys.stderr)
        if dist.is_initialized():
            dist.destroy_process_group()


def test_ranks_that_were_given_different_runs_all_end_and_one_says_how(server, write_run, write_rl, demo, tmp_path):
    """
    Status 2 on all, whatever the command: one names each key with its values; a rank that
    refuses its run says why, and so do the others instead of waiting, unless all say the same.
    """
    other = other_model(demo / "models" / "qwen2", tmp_path / "other" / "qwen2")
    keys = {"learning_rate": 1e-3, "packing": False, "disable_tqdm": True}
    val = {"val_jsonl": str(demo / "data" / "repeat.jsonl")}
    changed = write_run("qwen2", name="changed", template={"max_length": 200}, training=keys, custom=val)
    stream_keys = {"max_steps": 2, "packing_mode": "dynamic"}
    streamed = write_run("qwen2", name="stream", custom={"trainer_variant": "rollout"}, training=stream_keys)
    plain, reinforced = str(asked(write_run("qwen2"))), str(write_rl())
    wrong, measured = "custom.train_jsonl=absent.jsonl", ["--config", plain, "-o"]
    refused = {
        "sft": (sft.main, [[plain, wrong], [plain]]),
        "refused": (plan.main, [["build", plain], ["build", plain, wrong]]),
        "time": (plan.main, [["time", plain, wrong], ["time", plain]]),
        "measure": (measure.main, [[*measured, "absent/a.parquet"], [*measured, str(tmp_path / "a.parquet")]]),
        "rl": (rl.main, [[reinforced], [reinforced, wrong]]),
    }
    cases = refused | {
        "alike": (sft.main, [[plain, wrong]] * 2),
        "keys": (sft.main, [[plain], [str(changed)]]),
        "stream": (sft.main, [[plain], [str(streamed)]]),
        "weights": (sft.main, [[plain], [plain, f"model.model={other}"]]),
        "build": (plan.main, [["build", plain, "--world-size", "2"], ["build", plain]]),
    }

    ported = {name: (*case, free_port()) for name, case in cases.items()}
    both = server.ranks(2, on_rank, ported, folder=tmp_path / "logs")
    assert [0, 0] == finished(both)
    assert not any("Traceback" in one.said for one in both)
    ends = {name: re.compile(rf"<{name}>\n(?:.*?error \(rank \d\): )?(.*)</{name}> 2\n", re.DOTALL) for name in cases}
    errors = {name: [end.search(one.said)[1] for one in both] for name, end in ends.items()}
    for name, (_, words) in refused.items():
        refuses = 1 if wrong in words[1] else 0
        assert errors[name][1 - refuses].startswith(f"rank {refuses} refuses the run: ")
        assert all("absent" in one for one in errors[name])
    said = {}
    assert errors["alike"] == [errors["sft"][0], ""]
    for name in cases.keys() - refused.keys() - {"alike"}:
        (error,) = [text for text in errors[name] if text.startswith("ranks were given different runs:\n")]
        _, *said[name], _ = error.strip().split("\n  ")
    assert [
        'custom.val_jsonl: absent on rank 0; "a path" on rank 1',
        "template.max_length: 256 on rank 0; 200 on rank 1",
        "training.learning_rate: 0.005 on rank 0; 0.001 on rank 1",
        "training.packing: true on rank 0; false on rank 1",
    ] == said["keys"]
    assert 'custom.trainer_variant: "sft" on rank 0; "rollout" on rank 1' in said["stream"]
    numpy = f'version of numpy: "{np.__version__}" on rank 0; "0.0.1" on rank 1'
    assert ["--world-size: 2 on rank 0; absent on rank 1", numpy] == said["build"]
    (weight,) = said["weights"]
    assert re.fullmatch(r"weight model\.norm\.weight: (float32 \[64\]) \w+ on rank 0; \1 \w+ on rank 1", weight)


def test_a_lost_rank_is_one_sentence_wherever_torch_notices_it(write_run):
    """In any command, and in any part of a step; other errors stay as they are."""
    config = read_config(write_run("qwen2"))
    gloo = "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1. This is typically caused by"
    said = "another rank has ended, so rank 0 cannot continue: Connection closed by peer [10.0.0.1]:1"

    with pytest.raises(RunError, match=f"^{re.escape(said)}$"), join_ranks(config):
        raise RuntimeError(gloo)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), join_ranks(config):
        raise RuntimeError("shapes differ")


def test_ranks_of_a_stream_compare_their_data(write_run):
    """Under the same keys, since no plan of them is compared."""
    keys = {"max_steps": 2, "packing_mode": "dynamic", "effective_batch_size": 2}
    config = read_config(write_run("qwen2", custom={"trainer_variant": "rollout"}, training=keys))
    agreed = iter([True, False])
    group = ScriptedGroup(world_size=2, others=lambda value: value if next(agreed) else "other")

    with pytest.raises(MismatchError, match="the train data"):
        stream.prepare_stream(config, group)


def test_ranks_that_go_on_from_different_checkpoints_are_refused(write_run, execute, caplog):
    """Though the folder has the same name on their disks: one is further. Rank 0 warns of none."""
    path = write_run("qwen2", training={"max_steps": 2, "save_strategy": "steps", "save_steps": 1})
    execute(path)
    for rank in (0, 1):
        caplog.clear()
        warn_of_overwriting(read_config(path).training, ScriptedGroup(rank=rank))
        assert open_checkpoint(read_config(path), ScriptedGroup(rank=rank), ResumeState) is None
        assert (rank == 0) == ("checkpoint-2 exists, but" in caplog.text)
    config = read_config(path, ["training.resume_from_checkpoint=last"])
    said = []

    def further(value):
        said.extend([value] * bool(value))  # both find their own checkpoint whole
        return "another digest" if len(said) == 1 else value.replace('"checkpoint.progress.step": "2"', '"step": "3"')

    with pytest.raises(RunError, match=r"checkpoint\.progress\.step: 2 on rank 0"):
        open_checkpoint(config, ScriptedGroup(world_size=2, others=further), ResumeState)


def test_files_of_settings_and_mixes_are_compared_by_their_content(write_run, text_jsonl, tmp_path):
    """Not by their names, nor by the paths of data in them, but by which of these are the same."""
    (tmp_path / "other.jsonl").write_text(text_jsonl.read_text())

    def given(name: str, data: Path = text_jsonl, stage: int = 2, ratio: str = "0.5", more: str = "") -> dict[str, str]:
        settings, mix = tmp_path / f"{name}.json", tmp_path / f"{name}-mix.yaml"
        settings.write_text(f'{{"zero_optimization": {{"stage": {stage}}}}}')
        mix.write_text(f"sources: [{{jsonl: {data}, ratio: {ratio}}}]\n{more}")
        custom = {"fusion_config": str(mix), "train_jsonl": None, "trainer_variant": "rollout"}
        keys = {"deepspeed": str(settings), "max_steps": 2, "packing_mode": "dynamic"}
        return ranks._rank_values(read_config(write_run("qwen2", name=name, custom=custom, training=keys)), {})

    one = given("one")
    assert one == given("two", tmp_path / "other.jsonl")
    for key, change in {
        "training.deepspeed.zero_optimization.stage": {"stage": 3},
        "custom.fusion_config.sources": {"ratio": "0.7"},
        "custom.fusion_config.samples_per_epoch": {"more": "samples_per_epoch: 3"},
    }.items():
        assert [key] == [found.key for found in rank_differences((one, given("three", **change)))]


@pytest.mark.parametrize("num_rows", [7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64])
def test_a_digest_is_of_every_bit_and_of_its_place(dtype, num_rows, monkeypatch):
    """A changed bit, or two items exchanged; no copy, stride or place in memory changes it."""
    monkeypatch.setattr("packplan.adapters.ranks.torch_group._BLOCK", 4)
    model = torch.nn.Module()
    drawn = torch.randint(0, 255, (num_rows, 11), generator=torch.Generator().manual_seed(0))
    rows = drawn.to(dtype)
    for name, weight in {"w": rows, "scale": torch.tensor(2.0), "none": torch.zeros(0, 3)}.items():
        model.register_buffer(name, weight)

    def digest(weight: torch.Tensor) -> str:
        model.w = weight
        return weight_digests(model)["weight w"]

    plain = digest(rows)
    assert ["weight none", "weight scale", "weight w"] == sorted(weight_digests(model))
    assert plain == digest(rows.T.contiguous().T)
    assert plain == digest(torch.cat([rows.view(-1)[:1], rows.view(-1)])[1:].view_as(rows))
    assert plain != digest(rows.view(11, num_rows))
    for place in range(rows.numel()):
        changed = rows.clone()
        changed.view(-1).view(torch.uint8)[place * rows.element_size()] ^= 1
        assert plain != digest(changed)
    for one, two in ((0, 1), (3, 40), (15, 16), (0, 4), (0, 4 * 8 // rows.element_size())):
        changed = rows.clone()
        changed.view(-1)[[one, two]] = rows.view(-1)[[two, one]]
        assert (plain == digest(changed)) == bool(rows.view(-1)[one] == rows.view(-1)[two])
