"""Measuring and planning before a run: taken over by other runs, and found stale."""

import json
import os
import re
import shutil
from typing import Any

import pytest

from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.app.plan import __main__ as plan
from tests.e2e.ready import artefacts_of, chats
from tests.processes import finished
from tests.records import write_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def run(capfd):
    """Return a function that runs a command, checks its exit status, and returns its output."""

    def main(command: str, path: object, *options: object, status: int = 0) -> Any:
        capfd.readouterr()
        assert status == plan.main([command, *map(str, (path, *options))])
        return capfd.readouterr()

    return main


@pytest.mark.usefixtures("encodes_again")
def test_ranks_store_the_same_bytes_as_one_process_alone(  # noqa: PLR0917  # fixtures
    server, write_run, run, few_scenes, demo, tmp_path, shortcuts
):
    """Rank 0 measures, the other waits. A warm start then measures nothing."""
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(demo / "data" / "val.jsonl")}
    alone, together = write_run(name="alone", custom=custom), write_run(name="together", custom=custom)
    run("build", alone, "--world-size", 4)
    ranks = server.ranks(2, plan.main, ["build", str(together), "--world-size", "4"], folder=tmp_path / "logs")

    assert [0, 0] == finished(ranks)
    found = artefacts_of(tmp_path / "together")
    assert artefacts_of(tmp_path / "alone") == found
    assert {"train/plan_ws4.json", "eval/plan_ws4.json"} < set(found)
    probe = json.loads(found["train/lengths.json"])["probe"]
    assert [0, 1] == probe["epochs"]
    assert {0, 11} < set(probe["samples"])
    shortcuts.clear()
    run("build", together)
    assert [] == shortcuts


def test_lengths_are_taken_over_from_another_run(write_run, run, tmp_path, shortcuts):
    """With another budget, nothing is measured; with another template, nothing is taken."""
    run("build", write_run("qwen3", name="one"))
    shortcuts.clear()
    lengths_from = {"packing_lengths_from": str(tmp_path / "one")}

    run("build", write_run("qwen3", name="two", template={"max_length": 200}, training=lengths_from))
    one, two = artefacts_of(tmp_path / "one"), artefacts_of(tmp_path / "two")
    for name in ("train/lengths.json", "train/lengths.bin", "train/images.bin"):
        assert one[name] == two[name]
    assert one["train/raw_plan.json"] != two["train/raw_plan.json"]

    other = write_run("qwen3", name="three", template={"system": "You look away."}, training=lengths_from)
    said = run("build", other, status=2).err
    assert "template.system was 'You look at scenes.', now 'You look away.'" in said
    assert "remove training.packing_lengths_from" in said
    assert [] == shortcuts


def test_samples_that_encode_otherwise_in_another_process_are_refused(write_run, run, monkeypatch):
    main, plain = os.getpid(), SwiftEncoder.apply_template

    def encode(samples, index, sample):
        encoded = plain(samples, index, sample)
        return encoded if os.getpid() == main else {**encoded, "length": encoded["length"] + 1}

    monkeypatch.undo()  # which lets other tests encode again in this process
    monkeypatch.setattr(SwiftEncoder, "apply_template", encode)
    assert "in another process and epoch 1" in run("build", write_run("qwen3"), status=2).err


def test_what_training_refuses_is_refused_before_measuring(write_run, run, shortcuts):
    """A batch that the ranks do not divide, an attention that is not installed."""
    path = write_run("qwen3", training={"effective_batch_size": 8})
    assert "not divisible by 3 ranks; set" in run("build", path, "--world-size", 3, status=2).err
    flash = write_run("qwen3", model={"attn_impl": "flash_attention_2"})
    assert "the package flash-attn is not installed" in run("build", flash, status=2).err
    assert [] == shortcuts


def test_a_build_says_the_steps_the_place_of_the_plan_and_what_to_type_next(write_run, run, demo, tmp_path):
    """For the ranks that it was built for; also that samples exceed the model's positions."""
    path = write_run("qwen3", training={"effective_batch_size": 8})

    def built(path, *words):
        printed = run("build", path, *words).err
        return " ".join(printed.replace(" \\\n", " ").split())

    steps = built(path, "--world-size", 2)

    assert re.search(r"\d+ steps an epoch, \d+ in all on 2 ranks; 8 packs a step, 4 on each rank", steps)
    assert f"the plan is in {tmp_path / 'run' / 'static_packing'}: to see it packplan plan show {path} " in steps
    assert steps.endswith(f"to train torchrun --nproc-per-node 2 -m packplan.app.sft {path}")

    assert built(path).endswith(f"to train packplan sft {path}")
    shared = write_run("qwen3", name="shared", training={"effective_batch_size": 1, "sequence_parallel_size": 2})
    told = built(shared)
    assert "on 1 rank; 1 pack a step" in told
    assert "to train torchrun --nproc-per-node 2 " in told
    shutil.copytree(demo / "models" / "qwen3", model := tmp_path / "short" / "qwen3")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(re.sub(r'("max_position_embeddings": )\d+', r"\g<1>9", config))
    told = built(path, f"model.model={model}", f"training.output_dir={tmp_path / 'short'}")
    assert re.search(r"warning: train: \d+ of \d+ samples have more tokens than the 9 positions", told)


def test_bad_records_are_left_out_by_every_command(write_run, run, tmp_path):
    """The others are planned; `show` and `verify` know them; one that is fixed is a sample."""
    good = chats(30)
    rows = [*good[:4], {"query": "no answer"}, *good[4:20], {"messages": [], "id": 1}, *good[20:]]
    data = write_lines(tmp_path / "mixed.jsonl", rows)
    path = write_run("qwen2", custom={"train_jsonl": str(data), "on_bad_record": "skip", "max_bad_share": "0.1"})
    run("build", path)

    manifest = json.loads(artefacts_of(tmp_path / "run")["train/lengths.json"])
    bad = [(one["index"], one["where"]) for one in manifest["bad_records"]]
    assert [(4, f"{data}, line 5"), (21, f"{data}, line 22")] == bad
    assert "2 of 32 records cannot become samples and are left out: " in run("show", path, "--json").out
    everything = run("show", path, "--all").out
    assert all(f"left out: {one['where']}: {one['reason'][:20]}" in everything for one in manifest["bad_records"])
    assert "line 6" in run("show", path, "--sample", 5).out
    assert f"record 4 cannot become a sample: {data}, line 5: " in run("show", path, "--sample", 4, status=2).err
    run("verify", path, "--samples", 30)
    write_lines(data, [*rows[:4], good[0], *rows[5:]])
    assert "line 5: was bad, and has changed" in run("verify", path, status=3).out
    run("build", path)
    run("verify", path, "--samples", 31)


def test_all_bad_records_are_listed_by_their_reason(write_run, run, tmp_path, shortcuts):
    """None stops the listing; a fixed file is planned, and of it only what changed is measured."""
    good = chats(12)
    rows = [*good[:4], *({"query": f"no answer {number}"} for number in range(7)), *good[4:], {"messages": [], "id": 1}]
    data = write_lines(tmp_path / "mixed.jsonl", rows)
    path = write_run("qwen2", custom={"train_jsonl": str(data)})
    listed = run("build", path, "--list-failures", status=2)

    head, many, places, one, last = listed.out.splitlines()
    assert "train: 8 bad records" == head
    assert many.startswith("7 records: ")
    assert f"  {'; '.join(f'{data}, line {line}' for line in range(5, 10))}; and 2 more" == places
    assert one.startswith("1 record: ")
    assert f"  {data}, line {len(rows)}" == last
    assert "custom.on_bad_record: skip" in listed.err
    assert f"{data}, line 5" in run("build", path, status=2).err
    assert "--allow-left-out limits the rows of ms-swift" in run("build", path, "--allow-left-out", "5", status=2).err
    write_lines(data, [*good[:4], *good[:7], *good[4:], good[0]])
    assert "train: 0 bad records\n" == run("build", path, "--list-failures").out
    every = [{"query": "no answer"}] * 3
    none = write_run("qwen2", name="none", custom={"train_jsonl": str(write_lines(tmp_path / "none.jsonl", every))})
    assert "train: 3 bad records\n3 records: " in run("build", none, "--list-failures", status=2).out


def test_naming_sources_measures_nothing_and_plans_nothing(write_run, run, tmp_path, shortcuts):
    """Until then a file has its entry's last part for a name; all else stays, byte for byte."""
    texts = [{"text": "red square " * (1 + n % 5)} for n in range(9)]
    for name, rows in {"a1.jsonl": chats(7), "a2.jsonl": chats(5, first=7), "b.jsonl": texts}.items():
        write_lines(tmp_path / name, rows)
    entries = [str(tmp_path / "a*.jsonl"), str(tmp_path / "b.jsonl")]
    kept = []
    for names in ({}, {entries[0]: "chats", entries[1]: "texts"}):
        path = write_run("qwen2", custom={"train_jsonl": entries, "source_names": names})
        run("build", path)
        assert [] == shortcuts or not kept
        shortcuts.clear()
        sources = json.loads(run("show", path, "--json").out)["splits"]["train"]["sources"]
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


def test_the_text_of_a_sample_is_shown_with_what_of_it_is_trained(write_run, run, tmp_path):
    """Only what the assistant says is; all of it together is what the model gets."""
    data = write_lines(tmp_path / "chats.jsonl", chats(4))
    path = write_run("qwen2", custom={"train_jsonl": str(data)})
    run("build", path)

    runs = json.loads(run("show", path, "--sample", 2, "--text", "--json").out)["text"]

    texts = {trained: "".join(one["text"] for one in runs if one["trained"] == trained) for trained in (True, False)}
    for words, trained in (("blue circle", True), ("say 2", False)):
        assert words in texts[trained]
        assert words.split()[0] not in texts[not trained]
    shown = run("show", path, "--sample", 2, "--text").out.splitlines()
    assert any(line.startswith('  trained "blue circle') for line in shown)
    write_lines(data, chats(4)[::-1])
    said = run("show", path, "--sample", 2, "--text", status=2).err
    assert "record 2 has changed or moved since it was measured, or its digest is not stored" in said
