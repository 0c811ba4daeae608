"""The code of `docs/transformers-trainer.md` trains every sample as if it were alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.nearness import FLOAT32

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PAGE = (ROOT / "docs" / "transformers-trainer.md").read_text(encoding="utf-8")

EPOCHS, DEADLINE_S = 2, 120

CASES = {
    "one rank": (1, PAGE),
    "two ranks": (2, PAGE),
    "with a cache": (1, PAGE.replace("report_to=[]", "report_to=[], use_cache=True")),
    "without positions": (1, PAGE.replace("Flattening()", "Flattening(return_position_ids=False)")),
}
"""World size, and the page whose code is run."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[int]]]:
    """Samples of 1 to 120 tokens, of each of which the second half is learned."""
    draw = np.random.default_rng(0)
    samples = [draw.integers(20, 200, n).tolist() for n in [1, 2, *draw.integers(3, 120, 24).tolist()]]
    return [{"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]} for ids in samples]


def steps_of(seen: list[dict]) -> list[list[int]]:
    """Return the packs of each optimizer step, of all ranks."""
    per_rank, window = len(seen[0]["packs"]) // len(seen), seen[0]["accumulation"]
    return [
        [pack for rank in seen for pack in rank["fetched"][start : min(start + window, end)]]
        for end in range(per_rank, EPOCHS * per_rank + 1, per_rank)
        for start in range(end - per_rank, end, window)
    ]


@pytest.fixture(scope="module")
def qwen2(demo) -> str:
    return str(demo / "models" / "qwen2")


@pytest.fixture(scope="module")
def folder(rows, qwen2, tmp_path_factory) -> Path:
    """Run all cases; return where each wrote what it saw, in a folder of its name."""
    folder = tmp_path_factory.mktemp("guide")
    cases = []
    for name, (world_size, page) in CASES.items():
        (folder / name).mkdir()
        where = {"out": str(folder / name), "model": qwen2}
        cases.append({"world_size": world_size, "page": page, "rows": rows, **where})
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.e2e.guide", str(folder / "cases.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S)
    assert 0 == run.returncode, run.stderr[-3000:]
    return folder


def seen_by(folder: Path, name: str) -> list[dict]:
    """Return what each rank of a case saw."""
    return [json.loads((folder / name / f"rank{rank}.json").read_text()) for rank in range(CASES[name][0])]


def worst_loss(folder: Path, name: str, rows, model_folder: str) -> float:
    """
    Return the largest relative difference of a step's loss from the token mean of its samples, each
    alone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    seen, weights = seen_by(folder, name), torch.load(folder / name / "weights0.pt")
    differences = []
    for packs, before, loss in zip(steps_of(seen), weights, seen[0]["losses"], strict=True):
        model.load_state_dict(before)
        total, tokens = 0.0, 0
        for sample in (sample for pack in packs for sample in seen[0]["packs"][pack]):
            ids, labels = (torch.tensor([rows[sample][name]]) for name in ("input_ids", "labels"))
            if counted := int((labels[:, 1:] != -100).sum()):
                with torch.no_grad():
                    total += model(input_ids=ids, labels=labels).loss.item() * counted
                tokens += counted
        differences.append(abs(total / tokens - loss) / loss)
    return max(differences)


@pytest.mark.parametrize("name", ["one rank", "two ranks"])
def test_every_step_has_the_loss_of_its_samples_alone(folder, rows, qwen2, name):
    """Over the packs of all ranks, as the mean over their supervised tokens."""
    assert worst_loss(folder, name, rows, qwen2) < FLOAT32


@pytest.mark.parametrize("name", ["one rank", "two ranks"])
def test_each_epoch_sees_each_pack_once_in_another_order(folder, rows, name):
    """Whatever the ranks; those that repeat to fill the end are packs of the aligned plan."""
    seen = seen_by(folder, name)
    packs = seen[0]["packs"]
    epochs = np.concatenate([np.reshape(rank["fetched"], (EPOCHS, -1)) for rank in seen], axis=1).tolist()

    assert set(range(len(rows))) == {sample for pack in packs for sample in pack}
    assert [list(range(len(packs)))] * EPOCHS == list(map(sorted, epochs))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("name", ["with a cache", "without positions"])
def test_with_a_cache_or_without_positions_samples_see_each_other(folder, rows, qwen2, name):
    """As the guide warns, and as the comparison finds."""
    assert CASES[name][1] != PAGE
    assert worst_loss(folder, name, rows, qwen2) > 1e-4
