"""Commands that look at plans, over stores made for it: what they say, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import attrs
import numpy as np
import pytest
import yaml

from packplan.app.plan import __main__ as command
from packplan.app.plan import show
from packplan.app.plan.explain import as_text
from packplan.app.planning.schedule import split_schedule
from packplan.app.wiring.stores import read_config, split_folder
from packplan.core.align import align_plan
from packplan.core.checksum import plan_checksum
from packplan.core.equality import PackingVerdict, ProbeResult
from packplan.core.inspection import plan_difference, summarise, summarise_schedule
from packplan.core.plan import build_raw_plan
from packplan.core.samples import DataFile
from packplan.core.work import SampleWorks, WorkModel
from tests.stored import LENGTHS, store_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    """
    Return a function that writes a run's YAML and what building it would store; see `tests.stored`.
    """
    return partial(store_run, tmp_path)


@pytest.fixture
def said(capfd):
    """Return a function that runs a command that has to succeed, and returns what it printed."""

    def run(*arguments) -> str:
        status = command.main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        assert 0 == status, printed.err
        return printed.out

    return run


def test_show_says_what_core_says(store, said):
    """The same numbers as from a plain list of lengths, as one document."""
    path = store(eval_lengths=LENGTHS[:9])
    document = json.loads(said("show", path, "--json", "--world-size", "2"))["splits"]
    config, plan = read_config(path), build_raw_plan(LENGTHS, packing_length=80)
    works = SampleWorks.from_lengths(WorkModel.estimated({}).trained(), LENGTHS)
    aligned = align_plan(plan, world_size=2, dataloader_drop_last=False)
    schedule = split_schedule(config, "train", aligned, plan.packs.loads(works.flops))

    assert ["train", "eval"] == list(document)
    nothing = [0] * len(LENGTHS)
    assert attrs.asdict(summarise(plan, LENGTHS, supervised=nothing)) == document["train"]["plan"]
    assert attrs.asdict(summarise_schedule(plan, LENGTHS, schedule, works=works)) == document["train"]["schedule"]
    assert plan_checksum(plan.packs) == document["train"]["checksums"]["raw_plan"]
    evaluated = build_raw_plan(LENGTHS[:9], packing_length=80, drop_last=False)
    assert attrs.asdict(summarise(evaluated, LENGTHS[:9], supervised=nothing[:9])) == document["eval"]["plan"]
    assert ["eval"] == list(json.loads(said("show", path, "--json", "--split", "eval"))["splits"])


def test_show_takes_the_most_ranks_that_were_built_for(store, said):
    """Another number of ranks is looked at without building."""
    path = store(world_sizes=(1, 4, 2))

    assert 4 == json.loads(said("show", path, "--json"))["splits"]["train"]["schedule"]["world_size"]
    other = said("show", path, "--json", "--world-size", "1")
    assert 1 == json.loads(other)["splits"]["train"]["schedule"]["world_size"]


def test_a_plan_is_broken_down_by_source(store, said, tmp_path):
    """Files of one source together, with their shapes, in the document, the table and the page."""
    files = [
        DataFile("a.jsonl", "chats", "text", 20),
        DataFile("b.jsonl", "captions[red]", "dense captions", 15),
        DataFile("c.csv", "chats", "query, response", len(LENGTHS) - 35),
    ]
    path = store(files=files)
    train = json.loads(said("show", path, "--json"))["splits"]["train"]

    assert ["chats", "captions[red]"] == [one["name"] for one in train["sources"]]
    chats, captions = train["sources"]
    assert [attrs.asdict(file) for file in files[::2]] == chats["files"]
    assert sum(LENGTHS[20:35]) == captions["num_tokens"]
    assert len(LENGTHS) == chats["num_samples"] + captions["num_samples"]
    assert train["plan"]["planned_tokens"] == chats["planned_tokens"] + captions["planned_tokens"]
    table = said("show", path, "--all")
    assert re.search(r"chats +│ +45 │", table)
    assert "dense captions" in table
    assert "[red]" in table
    assert re.search(rf"lengths +│ +{captions['length_quantiles'][1]} │ tokens, the median", table)
    assert 2 == len(re.findall("by powers of", table))
    said("report", path, "-o", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "captions" in page
    assert "query, response / text" in page
    assert [] == json.loads(said("show", store(name="older"), "--json"))["splits"]["train"]["sources"]


def test_what_is_trained_is_green_on_a_terminal_alone(monkeypatch):
    """NO_COLOR wants none; elsewhere than on a terminal there is none; the words stay the same."""
    runs = [{"trained": False, "text": "ask"}, {"trained": True, "text": "say\x1b"}]
    sample = {"sample": 0, "place": "packed", "length": 2, "supervised": 1, "cut": False, "record": None}
    explanation = {**sample, "image_sizes": [], "text": runs}

    def shown(**environment):
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            monkeypatch.setenv(name, value)
        return [*as_text(explanation, emphasise=show.in_green)][-2:]

    plain = ['          "ask"', '  trained "say\\u001b"']
    assert plain == shown() == shown(FORCE_COLOR="1", NO_COLOR="1") == shown(FORCE_COLOR="1", TERM="dumb")
    assert [plain[0], '  trained \x1b[32m"say\\u001b"\x1b[39m'] == shown(FORCE_COLOR="1")


def test_show_is_a_table_for_people(store, said):
    """
    The dozen lines that decide something: losses, packs and their bound, steps, ranks, attention.
    With --all, every figure, and the digests.
    """
    path = store()
    short, everything = said("show", path), said("show", path, "--all")

    for words in ("samples", "no plan has fewer than", "fill", "optimizer steps", "imbalance", "raw_plan "):
        assert words in short
    for words in ("above the lower bound", "of random packs", "aligned_plan ", "fingerprint of the plan "):
        assert words in everything
        assert words not in short
    (table,) = re.findall("┌.*?┘", said("show", path, "--split", "train"), re.DOTALL)
    assert len(re.findall("^│ +[a-z]", table, re.MULTILINE)) <= 12
    alone = said("show", path, "--world-size", "1")
    assert "imbalance" not in alone


@pytest.mark.covers
@pytest.mark.parametrize(
    ("strategy", "attn_impl", "expected"),
    [("varlen", "auto", "varlen"), (None, "auto", "eager"), ("own", "sdpa", "sdpa"), (None, "varlen", None)],
)
def test_show_says_which_attention_training_takes(  # noqa: PLR0917  # fixtures
    store, said, tmp_path, strategy, attn_impl, expected
):
    """And why, with the verdict's numbers; what cannot be taken is a warning."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    verdict = PackingVerdict(
        "llama", strategy, attn_impl if attn_impl != "auto" else "varlen", "sdpa" if strategy else "eager",
        split=(), follows_rows=False, measured=ProbeResult(0 if strategy else 0.25, 3e-7), reason="it was looked at",
    )  # fmt: skip
    path = store(model={"model": str(tmp_path), "attn_impl": attn_impl}, verdict=verdict)

    shown = json.loads(said("show", path, "--json"))["splits"]["train"]
    table = " ".join(said("show", path, "--all").replace("│", " ").split())

    assert PackingVerdict.from_dict(shown["verdict"]) == verdict
    assert "it was looked at (isolation" in table
    assert (strategy is None) == any("it was looked at" in warning for warning in shown["warnings"])
    if expected is None:
        assert shown["attention"] is None
        assert any("attn_impl varlen cannot be taken" in warning for warning in shown["warnings"])
    else:
        assert expected == shown["attention"]["name"]
        assert shown["attention"]["reason"] in table


def test_show_asks_for_the_verdict_of_the_model_as_it_is(store, said, tmp_path):
    """Another config.json than the one that was asked is a warning."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    verdict = PackingVerdict("llama", "varlen", "varlen", "sdpa", (), False, ProbeResult(0, 0), "it passes")  # noqa: FBT003
    path = store(model={"model": str(tmp_path)}, verdict=verdict)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "sliding_window": 8}))

    shown = json.loads(said("show", path, "--json"))["splits"]["train"]

    assert shown["attention"] is shown["verdict"] is None
    assert any(
        "no stored verdict says whether samples may share the model's packs" in warning for warning in shown["warnings"]
    )
    assert any(
        "cannot be said" in w for w in json.loads(said("show", store(), "--json"))["splits"]["train"]["warnings"]
    )


def test_show_warns_of_what_training_would_refuse_or_do_otherwise(store, said):
    """Another system prompt, another ratio, a ragged window, dropped tokens, an unchecked store."""
    path = store(repeatability=False, training={"packing_min_fill_ratio": 1.0, "packing_allow_single_long": False})
    document = yaml.safe_load(path.read_text())
    document["template"]["system"] = "Another."
    document["training"]["packing_min_fill_ratio"] = 0.5
    document["training"]["effective_batch_size"] = 32
    path.write_text(yaml.safe_dump(document))

    warnings = "\n".join(json.loads(said("show", path, "--json"))["splits"]["train"]["warnings"])

    assert "template.system: stored None, now 'Another.'" in warnings
    assert "training would plan again: min_fill_ratio: stored '1.0', now '0.5'" in warnings
    assert "filled below 1.0 are dropped" in warnings
    assert "are skipped" in warnings
    assert "not yet checked" in warnings
    assert "the last optimizer step of each epoch sees" in warnings
    assert "warning: " in said("show", path)


@pytest.mark.covers
def test_a_sample_and_a_pack_are_explained(store, said, tmp_path):
    """
    Where a sample is, when its pack is trained, and on which line it stands; text says the same.
    """
    records = "".join(f'{{"id": {number}}}\n\n' for number in range(len(LENGTHS)))
    (tmp_path / "data.jsonl").write_text(records)
    path = store()
    plan = build_raw_plan(LENGTHS, packing_length=80)
    document = json.loads(said("show", path, "--sample", "6", "--json"))

    assert ("long", 80, f"{tmp_path / 'data.jsonl'}, line 13") == (
        document["place"], document["length"], document["record"]
    )  # fmt: skip
    pack = document["pack"]
    assert (plan.packs[pack["pack"]], 1.0) == ([6], pack["fill"])
    assert pack == {
        key: value
        for key, value in json.loads(said("show", path, "--pack", pack["pack"], "--json")).items()
        if key != "split"
    }
    first = json.loads(said("show", path, "--sample", "0", "--json"))
    assert [[28, 56]] == first["image_sizes"]
    text = said("show", path, "--sample", "0")
    assert "images 28 x 56 (4 patches)" in text
    assert f"pack {first['pack']['pack']} of train" in text
    turn = first["pack"]["first_epoch"][0]
    assert f"step {turn['step']} on rank {turn['rank']}" in text
    (tmp_path / "data.jsonl").write_text("{}\n")
    assert json.loads(said("show", path, "--sample", "0", "--json"))["record"] is None


def test_a_sample_of_the_evaluation_stands_in_its_own_data(store, said, tmp_path):
    """Not in those of training, which have as many records."""
    for name, blank in (("data", ""), ("val", "\n")):
        (tmp_path / f"{name}.jsonl").write_text(f"{{}}\n{blank}" * 9)
    path = store(lengths=LENGTHS[:9], eval_lengths=LENGTHS[:9])

    document = json.loads(said("show", path, "--split", "eval", "--sample", "3", "--json"))

    assert f"{tmp_path / 'val.jsonl'}, line 7" == document["record"]


@pytest.mark.covers
def test_samples_in_no_pack_are_explained(store, said):
    """Dropped, with whom; skipped, and the key that would change it."""
    path = store(training={"packing_min_fill_ratio": 1.0, "packing_allow_single_long": False})
    plan = build_raw_plan(LENGTHS, packing_length=80, min_fill_ratio=1.0, allow_single_long=False)
    dropped = plan.dropped_packs[0]

    document = json.loads(said("show", path, "--sample", dropped[0], "--json"))
    assert ("dropped", dropped[1:]) == (document["place"], document["dropped_with"])
    assert "training.packing_min_fill_ratio" in said("show", path, "--sample", dropped[0])
    assert "training.packing_allow_single_long" in said("show", path, "--sample", plan.skipped_long[0])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--sample", "60"], "record 60 is no sample of the plan"), (["--pack", "99"], "no pack 99"),
     (["--split", "eval"], "custom.val_jsonl"), (["--world-size", "3"], "not divisible by 3 ranks")],
)  # fmt: skip
def test_what_is_not_there_is_named(store, capfd, arguments, reason):
    """Status 2."""
    assert 2 == command.main(["show", str(store()), *arguments])
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"training": {"packing_min_fill_ratio": 1.0}}, "9 packs .samples of 51 to 59 tokens. are filled below"),
        ({"template": {"max_length": 57, "truncation_strategy": "raise"}}, "2 of 9 samples are too long"),
    ],
)
def test_lengths_that_give_no_plan_are_not_sent_back_to_build(store, capfd, changes, reason):
    """What building raises is said, with its remedy: it stored the lengths, and no plan."""
    path = store(lengths=list(range(51, 60)))
    folder = split_folder(read_config(path).training.output_dir, "train")
    (folder / "raw_plan.json").unlink()
    document = yaml.safe_load(path.read_text())
    for section, keys in changes.items():
        document[section] |= keys
    path.write_text(yaml.safe_dump(document))

    assert 2 == command.main(["show", str(path)])
    said = capfd.readouterr().err
    assert re.search(reason, said), said
    assert "packplan plan build" not in said


def test_an_attention_that_training_refuses_is_a_warning(store, said, tmp_path):
    """As where flash-attn is not installed, with what to take instead."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for attn_impl, words in (
        ("flash_attention_2", "the package flash-attn is not installed; set model.attn_impl: auto"),
        ("sdpa", ""),
    ):
        path = store(model={"model": str(tmp_path), "attn_impl": attn_impl})

        shown = json.loads(said("show", path, "--json"))["splits"]["train"]

        assert bool(words) == any("training refuses the attention: " in w and words in w for w in shown["warnings"])
        assert attn_impl == shown["attention"]["name"]


@pytest.mark.parametrize("name", ["show", "whatif", "report", "diff"])
def test_misspelt_keys_are_refused_and_not_answered_for_the_defaults(store, capfd, tmp_path, name):
    """Keys of this project and of ms-swift, all at once, as training refuses them."""
    path = store()
    path.write_text(f"{path.read_text()}grpo: {{}}\n".replace("packing_min", "pakcing_min"))
    more = {"report": ["-o", str(tmp_path / "page.html")], "diff": [str(path)]}.get(name, [])

    assert 2 == command.main([name, str(path), *more, "training.bf61=true"])

    message = capfd.readouterr().err
    for said in (
        "grpo: is of reinforcement learning",
        "training.bf61 (command line: training.bf61=true): is no known key",
    ):
        assert said in message


def test_overrides_steer_what_is_shown(store, said, capfd):
    """As if the YAML said so; of both runs that differ, of the packing that would be."""
    path = store()
    document = json.loads(
        said("show", path, "--json", "training.num_train_epochs=2", "training.effective_batch_size=2")
    )
    plain = json.loads(said("show", path, "--json", "training.effective_batch_size=2", "training.num_train_epochs=1"))

    steps = [one["splits"]["train"]["schedule"]["total_steps"] for one in (plain, document)]
    assert steps[1] == 2 * steps[0]
    (planned,) = json.loads(said("whatif", path, "template.max_length=100", "--json"))["alternatives"]
    assert 100 == planned["packing_length"]
    compared = said("diff", path, path, "training.packing_algorithm=concatenative", "--json")
    assert [] == json.loads(compared)["splits"]["train"]["figures"]
    folder = read_config(path).training.output_dir
    assert 2 == command.main(["diff", folder, folder, "training.seed=1"])
    assert "overrides a key of a YAML, but A and B are folders" in capfd.readouterr().err


def test_what_is_not_built_is_named(store, capfd):
    """
    No lengths, not all lengths, or no plan, or a plan of other lengths; with the command that
    builds.
    """
    path = store()
    folder = split_folder(read_config(path).training.output_dir, "train")
    for change, reason in (
        (lambda: store(measured=30), "the lengths of 30 of 60 records"),
        ((folder / "lengths.json").unlink, "holds no lengths"),
        (lambda: store(world_sizes=()) and (folder / "raw_plan.json").unlink(), "but no plan"),
    ):
        change()

        assert 2 == command.main(["show", str(path)])
        assert re.search(f"{reason}.*packplan plan build", capfd.readouterr().err), reason
    store(name="other", lengths=LENGTHS[1:])
    for part in (folder.parents[1].with_name("other") / "static_packing" / "train").glob("raw_plan*"):
        (folder / part.name).write_bytes(part.read_bytes())
    assert 2 == command.main(["show", str(path)])
    assert "a plan of other lengths" in capfd.readouterr().err


def test_damage_is_no_plan_to_look_at(store, capfd):
    """Status 3, from every command that reads it."""
    path = store()
    target = split_folder(read_config(path).training.output_dir, "train") / "lengths.bin"
    target.write_bytes(b"\0" + target.read_bytes()[1:])

    for arguments in (["show", path], ["whatif", path], ["diff", path, path], ["report", path, "-o", "none.html"]):
        assert 3 == command.main([str(word) for word in arguments])
        assert "lengths.bin is damaged" in capfd.readouterr().err


def test_a_streaming_run_has_no_plan(store, capfd):
    """Said with the key."""
    path = store()
    document = yaml.safe_load(path.read_text())
    document["custom"]["trainer_variant"] = "rollout"
    document["training"] |= {"packing_mode": "dynamic", "max_steps": 3}
    path.write_text(yaml.safe_dump(document))

    assert 2 == command.main(["show", str(path)])
    assert "custom.trainer_variant" in capfd.readouterr().err


def test_whatif_gives_what_building_each_would_show(store, said):
    """
    For every combination, up to the bound, which is only found at once, and to supervised tokens,
    which lengths do not say; the best of each number of ranks is marked.
    """
    path = store()
    document = json.loads(said("whatif", path, "--max-length", "100,50,80", "--world-size", "2,4", "--json"))

    found = {(one["packing_length"], one["world_size"]): one for one in document["alternatives"]}
    assert [(n, w) for n in (50, 80, 100) for w in (2, 4)] == list(found)
    for (packing_length, world_size), one in found.items():
        built = store(name=f"other{packing_length}", template={"max_length": packing_length})
        shown = json.loads(said("show", built, "--json", "--world-size", world_size))["splits"]["train"]
        assert shown["schedule"] == one["schedule"]
        quick = ("lower_bound", "bound_kind", "gap", "supervised_tokens")
        assert {k: v for k, v in shown["plan"].items() if k not in quick} == {
            k: v for k, v in one["plan"].items() if k not in quick
        }
        assert one["plan"]["lower_bound"] <= shown["plan"]["lower_bound"]
        others = [other["score"] for other in found.values() if other["world_size"] == world_size]
        assert one["best"] == (one["score"] == max(others))


def test_whatif_says_why_a_combination_has_no_plan(store, said):
    """And plans the others."""
    table = said("whatif", store(), "--max-length", "80", "--world-size", "2,3")

    assert "not divisible by 3 ranks" in table
    assert "best" in table


def test_a_plan_that_drops_much_of_the_data_is_shown_with_a_warning_and_never_the_best(store, said):
    """
    What training refuses; a share that allows it is no fault, and a single dropped pack never is.
    """
    path = store(lengths=[60] * 6 + [40] * 6, training={"packing_min_fill_ratio": 0.8})
    allowed = {"packing_min_fill_ratio": 0.8, "packing_max_dropped_share": 1}

    assert "training refuses the plan: 6 of 12 samples (of 60 tokens)" in said("show", path)
    rows = json.loads(said("whatif", path, "--max-length", "80,100", "--world-size", "2", "--json"))["alternatives"]
    assert [False, True] == [row["best"] for row in rows]
    assert re.search("6 of 12 samples.*training.packing_drop_last: false", rows[0]["problem"])
    shown = json.loads(said("show", store(name="allowed", lengths=[60] * 6 + [40] * 6, training=allowed), "--json"))
    assert not any("refuses" in line for line in shown["splits"]["train"]["warnings"])
    single = json.loads(said("show", store(name="single", lengths=[80] * 6 + [40]), "--json"))["splits"]["train"]
    assert [True] == ["1 pack filled below 0.65 is dropped" in line for line in single["warnings"] if "dropped" in line]


def test_the_longest_pack_is_named_wherever_a_plan_is_shown(store, said, tmp_path):
    """
    With the packs that exceed the length by more than a tenth, and the key that would skip them.
    """
    path = store(lengths=[*LENGTHS, 88, 89, 200])
    key = "training.packing_allow_single_long: false"
    line = (
        "train: the longest pack has 200 tokens; 2 packs, each a long sample, exceed the packing "
        "length of 80 by more than 10 %; "
    )

    assert [True] == [one.startswith(line + key) for one in _warnings_of(said, path) if "longest" in one]
    table = " ".join(said("show", path, "--all").replace("│", " ").split())
    assert "longest 200 tokens; 2 exceed 110 % of the packing length" in table
    said("report", path, "-o", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "tokens; 2 exceed 110 % of the packing length" in page
    assert line + key in page
    row = json.loads(said("whatif", path, "--json"))["alternatives"][0]["plan"]
    assert (200, 2) == (row["longest_pack"], row["oversized_packs"])
    assert key in said("whatif", path)
    for other in (
        store(name="plain"),
        store(name="skips", lengths=[*LENGTHS, 200], training={"packing_allow_single_long": False}),
    ):
        assert not [one for one in _warnings_of(said, other) if "longest" in one]
        assert key not in said("whatif", other)


def _warnings_of(said, path) -> list[str]:
    return json.loads(said("show", path, "--json"))["splits"]["train"]["warnings"]


def test_which_bound_is_shown_is_said(store, said, capfd):
    """One that a packing reaches, or a quick one where more would take long."""
    narrow = np.random.default_rng(7).normal(8192 / 5.4, 8192 / 50, 300).astype(int).tolist()
    quick = store(name="narrow", lengths=narrow, template={"max_length": 8192}, training={"packing_drop_last": False})

    for path, kind, words in ((store(), "reached", "a packing reaches it"), (quick, "quick", "quick bound")):
        assert kind == json.loads(said("show", path, "--json"))["splits"]["train"]["plan"]["bound_kind"]
        assert words in " ".join(said("show", path, "--all").replace("│", " ").split())


@pytest.mark.parametrize(
    ("lengths", "training", "says"),
    [
        ([41] * 101, {}, "101 samples of more than half the packing length are packs by themselves"),
        ([30] * 250, {}, r"the lengths \(median 30 tokens\) do not add up .* no plan has fewer than 125 packs"),
        (
            [50, 40, 30, 40] * 80,
            {"packing_algorithm": "concatenative"},
            "concatenative makes .* certified finds the fewest",
        ),
    ],
)
def test_a_low_fill_is_a_warning_with_its_reason(store, said, lengths, training, says):
    """Many packs need one: one pack fewer needs no reason."""
    training = {**training, "packing_drop_last": False}

    (line,) = [one for one in _warnings_of(said, store(lengths=lengths, training=training)) if "fill is" in one]
    assert re.search(rf"train: fill is 0\.\d+, since .*{says}", line)
    few = store(name="few", lengths=lengths[:100], training=training)
    assert not [one for one in _warnings_of(said, few) if "fill is" in one]


@pytest.mark.parametrize(
    ("training", "ranks", "says"),
    [
        ({}, 50, "cannot feed 50 ranks while the remainder is dropped"),
        ({"packing": False, "per_device_train_batch_size": 4, "effective_batch_size": 80}, 20,
         "60 samples cannot feed 20 ranks with a batch of 4 each"),
    ],
)  # fmt: skip
def test_ranks_that_get_no_batch_are_refused_where_a_plan_is_shown(store, capfd, training, ranks, says):
    """Packs and padded batches are counted; evaluation, which never drops, is shown."""
    training = {"effective_batch_size": 50, **training, "dataloader_drop_last": True}
    path = store(eval_lengths=LENGTHS[:3], training=training, world_sizes=(1,))

    assert 2 == command.main(["show", str(path), "--world-size", str(ranks)])
    message = capfd.readouterr().err
    assert says in message
    assert "training.dataloader_drop_last: false" in message
    assert 0 == command.main(["show", str(path), "--world-size", str(ranks), "--split", "eval"])


def test_whatif_says_which_ranks_would_get_no_batch(store, said):
    """And plans for the others; what is impossible is never the best."""
    path = store(training={"dataloader_drop_last": True, "effective_batch_size": 50})
    rows = json.loads(said("whatif", path, "--world-size", "2,50", "--json"))["alternatives"]

    assert [True, False] == [row["best"] for row in rows]
    assert rows[0]["problem"] is None
    assert re.search(r"packs cannot feed 50 ranks.*training\.dataloader_drop_last: false", rows[1]["problem"])
    assert "50 ranks: " in said("whatif", path, "--world-size", "2,50")


def test_whatif_refuses_lengths_that_depend_on_the_limit(store, capfd, said):
    """
    The template cuts at it; the limit itself is planned. Where the template raises, so does a
    shorter limit.
    """
    cut = store(template={"truncation_strategy": "right"})
    assert 2 == command.main(["whatif", str(cut), "--max-length", "80,90"])
    assert "template.truncation_strategy" in capfd.readouterr().err
    assert 80 == json.loads(said("whatif", cut, "--json", "--world-size", "2"))["alternatives"][0]["packing_length"]

    raising = store(name="raising", template={"truncation_strategy": "raise"})
    rows = json.loads(said("whatif", raising, "--json", "--max-length", "50,80", "--world-size", "2"))["alternatives"]
    assert ["sample 0 has 60 tokens" in (row["problem"] or "") for row in rows] == [True, False]


def test_whatif_has_nothing_to_vary_without_packing(store, capfd):
    """Said with the key."""
    assert 2 == command.main(["whatif", str(store(training={"packing": False}))])
    assert "training.packing" in capfd.readouterr().err


@pytest.mark.parametrize("number", ["0", "4,x", "", "-1,2"])
def test_lists_of_numbers_are_checked(number, capfd):
    """Status 2, and what each has to be."""
    with pytest.raises(SystemExit, match="2"):
        command.main(["whatif", "run.yaml", f"--max-length={number}"])
    assert "has to be a whole number of at least 1" in capfd.readouterr().err


def test_a_run_does_not_differ_from_itself(store, said):
    """By its YAML or its folder."""
    path = store()
    nothing = {"inputs": [], "samples": {"moved": [], "lost": [], "gained": [], "resized": []}, "figures": []}

    for other in (path, read_config(path).training.output_dir):
        assert {"train": nothing} == json.loads(said("diff", path, other, "--json"))["splits"]
    assert "each in the same pack" in said("diff", path, path)


def test_diff_names_inputs_samples_and_figures(store, said):
    """With both values; of folders, what needs no YAML."""
    first = store(eval_lengths=[5, 6])
    more = [*LENGTHS[:3], 31, *LENGTHS[4:], 44]
    second = store(name="second", lengths=more, eval_lengths=[5, 6], template={"system": "Look.", "max_length": 90})
    document = json.loads(said("diff", first, second, "--json"))

    assert ["train", "eval"] == list(document["splits"])
    train = document["splits"]["train"]
    inputs = {row["key"]: (row["first"], row["second"]) for row in train["inputs"]}
    assert (None, "Look.") == inputs["template.system"]
    assert (80, 90) == inputs["plan.packing_length"]
    assert (60, 61) == inputs["data.num_records"]
    plans = build_raw_plan(LENGTHS, packing_length=80), build_raw_plan(more, packing_length=90)
    difference = plan_difference(*plans, LENGTHS, more)
    assert {name: array.tolist() for name, array in attrs.asdict(difference).items()} == train["samples"]
    assert [3] == train["samples"]["resized"]
    figures = {row["key"]: (row["first"], row["second"]) for row in train["figures"]}
    assert tuple(len(plan.packs) for plan in plans) == figures["num_packs"]
    assert "work_per_step" in figures
    text = said("diff", first, second, "--split", "train")
    assert "template.system: None -> Look." in text
    assert "1 resized (of another length): 3" in text
    folders = [read_config(path).training.output_dir for path in (first, second)]
    only_plan = json.loads(said("diff", *folders, "--json", "--split", "train"))["splits"]["train"]
    assert "work_per_step" not in {row["key"] for row in only_plan["figures"]}
    assert train["samples"] == only_plan["samples"]


class _Page(HTMLParser):
    """What a page refers to, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references, self.identifiers, self.tags, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in {"href", "src", "action", "data"}:
                self.references.append(value)
            if name == "id":
                self.identifiers.append(value)

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.slow
def test_a_report_is_one_page_that_loads_nothing(store, said, tmp_path):
    """
    Coverage, four figures and the packs come first, then warnings; every plot has its numbers as a
    table. Written twice, it is the same.
    """
    path = store(eval_lengths=LENGTHS[:9], training={"packing_min_fill_ratio": 1.0, "effective_batch_size": 6})
    said("report", path, "-o", tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    page = _Page(text)

    assert "script" not in page.tags
    assert not re.findall(r"url\((?!#)|@import", text)
    assert {f"#{name}" for name in page.identifiers} >= set(page.references)
    assert len(set(page.identifiers)) == len(page.identifiers)
    assert not re.findall(r"#0\d0\d0\d", text), "a placeholder of a colour is left"
    words = " ".join(" ".join(page.text).split())
    order = [
        words.index(word)
        for word in (
            "Each epoch sees",
            "steps in all",
            "Packs, sample by",
            "filled below 1.0",
            "Figures",
            "Length of samples",
        )
    ]
    assert sorted(order) == order
    assert 2 * 6 == page.tags.count("svg") == page.tags.count("figure") == page.tags.count("figcaption")
    said("report", path, "-o", tmp_path / "again.html")
    assert text == (tmp_path / "again.html").read_text()


@pytest.mark.covers
def test_a_report_of_a_plan_without_packing_has_what_there_is(store, said, tmp_path):
    """Samples, lengths and work; nothing of the fill of packs."""
    said("report", store(training={"packing": False}), "-o", tmp_path / "plan.html")

    text = (tmp_path / "plan.html").read_text()
    assert 3 == text.count("<figure")
    assert "Fill of packs" not in text


def test_what_users_write_is_text_on_the_page(store, said, tmp_path):
    """A system prompt of markup is shown, not obeyed."""
    said(
        "report",
        store(template={"system": "<script>alert(1)</script>"}, training={"packing": False}),
        "-o",
        tmp_path / "plan.html",
    )

    text = (tmp_path / "plan.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_a_page_that_cannot_be_written_is_named(store, capfd, tmp_path):
    """Status 2."""
    path = store(training={"packing": False})
    assert 2 == command.main(["report", str(path), "-o", str(tmp_path / "none" / "plan.html")])
    assert "--output" in capfd.readouterr().err


@pytest.mark.slow
def test_a_page_replaces_nothing_but_a_page(store, capfd, tmp_path):
    """No configuration, no device, no folder; where a link points, the page is written."""
    (tmp_path / "keep.yaml").write_text("mine")
    (tmp_path / "folder.html").mkdir()
    path = str(store(training={"packing": False}))
    for name in ("keep.yaml", "-", "folder.html"):
        assert 2 == command.main(["report", path, "-o", str(tmp_path / name)])
        assert "has to be a file that ends in .html" in capfd.readouterr().err
    assert "mine" == (tmp_path / "keep.yaml").read_text()

    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "real.html")
    assert 0 == command.main(["report", path, "-o", str(link)])
    assert link.is_symlink()
    assert "</html>" in (tmp_path / "real.html").read_text()


def test_a_narrow_terminal_cuts_no_digits(store, said, monkeypatch):
    """What does not fit is wrapped by the terminal."""
    path = store()
    wide = said("whatif", path, "--max-length", "60,80")
    monkeypatch.setenv("COLUMNS", "30")

    assert wide == said("whatif", path, "--max-length", "60,80")
    assert "…" not in wide


def test_more_ranks_than_anyone_has_are_refused(store, capfd):
    """Instead of memory for each of them."""
    for arguments in (
        ["show", "--world-size"],
        ["whatif", "--world-size"],
        ["report", "-o", "plan.html", "--world-size"],
    ):
        with pytest.raises(SystemExit) as caught:
            command.main([arguments[0], str(store()), *arguments[1:], "100000000000"])
        assert 2 == caught.value.code
        assert "has to be at most 100,000 ranks" in capfd.readouterr().err


LIGHT = (
    "import io, sys, contextlib; from packplan.app.plan.__main__ import main\n"
    "with contextlib.redirect_stdout(io.StringIO()): statuses = [main(words.split('|')) for words in sys.argv[1:]]\n"
    "print(statuses, [n for n in ('torch', 'swift', 'transformers') if n in sys.modules])"
)


@pytest.mark.slow
def test_looking_loads_neither_torch_nor_swift(store, tmp_path):
    """Show, whatif, diff and report, in a fresh process."""
    path = store()
    calls = [f"show|{path}", f"show|{path}|--sample|3", f"whatif|{path}|--max-length|60,80|--world-size|2",
             f"diff|{path}|{path}", f"report|{path}|-o|{tmp_path / 'plan.html'}"]  # fmt: skip
    run = subprocess.run([sys.executable, "-c", LIGHT, *calls], capture_output=True, text=True, check=True, cwd=ROOT)

    assert "[0, 0, 0, 0, 0] []" == run.stdout.strip(), run.stderr
