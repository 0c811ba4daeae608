"""Exports in the tools that they are for: packs in order, each step that of its samples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import packplan as pp
from packplan.adapters.exports import export_llama_factory, export_megatron_bridge
from tests.nearness import FLOAT32

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PYTHON = os.environ.get("HOST_PYTHON", sys.executable)
"""Interpreter with the hosts."""

HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"

DEADLINE_S = 240


def rows_of_text():
    """Return samples of 2 to 60 tokens, each with learned ones."""
    draw = np.random.default_rng(1)
    rows = []
    for length in [2, *draw.integers(3, 60, 30).tolist()]:
        ids = draw.integers(20, 280, length).tolist()
        learned = int(draw.integers(0, length - 1))
        rows.append({"input_ids": ids, "labels": [-100] * learned + ids[learned:]})
    return rows


def need(tool):
    """Skip the test where the interpreter of the hosts lacks *tool*."""
    if subprocess.run([PYTHON, "-c", HAS, tool], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip(f"{tool} is not installed: HOST_PYTHON names an interpreter that has it")


def run(module, *arguments):
    """Run a module by the interpreter of the hosts."""
    command = [PYTHON, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S)
    assert 0 == done.returncode, done.stderr[-3000:]


def test_llama_factory_trains_the_packs_in_order_and_apart(tmp_path):
    """By its own loader, collator and trainer, from `tokenized_path`."""
    need("llamafactory")
    rows = rows_of_text()
    plan = pp.plan([len(row["input_ids"]) for row in rows], 63)
    order = plan.schedule(seed=3).order(0)
    export_llama_factory(rows, plan, tmp_path / "packs", order=order)
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows, "packs": [plan.packs[pack] for pack in order]}))

    run("tests.hosts.llama_factory", str(tmp_path))

    found = json.loads((tmp_path / "found.json").read_text())
    assert [True] * len(plan.packs) == found["batches"]
    assert pytest.approx(found["alone"], rel=FLOAT32) == found["losses"]


def test_megatron_bridge_reads_each_sample_with_its_next_tokens(tmp_path):
    """A sample of n tokens takes n - 1 places, and is a sequence of its own."""
    need("megatron.bridge")
    rows = rows_of_text()
    plan = pp.plan([len(row["input_ids"]) for row in rows], 64)
    path = tmp_path / "packs.idx.parquet"
    export_megatron_bridge(rows, plan, path)

    run("tests.hosts.megatron_bridge", str(path), "64")

    batches = json.loads((tmp_path / "packs.idx.parquet.json").read_text())
    assert len(plan.packs) == len(batches) > 1
    for pack, batch in zip(plan.packs, batches, strict=True):
        place, ends = 0, [0]
        for sample in pack:
            ids, labels = rows[sample]["input_ids"], rows[sample]["labels"]
            end = place + len(ids) - 1
            assert ids[:-1] == batch["tokens"][place:end]
            assert ids[1:] == batch["labels"][place:end]
            assert [int(label != -100) for label in labels[1:]] == batch["loss_mask"][place:end]
            assert list(range(len(ids) - 1)) == batch["position_ids"][place:end]
            place = end
            ends.append(end)
        assert 0 == sum(batch["loss_mask"][place:])
        assert ends == batch["cu_seqlens_q"][: len(ends)]
        assert {len(batch["tokens"])} >= set(batch["cu_seqlens_q"][len(ends) :])
