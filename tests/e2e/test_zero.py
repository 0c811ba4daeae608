"""Weights that DeepSpeed's ranks share: what they train is what ranks with whole weights train."""

import json
from collections.abc import Callable

import pytest

from packplan.app import plugin
from tests.e2e import plugin_run
from tests.e2e.plugin_run import LENGTH, PLAIN, Ran, write_records
from tests.processes import finished

pytestmark = pytest.mark.slow

PACKED = "--save_strategy no --gradient_accumulation_steps 2 --packing true"

OWN = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto",
       "gradient_accumulation_steps": "auto"}  # fmt: skip
"""Settings of a user's own file."""

SWIFT = {
    "text": ("sft", "qwen2", f"{PACKED} --tuner_type full", ("own.json", "zero2", "zero3")),
    "images": ("sft", "qwen2_5_vl", f"{PACKED} --tuner_type lora", ("zero3",)),
    "pairs": ("rlhf", "qwen2_pairs", f"{PACKED} --tuner_type full --rlhf_type dpo --packing_length 1024",
              ("zero3",)),
}  # fmt: skip
"""Run -> command, data, which name the model, words, and values of `--deepspeed`."""


@pytest.fixture(scope="module")
def ran(demo, server, tmp_path_factory) -> Callable[..., Ran]:
    """Train each command without and with DeepSpeed, all in one process group of two ranks."""
    runs = tmp_path_factory.mktemp("runs")
    write_records(runs, demo)
    (runs / "own.json").write_text(json.dumps(OWN))
    assert 0 == plugin.main(["swift", "-o", str(runs / "plugin.py")])
    commands = []
    for name, (task, data, more, stages) in SWIFT.items():
        of = "qwen2_5_vl" if "_vl" in data else "qwen2"
        given = f"--model {demo / 'models' / of} --model_type {of} --template {'qwen2_5' if of == 'qwen2' else of} "
        given += f"--max_length {LENGTH[of]} --dataset {runs / f'{data}.jsonl'} --external_plugins {runs}/plugin.py"
        for stage in ("", *stages):
            shared = stage and f"--deepspeed {runs / stage if stage == 'own.json' else stage}"
            words = f"{given} --output_dir {runs / 'out'} {PLAIN} --num_train_epochs 1 {more} {shared}".split()
            commands.append((f"{name}-{stage}", task, words))
    commands.sort(key=lambda one: not one[0].endswith("-"))  # those without DeepSpeed first, which leaves variables
    assert [0, 0] == finished(server.ranks(2, plugin_run.main, commands, str(runs), folder=runs))
    return lambda name, stage: Ran(runs / f"{name}-{stage}")


@pytest.mark.parametrize(("name", "stage"), [(name, stage) for name, (*_, stages) in SWIFT.items() for stage in stages])
def test_commands_of_ms_swift_train_the_same(name, stage, ran):
    """Every loss and gradient norm of a plan is that of ranks with whole weights."""
    whole, shared = ran(name, ""), ran(name, stage)

    assert whole.trained() == shared.trained(), "the same packs in the same steps"
    due, found = ([(entry["loss"], entry["grad_norm"]) for entry in one.history if "loss" in entry]
                  for one in (whole, shared))  # fmt: skip
    assert len(due) > 1
    # Ranks with whole weights sum squares of gradients in float32.
    assert [(pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=2e-6)) for loss, norm in due] == found
    assert "packplan" == (shared.folder / "attention").read_text()
