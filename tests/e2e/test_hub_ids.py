"""
Data by their names as ms-swift writes them: what is drawn, what is split off, what caches hold.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packplan.adapters.conversion import hubs
from packplan.app.wiring import stores
from packplan.core.errors import ConfigError
from packplan.core.samples import draw_records


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch):
    """Let no cache but the test's be read or written."""
    import datasets

    for name in ("HF_HUB_CACHE", "USE_HF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def write(path: Path, number: int, said: str) -> Path:
    """Write records, and return their file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"query": f"{said} {n}", "response": f"answer {n}"} for n in range(number)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def asked(files) -> list[str]:
    """Return what the records of files ask, sorted."""
    rows = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    return sorted(row.get("query") or row["messages"][0]["content"] for row in rows)


@pytest.mark.parametrize(
    ("counts", "ratio", "shuffle", "seed"),
    [((50, 8), 0.1, True, 7), ((None, 25), 0.0, False, 42), ((5, 3), 1.0, True, 1)],
)
def test_a_draw_takes_the_records_that_ms_swift_takes(tmp_path, counts, ratio, shuffle, seed):
    """From the same files by the same seed, trained and evaluated."""
    from swift.dataset import load_dataset

    files = [write(tmp_path / "a.jsonl", 37, "a"), write(tmp_path / "b.jsonl", 11, "b")]
    names = [f"{file}#{count}" if count else str(file) for file, count in zip(files, counts, strict=True)]

    theirs = load_dataset(names, split_dataset_ratio=ratio, seed=seed, shuffle=shuffle, strict=True)
    drawn = draw_records([37, 11], counts, split_ratio=ratio, shuffle=shuffle, seed=seed)

    for data, part in zip(theirs, ("train", "val"), strict=True):
        expected = [] if data is None else sorted(row["messages"][0]["content"] for row in data)
        assert expected == sorted(
            f"{said} {n}" for said, one in zip("ab", drawn, strict=True) for n in getattr(one, part)
        )


def test_a_split_is_seeded_written_once_and_known_by_its_content(write_run, tmp_path):
    """The same seed gives the same files, another seed others; what is evaluated is not trained."""
    data = write(tmp_path / "data" / "a.jsonl", 20, "a")
    custom = {"train_jsonl": None, "dataset": [f"{data}#15"], "split_dataset_ratio": 0.2}
    path = write_run("qwen2", custom=custom)

    first = stores.read_config(path).custom
    stamps = [Path(file).stat().st_mtime_ns for file in (*first.train_jsonl, *first.val_jsonl)]
    again = stores.read_config(path).custom
    other = stores.read_config(path, ["custom.data_seed=7"]).custom

    assert (12, 3) == (len(asked(first.train_jsonl)), len(asked(first.val_jsonl)))
    assert not set(asked(first.train_jsonl)) & set(asked(first.val_jsonl))
    assert (first.train_jsonl, first.val_jsonl) == (again.train_jsonl, again.val_jsonl)
    assert stamps == [Path(file).stat().st_mtime_ns for file in (*again.train_jsonl, *again.val_jsonl)]
    assert first.train_jsonl != other.train_jsonl
    write(data, 20, "changed")
    assert first.train_jsonl != stores.read_config(path).custom.train_jsonl


def test_an_id_is_read_from_a_cache_by_ms_swift_s_loader(write_run, tmp_path):
    """With its count and its preprocessor: the names of `swift/self-cognition` are the run's."""
    plain = tmp_path / "hf" / "hub" / "datasets--org--plain" / "snapshots" / "abc"
    write(plain / "train.jsonl", 6, "plain")
    cognition = tmp_path / "ms" / "datasets" / "swift" / "self-cognition"
    cognition.mkdir(parents=True)
    row = {"query": "who are you?", "response": "{{NAME}} by {{AUTHOR}}", "tag": "en"}
    (cognition / "self_cognition.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    custom = {"train_jsonl": None, "dataset": ["HF::org/plain#4", "swift/self-cognition"], "model_name": ["Bot"],
              "model_author": ["甲", "Us"], "val_dataset": ["HF::org/plain#2"]}  # fmt: skip
    path = write_run("qwen2", custom=custom)

    config = stores.read_config(path).custom

    (file,) = config.train_jsonl
    rows = [json.loads(line)["messages"] for line in Path(file).read_text().splitlines()]
    assert 4 == sum(messages[0]["content"].startswith("plain") for messages in rows)
    assert ["Bot by Us"] * 2 == [
        messages[1]["content"] for messages in rows if messages[0]["content"] == "who are you?"
    ]
    assert ["plain 0", "plain 1"] == asked(config.val_jsonl)


def test_a_download_is_ms_swift_s_and_its_failure_is_a_fault(write_run, tmp_path, monkeypatch, demo):
    """`model.download: true` asks ms-swift; what it cannot fetch is the user's to see."""
    fetched = []

    def fetch(name):
        fetched.append(name)
        if name == "org/gone":
            raise ConnectionError("no network")
        return str(demo / "models" / "qwen2")

    monkeypatch.setattr(hubs, "safe_snapshot_download", fetch)
    found = stores.read_config(write_run("qwen2", model={"model": "org/name", "download": True}))

    assert str(demo / "models" / "qwen2") == found.model.model
    with pytest.raises(ConfigError, match=r"model\.model: org/gone cannot be downloaded: no network"):
        stores.read_config(write_run("qwen2", model={"model": "org/gone", "download": True}))
    assert ["org/name", "org/gone"] == fetched
