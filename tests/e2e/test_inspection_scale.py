"""A million samples are inspected within CPU seconds, and planned within little memory."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.child import peak_bytes, reset_peak
from benchmarks.distributions import DISTRIBUTIONS
from packplan.app.plan import __main__ as plan
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.split import Split
from packplan.app.wiring.ranks import join_ranks
from packplan.app.wiring.runs import read_config
from packplan.app.wiring.stores import open_stores
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
def path(tmp_path_factory) -> Path:
    """The YAML of a run whose lengths, an image each, and plan of a million samples are stored."""
    folder, distribution = tmp_path_factory.mktemp("million"), DISTRIBUTIONS["vlm-16384"]
    lengths = distribution.lengths(1_000_000, seed=0)
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


@pytest.mark.parametrize(
    ("words", "most_s"), [("show {} --json", 1.5), ("whatif {} --max-length 3000 --world-size 8", 3)]
)
def test_a_million_samples_are_looked_at_in_seconds(path, words, most_s):
    """By the processor's time."""
    before = time.process_time()
    assert 0 == plan.main(words.format(path).split())
    assert time.process_time() - before < most_s


def plan_as_rank(path: str, out: str) -> int:
    """Plan stored samples on one rank; write the bytes that this took beyond what the rank held."""
    config = read_config(Path(path))
    source: Any = StoredSamples(np.load(Path(path).with_name(LENGTHS), mmap_mode="r"))
    split = Split(
        "train", plan_policy(config, "train"), stores=open_stores(config, "train"), encoder=source, source=source
    )
    with join_ranks(config, use_cpu=True) as group:
        before = reset_peak()
        measure_and_plan(split, Ranks(group, timeout_s=600))
        Path(out, f"bytes{os.environ['RANK']}").write_text(str(peak_bytes() - before))
    return 0


def test_another_rank_takes_a_plan_of_a_million_in_little_memory(server, path, tmp_path):
    """Below 72 MB beyond what it held; the plan comes from rank 0."""
    ranks = server.ranks(2, plan_as_rank, str(path), str(tmp_path), folder=tmp_path)

    assert [0, 0] == finished(ranks)
    assert 0 < int((tmp_path / "bytes1").read_text()) < 72e6
