"""
Measuring and planning before a run: by one process or several, taken over by other runs, and found
stale.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.app.plan import __main__ as plan
from tests.processes import finished

pytestmark = pytest.mark.slow


def artefacts_of(run: Path) -> dict[str, bytes]:
    """Return every file that a run's planning left, but its locks."""
    folder = run / "static_packing"
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refuse_to_measure(monkeypatch) -> None:
    monkeypatch.setattr(SwiftMeasurer, "outcome", lambda *_, **__: pytest.fail("a sample was measured"))


def test_ranks_measure_the_same_bytes_together_as_one_process_alone(server, write_run, demo, tmp_path, monkeypatch):
    """
    Slices of two ranks, put together; nothing of them stays. A warm start then measures nothing.
    """
    val = {"val_jsonl": str(demo / "data" / "val.jsonl")}
    alone, together = write_run(name="alone", custom=val), write_run(name="together", custom=val)
    assert 0 == plan.main(["build", str(alone), "--world-size", "4"])
    ranks = server.ranks(2, plan.main, ["build", str(together), "--world-size", "4"], folder=tmp_path / "logs")

    assert [0, 0] == finished(ranks)
    found = artefacts_of(tmp_path / "together")
    assert artefacts_of(tmp_path / "alone") == found
    assert {"train/plan_ws4.json", "eval/plan_ws4.json"} < set(found)
    probe = json.loads(found["train/lengths.json"])["probe"]
    assert [0, 1] == probe["epochs"]
    assert {0, 39} < set(probe["samples"])
    refuse_to_measure(monkeypatch)
    assert 0 == plan.main(["build", str(together)])


def test_lengths_are_taken_over_from_another_run(write_run, tmp_path, monkeypatch, capfd):
    """With another budget, nothing is measured; with another template, nothing is taken."""
    assert 0 == plan.main(["build", str(write_run("qwen3", name="one"))])
    refuse_to_measure(monkeypatch)
    lengths_from = {"packing_lengths_from": str(tmp_path / "one")}

    two = write_run("qwen3", name="two", template={"max_length": 200}, training=lengths_from)
    assert 0 == plan.main(["build", str(two)])
    one, two = artefacts_of(tmp_path / "one"), artefacts_of(tmp_path / "two")
    for name in ("train/lengths.json", "train/lengths.bin", "train/images.bin"):
        assert one[name] == two[name]
    assert one["train/raw_plan.json"] != two["train/raw_plan.json"]

    other = write_run("qwen3", name="three", template={"system": "You look away."}, training=lengths_from)
    capfd.readouterr()
    assert 2 == plan.main(["build", str(other)])
    said = capfd.readouterr().err
    assert "template.system: stored 'You look at scenes.', now 'You look away.'" in said
    assert "remove training.packing_lengths_from" in said


def test_all_bad_records_are_listed_in_one_go(write_run, demo, tmp_path, capfd):
    """Each with file, line and reason, damaged pixels too; nothing is stored."""
    (tmp_path / "torn.jpg").write_bytes((next((demo / "data").rglob("*.jpg"))).read_bytes()[:600])
    good = {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red dot"}]}
    torn = {"messages": [{"role": "user", "content": "<image>what?"}, good["messages"][1]], "images": ["torn.jpg"]}
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([json.dumps(good), "{", json.dumps(good), json.dumps(torn), json.dumps({"id": 1})]))
    path = write_run(custom={"train_jsonl": str(data)})
    capfd.readouterr()

    assert 2 == plan.main(["build", str(path), "--list-failures"])

    said = capfd.readouterr()
    assert [f"{data}, line {line}" for line in (2, 4, 5)] == [line.split(":")[0] for line in said.out.splitlines()]
    assert "3 of 5 records cannot become samples" in said.err
    assert not (tmp_path / "run" / "static_packing").exists()


def test_an_image_replaced_after_measuring_is_found_at_the_next_start(write_run, tmp_path, capfd):
    """The other image has the same width and height, so that no length shows it."""
    records = []
    for number in range(5):
        Image.fromarray(np.full((60, 80, 3), number, dtype=np.uint8)).save(tmp_path / f"{number}.png")
        messages = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "red dot"}]
        records.append(json.dumps({"messages": messages, "images": [f"{number}.png"]}))
    (tmp_path / "data.jsonl").write_text("\n".join(records))
    custom = {"train_jsonl": str(tmp_path / "data.jsonl")}
    path = str(write_run(custom=custom, training={"packing_drop_last": False}))
    assert 0 == plan.main(["build", path])

    (tmp_path / "3.png").write_bytes((tmp_path / "4.png").read_bytes())
    capfd.readouterr()
    assert 2 == plan.main(["build", path])
    assert "image 0 of sample 3 is not the one that was measured: head" in capfd.readouterr().err


def test_samples_that_encode_otherwise_in_another_process_are_refused(write_run, monkeypatch, capfd):
    """Training's loaders are other processes."""
    main, plain = os.getpid(), SwiftEncoder.encode_messages

    def encode(samples, index, sample):
        encoded = plain(samples, index, sample)
        return encoded if os.getpid() == main else {**encoded, "length": encoded["length"] + 1}

    monkeypatch.setattr(SwiftEncoder, "encode_messages", encode)
    assert 2 == plan.main(["build", str(write_run("qwen3"))])
    assert "in another process and epoch 1" in capfd.readouterr().err


@pytest.mark.parametrize("number", ["0", "-3", "x", "1.5"])
def test_a_world_size_is_a_whole_number(number, capfd):
    """Status 2, and what it has to be."""
    with pytest.raises(SystemExit, match="2"):
        plan.main(["build", "run.yaml", f"--world-size={number}"])
    assert f"is {number}, but has to be a whole number of at least 1" in capfd.readouterr().err


def test_a_split_that_the_run_does_not_have_is_named(write_run, capfd):
    """And the key that would give it."""
    assert 2 == plan.main(["build", str(write_run()), "--split", "eval"])
    assert "custom.val_jsonl" in capfd.readouterr().err


def test_bad_records_are_skipped_named_and_never_trained(write_run, execute, tmp_path, capsys):
    """On every start; `show` and `verify` know them; one that is fixed becomes a sample."""
    good = [{"query": f"say {n}", "response": "blue circle " * (1 + n % 7)} for n in range(30)]
    rows = [*good[:4], {"query": "no answer"}, *good[4:20], {"messages": [], "id": 1}, *good[20:]]
    data, clean = tmp_path / "mixed.jsonl", tmp_path / "good.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    clean.write_text("".join(f"{json.dumps(row)}\n" for row in good))
    skip = {"train_jsonl": str(data), "on_bad_record": "skip", "max_bad_share": "0.1"}
    path = write_run("qwen2", custom=skip, training={"max_steps": 2})

    trained, again = execute(path), execute(path)
    plain = execute(write_run("qwen2", "clean", custom={"train_jsonl": str(clean)}, training={"max_steps": 2}))

    indices = np.delete(np.arange(len(rows)), [4, 21])
    assert plain.planned["train"].raw.with_indices(indices) == trained.planned["train"].raw
    assert trained.planned["train"].checksum == again.planned["train"].checksum
    assert plain.planned["train"].data_digest == trained.planned["train"].data_digest
    manifest = json.loads((tmp_path / "run" / "static_packing" / "train" / "lengths.json").read_text())
    assert [(4, f"{data}, line 5"), (21, f"{data}, line 22")] == [
        (one["index"], one["where"]) for one in manifest["bad_records"]
    ]
    capsys.readouterr()
    assert 0 == plan.main(["show", str(path), "--json"])
    assert "2 of 32 records cannot become samples and are left out: " in capsys.readouterr().out
    assert 0 == plan.main(["show", str(path), "--sample", "5"])
    assert "line 6" in capsys.readouterr().out
    assert 2 == plan.main(["show", str(path), "--sample", "4"])
    assert f"record 4 is no sample: {data}, line 5: " in capsys.readouterr().err
    assert 0 == plan.main(["verify", str(path), "--samples", "30"])
    data.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows[:4], good[0], *rows[5:]]))
    assert 3 == plan.main(["verify", str(path)])
    assert "line 5: changed, and was bad" in capsys.readouterr().out
    assert 0 == plan.main(["build", str(path)])
    assert 0 == plan.main(["verify", str(path), "--samples", "31"])


def test_naming_sources_measures_nothing_and_plans_nothing(write_run, tmp_path, monkeypatch, capsys):
    """
    Files have the last part of their entry for a name until they are given one; all that is stored
    but the names stays, byte for byte.
    """
    chats = [{"query": f"say {n}", "response": "blue circle " * (1 + n % 7)} for n in range(12)]
    texts = [{"text": "red square " * (1 + n % 5)} for n in range(9)]
    for name, rows in {"a1.jsonl": chats[:7], "a2.jsonl": chats[7:], "b.jsonl": texts}.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    entries = [str(tmp_path / "a*.jsonl"), str(tmp_path / "b.jsonl")]
    kept = []
    for names in ({}, {entries[0]: "chats", entries[1]: "texts"}):
        path = write_run("qwen2", custom={"train_jsonl": entries, "source_names": names})
        assert 0 == plan.main(["build", str(path)])
        refuse_to_measure(monkeypatch)
        capsys.readouterr()
        assert 0 == plan.main(["show", str(path), "--json"])
        sources = json.loads(capsys.readouterr().out)["splits"]["train"]["sources"]
        artefacts = artefacts_of(tmp_path / "run")
        manifest = json.loads(artefacts.pop("train/lengths.json"))
        del manifest["manifest_sha256"], manifest["files"]
        kept.append((artefacts, manifest))
        expected = [*names.values()] or ["a*.jsonl", "b.jsonl"]
        assert expected == [one["name"] for one in sources]
        assert [12, 9] == [one["num_samples"] for one in sources]
        assert [["query, response"] * 2, ["text"]] == [[file["shape"] for file in one["files"]] for one in sources]
        assert all(one["supervised_tokens"] for one in sources)
    assert kept[0] == kept[1]


def test_the_text_of_a_sample_is_shown_with_what_of_it_is_trained(write_run, tmp_path, capsys):
    """Only what the assistant says is; all of it together is what the model gets."""
    data = tmp_path / "chats.jsonl"
    rows = [{"query": f"say {n}", "response": "blue circle"} for n in range(4)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = write_run("qwen2", custom={"train_jsonl": str(data)})
    assert 0 == plan.main(["build", str(path)])
    capsys.readouterr()

    assert 0 == plan.main(["show", str(path), "--sample", "2", "--text", "--json"])
    runs = json.loads(capsys.readouterr().out)["text"]

    trained = "".join(run["text"] for run in runs if run["trained"])
    read = "".join(run["text"] for run in runs if not run["trained"])
    assert "blue circle" in trained
    assert "say 2" in read
    assert "say" not in trained
    assert "blue" not in read
    assert 0 == plan.main(["show", str(path), "--sample", "2", "--text"])
    assert any(line.startswith('  trained "blue circle') for line in capsys.readouterr().out.splitlines())
    assert 2 == plan.main(["show", str(path), "--text"])
    assert "--text: is of one sample" in capsys.readouterr().err
    data.write_text(f"{json.dumps(rows[0])}\n")
    assert 2 == plan.main(["show", str(path), "--sample", "0", "--text"])
    assert "the data have 1 record now, but 4 were measured" in capsys.readouterr().err


def test_failures_are_written_whole_whatever_is_printed(write_run, tmp_path, capsys, monkeypatch):
    """Beyond a hundred too; into no file that is read, and none is left where the writing stops."""
    rows = [{"query": "say", "response": "blue"}, *({"query": f"no answer {n}"} for n in range(103)), {"id": 7}]
    data, good, bad = (tmp_path / name for name in ("mixed.jsonl", "good.jsonl", "bad.jsonl"))
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = str(write_run("qwen2", custom={"train_jsonl": str(data)}))
    options = ["--list-failures", "--write-good", str(good), "--write-failures", str(bad)]

    assert 2 == plan.main(["build", path, *options])

    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [f"{data}, line {line}" for line in range(2, 102)] == [line.split(":")[0] for line in lines[:100]]
    assert "… and 4 more; all by reason, without what each record says:" == lines[100]
    assert ["103", "1"] == [line.split()[0] for line in lines[101:]]
    assert "104 of 105 records cannot become samples" in said.err
    written = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [f"{data}, line {line}" for line in range(2, 106)] == [one["where"] for one in written]
    assert {("train", "split, where, reason")} == {(one["split"], ", ".join(one)) for one in written}
    assert [rows[0]] == [json.loads(line) for line in good.read_text().splitlines()]
    assert 2 == plan.main(["build", path, "--list-failures", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (105, 104, 100) == (document["records"], document["num_failures"], len(document["failures"]))
    assert [103, 1] == list(document["reasons"].values())

    monkeypatch.setattr("packplan.app.plan.building.failures", lambda *_: 1 / 0)
    os.mkfifo(tmp_path / "pipe")
    for file in (data, tmp_path, good, tmp_path / "gone" / "bad.jsonl", tmp_path / "pipe"):
        assert 2 == plan.main(["build", path, *options[:3], "--write-failures", str(file)])
        assert f"--write-failures: {file} " in capsys.readouterr().err
    assert 2 == plan.main(["build", path, "--write-failures", str(bad)])
    assert "--write-failures: goes with --list-failures" in capsys.readouterr().err
    before = {file: file.stat() for file in tmp_path.iterdir()}
    with pytest.raises(ZeroDivisionError):
        plan.main(["build", path, *options])
    assert before.keys() == set(tmp_path.iterdir())
    assert before[bad] == bad.stat()
    assert (tmp_path / "pipe").is_fifo()


def test_failures_are_listed_for_programs_and_the_rest_is_written(write_run, tmp_path, capsys):
    """The file that is written has no failures; no data file is written over."""
    rows = [{"query": "say", "response": "blue"}, {"query": "no answer"}, {"query": "say", "response": "red"}]
    data, good = tmp_path / "mixed.jsonl", tmp_path / "good" / "a.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    good.parent.mkdir()
    path = str(write_run("qwen2", custom={"train_jsonl": str(data)}))

    assert 2 == plan.main(["build", path, "--list-failures", "--json", "--write-good", str(good)])

    document = json.loads(capsys.readouterr().out)
    assert 3 == document["records"]
    assert [f"{data}, line 2"] == [one["where"] for one in document["failures"]]
    assert [rows[0], rows[2]] == [json.loads(line) for line in good.read_text().splitlines()]
    assert 0 == plan.main(["build", path, "--list-failures", f"custom.train_jsonl={good}"])
    assert 2 == plan.main(["build", path, "--list-failures", "--write-good", str(data)])
    assert 2 == plan.main(["build", path, "--write-good", str(good)])
    assert rows == [json.loads(line) for line in data.read_text().splitlines()]
