"""A million stored lengths and their plan, and ranks that take the plan from rank 0."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child import peak_bytes, reset_peak
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.split import Split
from packplan.app.wiring.runs import read_config
from packplan.app.wiring.stores import open_stores
from packplan.core.align import align_plan
from packplan.core.config.identity import plan_policy
from packplan.core.plan import build_raw_plan
from packplan.core.ports import StoredRows
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, DataFile, to_row
from tests.fakes import ListSource

DIGEST, LENGTHS = "data", "lengths.npy"


class StoredSamples(ListSource):
    """Samples whose lengths are all stored."""

    def data_digest(self, count: int, *, start: int = 0, without: Sequence[int] = ()) -> str:
        return DIGEST

    def data_files(self) -> tuple[DataFile, ...]:
        return ()


def store(folder: Path, lengths: np.ndarray, *, packing_length: int, world_size: int) -> Path:
    """Store lengths with an image each, and their plan; return the YAML of the run."""
    path = folder / "run.yaml"
    sections = {
        "model": {"model": "none"},
        "template": {"max_length": packing_length},
        "custom": {"train_jsonl": str(folder / "data.jsonl")},
        "training": {"output_dir": str(folder / "run"), "effective_batch_size": 4 * world_size},
    }
    path.write_text(json.dumps(sections), encoding="utf-8")  # which is YAML too
    config = read_config(path)
    stores, policy = open_stores(config, "train"), plan_policy(config, "train")
    np.save(folder / LENGTHS, lengths)
    source = StoredSamples(lengths)
    rows = np.tile(to_row(source.measure(0)), (lengths.size, 1)).astype(np.int32)
    rows[:, COLUMNS.index("length")] = lengths
    media = np.zeros((lengths.size, len(MEDIA_COLUMNS)), dtype=np.int64)
    media[:, :4] = np.column_stack([np.full(lengths.size, 1000), np.full((lengths.size, 2), 28), lengths])
    with stores.lock.hold(timeout_s=60, report=lambda _: None):
        stores.lengths.resume(source.fingerprint(), lengths.size, str)
        stores.lengths.append(StoredRows(rows, media, repeatability={}), DIGEST)
        raw, key = build_raw_plan(lengths, policy), policy.fingerprint(stores.lengths.digest())
        stores.plans.save(key, raw)
        stores.plans.save_aligned(key, align_plan(raw, world_size=world_size, dataloader_drop_last=False))
    return path


def plan_as_rank(path: str, out: str) -> int:
    """Plan stored samples on one rank; write the bytes that this took beyond what the rank held."""
    from packplan.app.wiring.ranks import join_ranks

    config = read_config(Path(path))
    source: Any = StoredSamples(np.load(Path(path).with_name(LENGTHS), mmap_mode="r"))
    stores, policy = open_stores(config, "train"), plan_policy(config, "train")
    with join_ranks(config, use_cpu=True) as group:
        before = reset_peak()
        measure_and_plan(
            Split("train", policy, stores=stores, encoder=source, source=source), Ranks(group, timeout_s=600)
        )
        Path(out, f"bytes{os.environ['RANK']}").write_text(str(peak_bytes() - before))
    return 0
