"""A million samples are inspected without a step for each, and planned within little memory."""

import json
import os
import sys
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.distributions import DISTRIBUTIONS
from packplan.app.opening.ranks import join_ranks
from packplan.app.opening.runs import read_config
from packplan.app.opening.stores import open_stores
from packplan.app.plan import __main__ as plan
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.split import Split
from packplan.core.align import align_plan
from packplan.core.config.identity import plan_policy
from packplan.core.plan import build_raw_plan
from packplan.core.ports import StoredRows
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, to_row
from tests.fakes import ListSource
from tests.processes import finished

pytestmark = pytest.mark.slow

DIGEST, LENGTHS = "data", "lengths.npy"


class StoredSamples(ListSource):
    """Samples whose lengths are all stored."""

    def data_digest(self, count, *, start=0, without=()):
        return DIGEST

    def data_files(self):
        return ()


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function that gives the YAML of a run of some samples, which are stored once."""
    return cache(lambda num_samples: store_samples(tmp_path_factory.mktemp("samples"), num_samples))


def store_samples(folder: Path, num_samples: int) -> Path:
    """Return the YAML of a run whose lengths, an image each, and plan are stored."""
    distribution = DISTRIBUTIONS["vlm-16384"]
    lengths = distribution.lengths(num_samples, seed=0)
    path = folder / "run.yaml"
    sections = {
        "model": {"model": "none"},
        "template": {"max_length": distribution.capacity},
        "custom": {"train_jsonl": str(folder / "data.jsonl")},
        "training": {"output_dir": str(folder / "run"), "effective_batch_size": 32},
    }
    path.write_text(json.dumps(sections))  # which is YAML too
    config = read_config(path)
    stores, policy = open_stores(config, "train"), plan_policy(config, "train")
    np.save(folder / LENGTHS, lengths)
    source = StoredSamples(lengths)
    rows = np.tile(to_row(source.measure_in_full(0)), (lengths.size, 1)).astype(np.int32)
    rows[:, COLUMNS.index("length")] = lengths
    media = np.zeros((lengths.size, len(MEDIA_COLUMNS)), dtype=np.int64)
    media[:, :4] = np.column_stack([np.full(lengths.size, 1000), np.full((lengths.size, 2), 28), lengths])
    with stores.lock.hold(timeout_s=60, report=lambda _: None):
        stores.lengths.open_for_append(source.fingerprint(), lengths.size, str)
        stores.lengths.append(StoredRows(rows, media, repeatability={}), DIGEST)
        raw, key = build_raw_plan(lengths, policy), policy.fingerprint(stores.lengths.digest())
        stores.plans.save(key, raw)
        stores.plans.save_aligned(key, align_plan(raw, world_size=8, dataloader_drop_last=False))
    return path


def count_calls(words: str, path: Path) -> int:
    """Run a command of `packplan plan`; return how many functions it calls, of C too."""
    calls = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        assert 0 == plan.main(words.format(path).split())
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("words", ["show {} --json", "whatif {} --max-length 3000 --world-size 8"])
def test_a_million_samples_are_inspected_without_a_step_for_each(run_of, words):
    """A thousand times the samples take few times the calls of functions."""
    count_calls(words, run_of(1_000))  # imports
    few = count_calls(words, run_of(1_000))

    assert few < count_calls(words, run_of(1_000_000)) < 20 * few


def plan_as_rank(path: str, out: str) -> int:
    """Plan stored samples on a rank; write the most bytes that it allocated, over the plan's."""
    config = read_config(Path(path))
    source: Any = StoredSamples(np.load(Path(path).with_name(LENGTHS), mmap_mode="r"))
    split = Split(
        "train", plan_policy(config, "train"), stores=open_stores(config, "train"), encoder=source, source=source
    )
    with join_ranks(config, use_cpu=True) as group:
        tracemalloc.start()
        planned = measure_and_plan(split, Ranks(group, timeout_s=600))
        packs = planned.raw.packs
        size = packs.indices.nbytes + packs.offsets.nbytes
        Path(out, f"bytes{os.environ['RANK']}").write_text(str(tracemalloc.get_traced_memory()[1] / size))
    return 0


def test_another_rank_takes_a_plan_of_a_million_in_little_memory(server, run_of, tmp_path):
    """Few times the bytes of the plan, which comes from rank 0."""
    path = run_of(1_000_000)
    ranks = server.ranks(2, plan_as_rank, str(path), str(tmp_path), folder=tmp_path)

    assert [0, 0] == finished(ranks)
    assert 1 < float((tmp_path / "bytes1").read_text()) < 8
