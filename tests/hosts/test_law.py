"""Plans in trainers of transformers and TRL: schedule and steps; see `make test-hosts`."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from packplan.adapters.hf import following, training
from tests.hosts.law import cell_of
from tests.hosts.pages import PAGES
from tests.nearness import FLOAT32

# isort: split
from transformers import Trainer

pytestmark = pytest.mark.slow


SMOKE = (cell_of("transformers", "qwen2_5_vl", 2, 3, 2), cell_of("trl", "qwen2", 1, 3, 0))

SEEING = tuple(
    cell_of("transformers", model, *rest) for model in ("qwen2_5_vl", "qwen3_vl") for rest in ((1, 3, 0), (2, 1, 2))
)

EVERY = tuple(
    cell_of("transformers", "qwen2", ranks, accumulation, workers)
    for ranks in (1, 2)
    for accumulation in (1, 3)
    for workers in (0, 2)
)

PAIRS = tuple(cell_of("trl", "qwen2", *rest) for rest in ((1, 1, 0), (1, 3, 2), (2, 1, 2), (2, 3, 0)))
"""TRL's trainer is one of transformers: every two settings together, not every three."""

SHARED = ({**cell_of("transformers", "qwen2_5_vl", 2, 3, 0), "row_ranks": 2},)
"""Both ranks compute each row."""

CELLS = (*EVERY, *PAIRS, *SEEING, *SHARED) if "HOST_PYTHON" in os.environ else SMOKE

RESUMED = (
    (*(("transformers", *ranks) for ranks in ((1, 1), (1, 2), (2, 1), (2, 2))), ("trl", 1, 2), ("trl", 2, 1))
    if "HOST_PYTHON" in os.environ
    else (("transformers", 2, 1),)
)
"""Trainer, and ranks before and after a kill."""


def name_of(cell: dict[str, Any]) -> str:
    return "-".join(map(str, cell.values()))


@pytest.fixture(scope="module")
def folders(apart, tmp_path_factory) -> tuple[Path, Path]:
    """Run all cells, give trainers what they would not train as planned; return both folders."""
    folder, refused = tmp_path_factory.mktemp("cells"), tmp_path_factory.mktemp("refused")
    cells = [{"out": str(folder / name_of(one)), **one} for one in CELLS]
    for trainer, before, after in RESUMED:
        out = {"out": str(folder / f"{trainer} {before} to {after}")}
        cells.append(out | cell_of(trainer, "qwen2", before, 2, 0) | {"kill_after": 2})
        cells.append(out | cell_of(trainer, "qwen2", after, 2, 0) | {"resume": True})
    (folder / "cells.json").write_text(json.dumps(cells))
    apart("tests.hosts.refused:after_law", folder / "cells.json", refused, folder=folder)
    return folder, refused


@pytest.fixture(scope="module")
def of(folders) -> Callable[[str, int], list[dict[str, Any]]]:
    """Return what gives the findings of each rank of a cell, or fails with their errors."""

    def read(name: str, ranks: int) -> list[dict[str, Any]]:
        wrote = [json.loads(path.read_text()) for path in sorted((folders[0] / name).glob("found*.json"))]
        assert ranks == len(wrote), [path.read_text()[-2000:] for path in (folders[0] / name).glob("errors*.txt")]
        return wrote

    return read


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_trainer_trains_and_evaluates_the_plan_as_its_samples_alone(of, cell):
    """
    Each microbatch of each rank is the schedule's, to the last of the steps that were counted
    before. A step's loss and gradients, as `assert_step_loss` asks before the first, and the
    evaluation, in which a pack is repeated on two ranks, are means over the samples alone.
    """
    ranks = of(name_of(cell), cell["ranks"])

    assert 1 == ranks[0]["num_packs"] % 2, "no pack is repeated on two ranks"
    assert max(ranks[0]["loss"], ranks[0]["gradients"]) < FLOAT32
    for rank in ranks:
        assert rank["batches"]
        assert 1 == len(set(rank["steps"])), rank["steps"]
        assert rank["asked"] == pytest.approx(rank["asked"][:1] * 3, rel=FLOAT32)
        assert rank["evaluated"] == pytest.approx(ranks[0]["alone"], rel=FLOAT32)


@pytest.mark.parametrize(("trainer", "before", "after"), RESUMED)
def test_a_killed_run_goes_on_with_what_is_left(of, trainer, before, after):
    """On as many ranks or others: of the epoch, each pack that was not trained, and every step."""
    resumed = of(f"{trainer} {before} to {after}", after)

    first = resumed[0]
    consumed, epoch = Counter(first["consumed"]), first["epoch"]
    trained = Counter(pack for rank in resumed for at, pack in rank["packs"] if at == epoch)
    assert 2 * 2 * before == consumed.total(), "two steps of two batches were done"
    assert set(range(first["num_packs"])) == set(consumed) | set(trained)
    assert trained == Counter(first["order"])
    assert sorted(first["logged"]) == first["logged"]
    assert 2 == first["logged"][-1], "the last epoch is whole"
    assert trained.keys().isdisjoint(consumed) or (before, after) == (2, 2)
    for rank in resumed:
        assert rank["batches"]
        taken, left, last = rank["steps"]
        assert (taken, last) == (left, 2 + left)
    assert first["loss"] < FLOAT32
    assert first["gradients"] < FLOAT32


def test_what_a_trainer_would_not_train_as_planned_is_refused_by_name(folders):
    """Settings, rows, ranks, plans, checkpoints, loaders and models: none is trained."""
    told = json.loads((folders[1] / "told.json").read_text())
    assert {} == {words: text for words, text in told.items() if words not in text}


def test_the_page_has_the_methods_of_trainers_that_are_replaced():
    """By class: what a new version of a host may change."""
    table = re.findall(r"^\| `(\w+)` \| [^|]+ \| (`.*`) \|$", (PAGES / "transformers.md").read_text(), re.MULTILINE)
    classes = vars(following) | vars(training)
    if find_spec("swift"):
        classes |= vars(import_module("packplan.adapters.swift.training"))
    for name, methods in table:
        if name in classes:
            own = {one for one in vars(classes[name]) if hasattr(Trainer, one) and not one.startswith("__")}
            assert own == set(re.findall(r"`(\w+)`", methods)), name
    assert 5 == len(table)
