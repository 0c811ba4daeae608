"""`packplan measure`: its table equals full encodes, and runs take from it."""

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from packplan.adapters.files import hold_lock
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.app import measure
from packplan.app.plan import __main__ as plan
from packplan.core.samples.tables import COLUMNS
from tests.e2e.ready import artefacts_of, chats
from tests.processes import finished
from tests.records import write_lines

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


def test_plans_of_a_run_that_takes_its_lengths_are_those_of_one_that_measures(  # noqa: PLR0917  # fixtures
    write_run, run, demo, few_scenes, tmp_path, shortcuts
):
    """Byte for byte; the table is what the run stored, and only what is audited is encoded."""
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(demo / "data" / "val.jsonl")}
    path = write_run(name="alone", custom=custom)
    assert 0 == plan.main(["build", str(path)])
    run("--config", path)
    rows = pq.read_table(tmp_path / "lengths.parquet").to_pylist()
    folders = (tmp_path / "alone" / "static_packing" / split for split in ("train", "eval"))
    kept = [DiskLengthStore(folder).inspect().rows for folder in folders]
    table, media = (np.concatenate([getattr(one, name) for one in kept]) for name in ("table", "media"))
    assert table.tolist() == [[int(row[name]) for name in COLUMNS] for row in rows]
    assert media.tolist() == [[*one.values()] for row in rows for one in row["media"]]
    assert not (tmp_path / "lengths.parquet.measuring").exists()
    shortcuts.clear()

    taking = write_run(name="taking", custom={**custom, "lengths": str(tmp_path / "lengths.parquet")})
    assert 0 == plan.main(["build", str(taking)])

    assert [] == shortcuts
    assert artefacts_of(tmp_path / "alone") == artefacts_of(tmp_path / "taking")
    assert 0 == plan.main(["verify", str(taking)])


def test_a_table_is_continued_with_records_that_it_lacks(run, demo, tmp_path, shortcuts):
    """Appended, put before, removed: the table is that of the data as they are now."""
    model, data, output = demo / "models" / "qwen2", tmp_path / "data.jsonl", tmp_path / "lengths.parquet"
    run(write_lines(data, chats(60)), "--model", model)
    before = pq.read_table(output).drop_columns(["index"])
    shortcuts.clear()

    changed = [*chats(1, first=70), *chats(59), *chats(2, first=80)]
    said = run(write_lines(data, changed), "--model", model)

    assert f"the lengths of 59 records are taken from {output}" in " ".join(said.split())
    assert [0, 60, 61] == shortcuts
    after = pq.read_table(output)
    run(write_lines(tmp_path / "fresh.jsonl", changed), "--model", model, output=tmp_path / "fresh.parquet")
    assert pq.read_table(tmp_path / "fresh.parquet").equals(after)
    assert before.slice(0, 59).equals(after.drop_columns(["index"]).slice(1, 59))


def test_ranks_write_the_table_that_one_process_writes(server, run, demo, few_scenes, tmp_path):
    """Byte for byte, over the demo's images; nothing else is left."""
    words = [str(few_scenes), "--model", str(demo / "models" / "qwen2_5_vl")]
    run(*words, output=tmp_path / "alone.parquet")
    ranks = server.ranks(2, measure.main, [*words, "-o", str(tmp_path / "two.parquet")], folder=tmp_path / "logs")

    assert [0, 0] == finished(ranks)
    assert (tmp_path / "alone.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert not (tmp_path / "two.parquet.measuring").exists()


def test_a_table_that_another_command_measures_is_refused(demo, text_jsonl, tmp_path, capfd):
    """By its name, before anything is measured: who ends removes what others would wait for."""
    output = tmp_path / "lengths.parquet"
    (folder := output.with_name("lengths.parquet.measuring")).mkdir()
    with hold_lock(folder / "train.lock", "to test"):
        assert 2 == measure.main([str(text_jsonl), "--model", str(demo / "models" / "qwen2"), "-o", str(output)])

    assert "--output is" in (said := capfd.readouterr().err)
    assert "which another run is writing into: wait until it ends" in said


def test_what_cannot_be_measured_is_named(write_run, run, demo, text_jsonl, tmp_path, capfd):  # noqa: PLR0917  # fixtures
    """A model, data or output that is none; a table of other inputs; an option without another."""
    model, text, none = demo / "models" / "qwen2", tmp_path / "text.txt", tmp_path / "none"
    text.write_text("mine")
    for words, output, fault in (
        ((text_jsonl,), None, "--model is not given"),
        (("--model", model), None, "DATA is not given"),
        ((text_jsonl, "--model", none), None, "model.model is "),
        ((tmp_path / "none.jsonl", "--model", model), None, "none.jsonl cannot be read"),
        ((text_jsonl, "--model", model, "template.max_pixel=5"), None, "did you mean max_pixels"),
        ((text_jsonl, "--model", model), none / "lengths.parquet", "--output is .*whose folder"),
        ((text_jsonl, "--model", model), text, "--output cannot be used, since .*is not a table of lengths"),
    ):
        assert re.search(fault, run(*words, status=2, output=output))
        assert not list(tmp_path.glob("*.measuring"))
    assert "mine" == text.read_text()

    run(text_jsonl, "--model", model)
    said = run(text_jsonl, "--model", model, "template.system=Look.", status=2)
    assert "--output cannot be continued: the lengths in" in said
    assert "template.system was unset, now 'Look.'" in said
    for name, fault in (("lengths.parquet", "to measure here, remove custom.lengths"),
                        ("text.txt", f"custom.lengths cannot be used, since {text} is not a table of lengths"),
                        ("none.parquet", f"custom.lengths cannot be used, since {none}.parquet ")):  # fmt: skip
        lengths = {"train_jsonl": str(text_jsonl), "lengths": str(tmp_path / name)}
        assert 2 == plan.main(["build", str(write_run("qwen2", custom=lengths))])
        assert fault in capfd.readouterr().err
