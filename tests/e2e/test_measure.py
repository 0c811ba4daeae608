"""`packplan measure`: its table equals full encodes, and runs take from it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.app import measure
from packplan.app.plan import __main__ as plan
from packplan.core.samples.tables import COLUMNS
from tests.e2e.test_plan_build import artefacts_of, refuse_to_measure, write_lines
from tests.processes import finished

pytestmark = pytest.mark.slow


@pytest.fixture
def run(capfd, tmp_path):
    """Return a function that measures into `lengths.parquet`, and returns what was said."""

    def main(*words: object, status: int = 0, output: Path | None = None) -> str:
        capfd.readouterr()
        target = output or tmp_path / "lengths.parquet"
        assert status == measure.main([*map(str, words), "-o", str(target)])
        return str(capfd.readouterr().err)

    return main


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """Return the records that are measured, in order."""
    seen: list[int] = []
    plain = SwiftMeasurer.measure_batch

    def batch(self, indices, *, in_full):
        seen.extend(indices)
        return plain(self, indices, in_full=in_full)

    monkeypatch.setattr(SwiftMeasurer, "measure_batch", batch)
    return seen


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def without_index(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "index"} for row in rows]


def chats(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"query": f"say {n}", "response": "blue circle " * (1 + n % 7)} for n in range(first, first + count)]


def test_plans_of_a_run_that_takes_its_lengths_are_those_of_one_that_measures(  # noqa: PLR0917  # fixtures
    write_run, run, demo, few_scenes, tmp_path, monkeypatch
):
    """Byte for byte; the table is what the run stored, and only what is audited is encoded."""
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(demo / "data" / "val.jsonl")}
    path = write_run(name="alone", custom=custom)
    assert 0 == plan.main(["build", str(path)])
    run("--config", path)
    rows = rows_of(tmp_path / "lengths.parquet")
    kept = [
        DiskLengthStore(tmp_path / "alone" / "static_packing" / split).inspect().rows for split in ("train", "eval")
    ]
    table, media = (np.concatenate([getattr(one, name) for one in kept]) for name in ("table", "media"))
    assert table.tolist() == [[int(row[name]) for name in COLUMNS] for row in rows]
    assert media.tolist() == [[*one.values()] for row in rows for one in row["media"]]
    assert not (tmp_path / "lengths.parquet.measuring").exists()
    refuse_to_measure(monkeypatch)

    taking = write_run(name="taking", custom={**custom, "lengths": str(tmp_path / "lengths.parquet")})
    assert 0 == plan.main(["build", str(taking)])

    assert artefacts_of(tmp_path / "alone") == artefacts_of(tmp_path / "taking")
    assert 0 == plan.main(["verify", str(taking)])


def test_a_table_is_continued_with_records_that_it_lacks(run, demo, tmp_path, measured):
    """Appended, put before, removed: the table is that of the data as they are now."""
    model, data = demo / "models" / "qwen2", tmp_path / "data.jsonl"
    output = tmp_path / "lengths.parquet"
    write_lines(data, chats(60))
    run(data, "--model", model)
    before = rows_of(output)
    measured.clear()

    changed = [*chats(1, first=70), *chats(59), *chats(2, first=80)]
    write_lines(data, changed)
    said = run(data, "--model", model)

    assert f"the lengths of 59 records are taken from {output}" in said
    assert [0, 60, 61] == measured
    write_lines(tmp_path / "fresh.jsonl", changed)
    run(tmp_path / "fresh.jsonl", "--model", model, output=tmp_path / "fresh.parquet")
    assert rows_of(tmp_path / "fresh.parquet") == rows_of(output)
    assert without_index(before[:59]) == without_index(rows_of(output)[1:60])


def test_ranks_write_the_table_that_one_process_writes(server, run, demo, few_scenes, tmp_path):
    """Byte for byte, over the demo's images; nothing else is left."""
    words = [str(few_scenes), "--model", str(demo / "models" / "qwen2_5_vl")]
    run(*words, output=tmp_path / "alone.parquet")
    ranks = server.ranks(2, measure.main, [*words, "-o", str(tmp_path / "two.parquet")], folder=tmp_path / "logs")

    assert [0, 0] == finished(ranks)
    assert (tmp_path / "alone.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert not (tmp_path / "two.parquet.measuring").exists()


def test_what_cannot_be_measured_is_named(  # noqa: PLR0917  # fixtures
    write_run, run, demo, text_jsonl, tmp_path, capfd
):
    """A model, data or output that is none; a table of other inputs; an option without another."""
    model = demo / "models" / "qwen2"
    text = tmp_path / "text.txt"
    text.write_text("mine")
    for words, output, fault in (
        ((text_jsonl,), None, "--model: is not given"),
        (("--model", model), None, "DATA: is not given"),
        ((text_jsonl, "--model", tmp_path / "none"), None, "model.model: "),
        ((tmp_path / "none.jsonl", "--model", model), None, "none.jsonl cannot be read"),
        ((text_jsonl, "--model", model, "template.max_pixel=5"), None, "did you mean max_pixels"),
        ((text_jsonl, "--model", model), tmp_path / "none" / "lengths.parquet", "--output: .*whose folder"),
        ((text_jsonl, "--model", model), text, "--output: .*is no table of lengths"),
    ):
        said = run(*words, status=2, output=output)
        assert re.search(fault, said)
        assert not list(tmp_path.glob("*.measuring"))
    assert "mine" == text.read_text()

    run(text_jsonl, "--model", model)
    said = run(text_jsonl, "--model", model, "template.system=Look.", status=2)
    assert "--output: the lengths in" in said
    assert "template.system: stored None, now 'Look.'" in said
    lengths = {"train_jsonl": str(text_jsonl), "lengths": str(tmp_path / "lengths.parquet")}
    assert 2 == plan.main(["build", str(write_run("qwen2", custom=lengths))])
    assert "remove custom.lengths to measure here" in capfd.readouterr().err
    for name, fault in (("text.txt", "is no table of lengths"), ("none.parquet", "does not exist")):
        lengths["lengths"] = str(tmp_path / name)
        assert 2 == plan.main(["build", str(write_run("qwen2", custom=lengths))])
        assert f"custom.lengths: {tmp_path / name} {fault}" in capfd.readouterr().err
