"""
A mix is written as one data file, whole or not at all, whose records are those of its sources.
"""

from __future__ import annotations

import json
import os

import pytest
import yaml

from packplan.adapters.samples.files import rebased
from packplan.app.wiring.mixes import materialise
from packplan.core.errors import ConfigError
from packplan.core.mixes import quotas


@pytest.fixture
def write_mix(tmp_path):
    """Return a function that writes two sources in folders of their own, and a mix of them."""

    def write(*sources: dict, **more) -> str:
        for name, count in (("a", 30), ("b", 12)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "0.png").write_bytes(name.encode())
            records = [{"messages": [], "number": n, "from": name, "images": ["0.png"]} for n in range(count)]
            del records[1]["images"]
            (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        rows = [{"jsonl": str(tmp_path / row.pop("of") / "data.jsonl"), **row} for row in sources]
        path = tmp_path / "mix.yaml"
        path.write_text(yaml.safe_dump({"sources": rows, **more}))
        return str(path)

    return write


def test_the_file_holds_the_scheduled_records_with_their_images(write_mix, tmp_path):
    """
    Ratios exact, no record twice, images found from the file's own folder; another epoch, another
    mix.
    """
    path = write_mix({"of": "a", "ratio": 3}, {"of": "b", "ratio": 1})
    output = tmp_path / "out" / "deep" / "mix.jsonl"

    materialise(path, output, seed=1, epoch=0)

    records = [json.loads(line) for line in output.read_text().splitlines()]
    from packplan.adapters.config.run import load_mixes

    drawn = [sum(record["from"] == name for record in records) for name in "ab"]
    assert quotas(load_mixes(path).at(0), [30, 12]) == drawn == [30, 10]
    assert 40 == len({(record["from"], record["number"]) for record in records})
    for record in records:
        for image in record.get("images", ()):
            assert record["from"].encode() == (output.parent / image).read_bytes()
    assert 2 >= sum("images" not in record for record in records) >= 1
    first = output.read_bytes()
    materialise(path, output, seed=1, epoch=0)
    assert first == output.read_bytes()
    materialise(path, output, seed=1, epoch=1)
    assert first != output.read_bytes()


@pytest.mark.parametrize(
    ("sources", "more", "says"),
    [
        ([{"of": "a"}], {}, r"sources\[0\].*either a ratio or a count"),
        ([{"of": "a", "ratio": 1, "wieght": 2}], {}, "wieght"),
        ([{"of": "b", "count": 13}], {}, "has 12 samples: lower it, or set replacement: true"),
        ([{"of": "a", "ratio": 1}, {"of": "b", "ratio": 1}], {"samples_per_epoch": 40}, "but its share is 20"),
        ([], {}, "name at least one"),
        ([{"of": "a", "ratio": "often"}], {}, "has to be a number"),
    ],
)
def test_what_is_wrong_with_a_mix_is_said(write_mix, tmp_path, sources, more, says):
    """And nothing is written."""
    with pytest.raises(ConfigError, match=says):
        materialise(write_mix(*sources, **more), tmp_path / "mix.jsonl", seed=0, epoch=0)

    assert not (tmp_path / "mix.jsonl").exists()


def test_what_names_no_media_is_written_as_it_is(tmp_path):
    """Parts of messages may have any shape: what is wrong with one is said where it is read."""
    record = {"messages": ["none", {"content": ["text", None, {"type": "text", "text": "more"}]}]}

    assert record == rebased(record, tmp_path / "a", tmp_path / "b")


def test_a_source_is_never_overwritten(write_mix, tmp_path):
    """Nor a folder taken for a file, nor a pipe or a device replaced by one."""
    path = write_mix({"of": "a", "ratio": 1})
    before = (tmp_path / "a" / "data.jsonl").read_bytes()

    with pytest.raises(ConfigError, match="is one of the sources"):
        materialise(path, tmp_path / "b" / ".." / "a" / "data.jsonl", seed=0, epoch=0)
    with pytest.raises(ConfigError, match="is a folder"):
        materialise(path, tmp_path, seed=0, epoch=0)
    with pytest.raises(ConfigError, match=r"--output: .*cannot be written"):
        materialise(path, tmp_path / "a" / "data.jsonl" / "mix.jsonl", seed=0, epoch=0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--output: .*pipe cannot be written: it is a pipe or a device"):
        materialise(path, tmp_path / "pipe", seed=0, epoch=0)

    assert (tmp_path / "pipe").is_fifo()
    assert before == (tmp_path / "a" / "data.jsonl").read_bytes()


@pytest.mark.slow
def test_a_static_run_trains_from_it(write_mix, tmp_path, capfd):
    """By the command that the refusal of a mix names."""
    from packplan.app.plan.__main__ import main

    path = write_mix({"of": "a", "count": 5})

    assert 0 == main(["materialise", path, "-o", str(tmp_path / "mix.jsonl"), "--epoch", "3"])
    assert "5 of 5 samples from" in capfd.readouterr().err
    assert 5 == len((tmp_path / "mix.jsonl").read_text().splitlines())
    with pytest.raises(SystemExit, match="2"):
        main(["materialise", path, "-o", str(tmp_path / "mix.jsonl"), "--epoch", "-1"])
