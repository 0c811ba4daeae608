"""Commands that look at plans, over stores made for it: what they say, and what they refuse."""

import json
import re
from functools import partial
from pathlib import Path

import attrs
import pytest
import yaml

from packplan.adapters.loaders.batches import PROGRESS
from packplan.app.opening.policies import position_warning
from packplan.app.opening.runs import read_config
from packplan.app.opening.stores import artefacts_folder, open_split_records, open_stores
from packplan.app.plan import __main__ as command
from packplan.app.planning.schedule import schedule_of_split
from packplan.core.align import align_plan
from packplan.core.config.identity import run_identity
from packplan.core.fingerprint import json_digest, seal, to_plain
from packplan.core.inspection import summarise, summarise_schedule
from packplan.core.packs import plan_checksum
from packplan.core.plan import build_raw_plan
from packplan.core.samples.tables import DataFile
from packplan.core.schedule import ResumeState
from packplan.core.work.model import SampleWorks, WorkModel
from tests.stored import LENGTHS, store_run


@pytest.fixture
def store(tmp_path):
    """Return a function that writes a run's YAML and what building it would store."""
    return partial(store_run, tmp_path)


@pytest.fixture
def said(capfd):
    """Return a function that runs a command, and returns what it printed, or why it failed."""

    def run(*arguments, status=0) -> str:
        assert status == command.main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        return printed.err if status else printed.out

    return run


@pytest.fixture
def document(said):
    """Return a function that runs a command, and returns the JSON that it printed."""
    return lambda *arguments: json.loads(said(*arguments, "--json"))


@pytest.fixture
def shown(document):
    """Return a function that returns what `show --json` says of the training data."""
    return lambda path, *options: document("show", path, *options)["splits"]["train"]


def changed(path, **changes):
    """Return a run's YAML after its keys were changed, and nothing was built again."""
    sections = yaml.safe_load(path.read_text())
    for section, keys in changes.items():
        sections[section] |= keys
    path.write_text(yaml.safe_dump(sections))
    return path


def train_folder(path) -> Path:
    return artefacts_folder(read_config(path).training.output_dir) / "train"


def in_words(table: str) -> str:
    """Return the words of a table without its lines."""
    return " ".join(table.replace("│", " ").split())


def test_show_says_what_core_says(store, document):
    """The numbers of a plain list of lengths, by default for the most ranks that were built for."""
    path = store(eval_lengths=LENGTHS[:9], world_sizes=(1, 4, 2))
    assert 4 == document("show", path)["splits"]["train"]["schedule"]["world_size"]
    splits = document("show", path, "--world-size", "2")["splits"]
    config, plan = read_config(path), build_raw_plan(LENGTHS, packing_length=80, min_fill_ratio="0.65")
    works = SampleWorks.from_lengths(WorkModel.estimated({}).trained(), LENGTHS)
    aligned = align_plan(plan, world_size=2, dataloader_drop_last=False)
    schedule = schedule_of_split(config, "train", aligned, plan.packs.loads(works.flops))

    assert ["train", "eval"] == list(splits)
    one = [1] * len(LENGTHS)
    assert attrs.asdict(summarise(plan, LENGTHS, supervised=one)) == splits["train"]["plan"]
    assert attrs.asdict(summarise_schedule(plan, LENGTHS, schedule, works=works)) == splits["train"]["schedule"]
    assert plan_checksum(plan.packs) == splits["train"]["checksums"]["raw_plan"]
    evaluated = build_raw_plan(LENGTHS[:9], packing_length=80, drop_last=False)
    assert attrs.asdict(summarise(evaluated, LENGTHS[:9], supervised=one[:9])) == splits["eval"]["plan"]
    assert ["eval"] == list(document("show", path, "--split", "eval")["splits"])


def test_a_plan_is_broken_down_by_source(store, said, shown):
    """Files of one source together, with their shapes, in the document and the table."""
    files = [
        DataFile("a.jsonl", "chats", "text", 20),
        DataFile("b.jsonl", "captions[red]", "dense captions", 15),
        DataFile("c.csv", "chats", "query, response", len(LENGTHS) - 35),
    ]
    path = store(files=files)
    chats, captions = shown(path)["sources"]

    assert ("chats", "captions[red]") == (chats["name"], captions["name"])
    assert [attrs.asdict(file) for file in files[::2]] == chats["files"]
    assert sum(LENGTHS[20:35]) == captions["num_tokens"]
    table = in_words(said("show", path, "--all"))
    median = f"lengths {captions['length_quantiles'][1]} tokens, the median"
    for words in ("chats 45 ", "captions[red] 15 ", "dense captions", "query, response / text", median):
        assert words in table
    assert [] == shown(store(name="older"))["sources"]


def test_show_is_a_table_for_people(store, said):
    """The dozen lines that decide something; with --all, every figure, and the digests."""
    path = store()
    short, everything = said("show", path), said("show", path, "--all")

    block = Path("docs/see-a-plan.md").read_text().split("## Show")[1].split("```")[1]
    labels = set(re.findall("^│ +([a-z][a-z ]+?) +│", block, re.MULTILINE))
    for words in (*labels, "no plan has fewer than", "raw_plan "):
        assert words in short
    for words in ("above the lower bound", "of microbatches", "aligned_plan ", "fingerprint of the plan "):
        assert words in everything
        assert words not in short
    (table,) = re.findall("┌.*?┘", said("show", path, "--split", "train"), re.DOTALL)
    assert len(re.findall("^│ +[a-z]", table, re.MULTILINE)) <= 12
    assert "imbalance" not in said("show", path, "--world-size", "1")


def test_show_warns_of_what_training_would_refuse_or_do_otherwise(store, said, shown, capfd):
    """Another system prompt, another ratio, a ragged window, dropped tokens, an unchecked store."""
    path = store(repeatability=False, training={"packing_min_fill_ratio": 1.0, "packing_allow_single_long": False})
    keys = {"packing_min_fill_ratio": 0.5, "effective_batch_size": 32}
    long = [length for length in LENGTHS if length >= 80]
    warnings = "\n".join(shown(changed(path, template={"system": "Another."}, training=keys))["warnings"])

    for words in (
        "template.system was unset, now 'Another.'",
        "training would plan again, since a setting has changed: min_fill_ratio was '1.0', now '0.5'",
        "filled below 1.0 are dropped",
        f"% of all; {sum(long):,} tokens, {sum(long) / sum(LENGTHS):.2%} of all) have 80 tokens or more and are",
        "no sample has been encoded a second time yet",
        "in the last step of each epoch, each rank trains",
    ):
        assert words in warnings
    assert "warning: " in said("show", path)
    assert 0 == command.main(["whatif", str(path)])
    assert "train: training would refuse the stored lengths, since a setting has changed" in capfd.readouterr().err


def test_images_with_fewer_positions_than_tokens_are_not_warned_of(store, tmp_path):
    """In a model with mrope; its rows of text are."""
    keys = {"model_type": "qwen2", "max_position_embeddings": 9, "rope_scaling": {"mrope_section": [1]}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = read_config(store(model={"model": str(tmp_path)}))
    table = open_stores(config, "train").lengths.inspect().rows.table  # an image is in the first row

    assert not position_warning(config, table)
    assert "than the 9 positions" in position_warning(config, table[1:])


@pytest.mark.covers
def test_a_sample_and_a_pack_are_explained(store, said, document, tmp_path):
    """When its pack is trained, and on which line it stands; else with whom it was dropped."""
    for name, blank in (("data", "\n"), ("val", "")):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"id": {one}}}\n{blank}' for one in range(len(LENGTHS))))
    path = store(eval_lengths=LENGTHS)
    for split in ("train", "eval"):
        lengths, records = open_stores(read_config(path), split).lengths, open_split_records(read_config(path), split)
        records.digest(len(records))
        lengths.save_record_heads(records.known_heads)
    long, first = (document("show", path, "--sample", number) for number in (6, 0))

    assert ("long", 80, f"{tmp_path / 'data.jsonl'}, line 13") == (long["place"], long["length"], long["record"])
    evaluated = document("show", path, "--split", "eval", "--sample", "6")
    assert f"{tmp_path / 'val.jsonl'}, line 7" == evaluated["record"]
    plan, pack = build_raw_plan(LENGTHS, packing_length=80, min_fill_ratio="0.65"), long["pack"]
    assert (plan.packs[pack["pack"]], 1.0) == ([6], pack["fill"])
    assert {"split": "train", **pack} == document("show", path, "--pack", pack["pack"])
    assert [[28, 56]] == first["image_sizes"]
    text, turn = said("show", path, "--sample", "0"), first["pack"]["steps"][0]
    step = f"step {turn['step']} on rank {turn['rank']}"
    for words in ("images 28 x 56 (4 patches)", f"pack {first['pack']['pack']} of train", step):
        assert words in text
    first, *others = (tmp_path / "data.jsonl").read_text().splitlines(keepends=True)
    for rows, line in (([first], "line 1"), ([*others, first], None), ([], None)):
        (tmp_path / "data.jsonl").write_text("".join(rows))
        record = document("show", path, "--sample", "0")["record"]
        assert record == (line and f"{tmp_path / 'data.jsonl'}, {line}"), "only where it was measured"
    assert "; line unknown (" in said("show", path, "--sample", "0")

    path = store(training={"packing_min_fill_ratio": 1.0, "packing_allow_single_long": False})
    plan = build_raw_plan(LENGTHS, packing_length=80, min_fill_ratio=1.0, allow_single_long=False)
    dropped = plan.dropped_packs[0]
    found = document("show", path, "--sample", dropped[0])
    assert ("dropped", dropped[1:]) == (found["place"], found["dropped_with"])
    assert "training.packing_min_fill_ratio" in said("show", path, "--sample", dropped[0])
    assert "training.packing_allow_single_long" in said("show", path, "--sample", plan.skipped_long[0])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [("show RUN --sample 60", "the data have no record 60"), ("show RUN --pack 99", "no pack 99"),
     ("show RUN --split eval", "custom.val_jsonl"), ("show RUN --world-size 3", "not divisible by 3 ranks"),
     ("show RUN --world-size 50 training.dataloader_drop_last=true training.effective_batch_size=50",
      "cannot fill 50 ranks, and the remainder is dropped"),
     ("whatif RUN training.packing=false", "training.packing"),
     ("show RUN custom.trainer_variant=rollout training.packing_mode=dynamic training.max_steps=3",
      "custom.trainer_variant"),
     ("show RUN --text", "--text shows one sample")],
)  # fmt: skip
def test_what_is_not_there_or_cannot_be_is_named(store, said, arguments, reason):
    """Status 2, and nothing is written."""
    path = store()
    content = path.read_bytes()

    assert reason in said(*(path if word == "RUN" else word for word in arguments.split()), status=2)
    assert content == path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"training": {"packing_min_fill_ratio": 1.0}}, "9 packs .samples of 51 to 59 tokens. are filled to at most"),
        ({"template": {"max_length": 57, "truncation_strategy": "raise"}}, "2 of 9 samples are too long"),
    ],
)
def test_lengths_that_give_no_plan_are_not_sent_back_to_build(store, said, changes, reason):
    """What building raises is said, with its remedy: it stored the lengths, and no plan."""
    path = store(lengths=list(range(51, 60)))
    (train_folder(path) / "raw_plan.json").unlink()
    message = said("show", changed(path, **changes), status=2)

    assert re.search(reason, message), message
    assert "packplan plan build" not in message


def test_what_is_not_built_or_damaged_is_named(store, said):
    """No lengths, not all lengths, no plan, or one of other lengths; with what builds."""
    path = store()
    folder = train_folder(path)
    for change, reason in (
        (lambda: store(measured=30), "the lengths of 30 of 60 records"),
        ((folder / "lengths.json").unlink, "holds no lengths"),
        (lambda: store(world_sizes=()) and (folder / "raw_plan.json").unlink(), "but no plan"),
    ):
        change()
        assert re.search(f"{reason}.*packplan plan build", said("show", path, status=2)), reason
    for part in train_folder(store(name="other", lengths=LENGTHS[1:])).glob("raw_plan*"):
        (folder / part.name).write_bytes(part.read_bytes())
    assert "a plan of other lengths" in said("show", path, status=2)

    (folder / "lengths.bin").write_bytes(b"\0" + (folder / "lengths.bin").read_bytes()[1:])
    for name in ("show", "whatif"):
        assert "lengths.bin is damaged" in said(name, path, status=3)


def test_whatif_gives_what_building_each_would_show(store, document, shown):
    """Up to the bound, and to supervised tokens, which lengths do not say."""
    alternatives = document("whatif", store(), "--max-length", "100,50", "--world-size", "2,4")["alternatives"]

    found = {(one["packing_length"], one["world_size"]): one for one in alternatives}
    assert [(n, w) for n in (50, 100) for w in (2, 4)] == list(found)
    for (packing_length, world_size), one in found.items():
        built = store(name=f"other{packing_length}", template={"max_length": packing_length})
        train = shown(built, "--world-size", world_size)
        assert train["schedule"] == one["schedule"]
        differing = {key for key, value in one["plan"].items() if value != train["plan"][key]}
        found_by_search = {"lower_bound", "bound_kind", "gap", "auto_packs"}
        assert differing <= {*found_by_search, "supervised_tokens", "unsupervised_samples"}
        assert one["plan"]["lower_bound"] <= train["plan"]["lower_bound"]


def test_a_plan_that_drops_much_of_the_data_is_shown_with_a_warning(store, document, shown):
    """A share that allows it is no fault, and a single dropped pack never is."""
    much = {"lengths": [60] * 6 + [40] * 6, "training": {"packing_min_fill_ratio": 0.8}}
    path = store(**much)

    rows = document("whatif", path, "--max-length", "80,100", "--world-size", "2")["alternatives"]
    assert [True, False] == ["training.packing_drop_last: false" in (row["problem"] or "") for row in rows]
    for warns, of in (
        (True, path),
        (False, store(name="allowed", **much | {"training": {**much["training"], "packing_max_dropped_share": 1}})),
        (False, store(name="single", lengths=[80] * 6 + [40])),
    ):
        assert warns == any("training refuses the plan: " in line for line in shown(of)["warnings"])


def test_the_longest_pack_is_named_wherever_a_plan_is_shown(store, said, document, shown):
    """With the packs that exceed the length, and the key that would skip them."""
    key, path = "training.packing_allow_single_long: false", store(lengths=[*LENGTHS, 88, 89, 200])

    (line,) = [line for line in shown(path)["warnings"] if key in line]
    assert all(words in line for words in ("up to 200 tokens", "6, 18, 30, 42, 54, 60..62", "2 packs exceed"))
    row = document("whatif", path)["alternatives"][0]["plan"]
    assert (200, 2) == (row["longest_pack"], row["oversized_packs"])
    assert key in said("whatif", path)
    skips = store(name="skips", lengths=[*LENGTHS, 200], training={"packing_allow_single_long": False})
    for other in (store(name="plain"), skips):
        assert not [line for line in shown(other)["warnings"] if key in line]
        assert key not in said("whatif", other)


def test_packs_that_ranks_share_are_counted_wherever_a_plan_is_shown(store, said, shown, document):
    """By the number of ranks, with the most tokens of a rank; packs too long even so are named."""
    auto = {"training": {"sequence_parallel_size": "auto"}}
    path = store(lengths=[60, 20, 50, 30, 200, 79, 100], **auto)

    schedule = shown(path, "--world-size", "4")["schedule"]
    assert ({"1": 3, "2": 1, "4": 1}, 80) == (schedule["packs_by_degree"], schedule["rank_tokens"])
    assert [] == [line for line in shown(path, "--world-size", "4")["warnings"] if "exceed" in line]
    assert "packs on 1 4 ranks; no rank computes more than 80 tokens at once" in in_words(
        said("show", path, "--world-size", "4", "--all")
    )
    two = shown(path, "--world-size", "2")
    assert ({"1": 3, "2": 2}, 100) == (two["schedule"]["packs_by_degree"], two["schedule"]["rank_tokens"])
    assert any("1 pack exceeds" in line and "up to 100 tokens on each of its ranks" in line for line in two["warnings"])
    for most, tokens in ([], [200, 100, 80]), (["training.max_sequence_parallel_size=2"], [200, 100, 100]):
        rows = document("whatif", path, "--world-size", "1,2,4", *most)["alternatives"]
        assert tokens == [row["schedule"]["rank_tokens"] for row in rows]


def test_samples_that_teach_nothing_are_counted_wherever_a_plan_is_shown(store, said, shown):
    """All of them would be refused, and the warning says so."""
    path = store(lengths=[60, 20, 50, 30], supervised=[0, 7, 7, 0])

    assert "train: 2 planned samples have no supervised token: 0, 3" in shown(path)["warnings"]
    assert 2 == shown(path)["plan"]["unsupervised_samples"]
    assert "without supervised tokens 2 " in in_words(said("show", path))
    none = store(name="none", lengths=[60, 20], eval_lengths=[60, 20], supervised=0)
    for split, then in (("train", "training refuses the plan"), ("eval", "training leaves the evaluation out")):
        assert f"no supervised token, so {then}" in in_words(said("show", none, "--split", split))


def test_whatif_says_what_each_alternative_would_lack(store, said, document, monkeypatch):
    """Ranks without a batch; samples over the limit; a narrow terminal cuts no digits."""
    path = store(training={"dataloader_drop_last": True, "effective_batch_size": 50})
    rows = document("whatif", path, "--world-size", "2,50")["alternatives"]
    assert rows[0]["problem"] is None
    assert re.search(r"packs cannot fill 50 ranks.*training\.dataloader_drop_last: false", rows[1]["problem"])
    wide = said("whatif", path, "--world-size", "2,50")
    assert "50 ranks: " in wide
    assert "length ranks packs fill long " in in_words(wide)
    monkeypatch.setenv("COLUMNS", "30")
    assert (wide, False) == (said("whatif", path, "--world-size", "2,50"), "…" in wide)

    cut = store(name="cut", template={"truncation_strategy": "right"})
    assert "template.truncation_strategy" in said("whatif", cut, "--max-length", "80,90", status=2)
    assert 80 == document("whatif", cut, "--world-size", "2")["alternatives"][0]["packing_length"]
    raising = store(name="raising", template={"truncation_strategy": "raise"})
    rows = document("whatif", raising, "--max-length", "50,80", "--world-size", "2")["alternatives"]
    assert ["sample 0 has 60 tokens" in (row["problem"] or "") for row in rows] == [True, False]


@pytest.fixture
def differences(capfd):
    """Return a function that compares two sides; its status is 3 if they differ, and 0 if not."""

    def compare(*words) -> dict:
        status = command.main(["diff", *map(str, words), "--json"])
        found = json.loads(capfd.readouterr().out)
        assert (3 if found["facts"] or found["samples"] else 0) == status
        assert status == command.main(["diff", *map(str, words)])
        lines = capfd.readouterr().out
        table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines.splitlines() if line[0] == "│"]
        shown = {key: values for key, *values in table}
        for row in found["facts"]:
            for text, value in zip(shown[row["key"]], (row["first"], row["second"]), strict=True):
                due = f"{value:.6g}" if isinstance(value, float) else "unset" if value is None else str(value)
                assert text in {due, f"{due[:12]}…"}
        assert all(f"{kind}, " in lines for kind in found["samples"] or ())
        assert (found["samples"] == {}) == ("all samples are in the same packs\n" in lines)
        return found

    return compare


def test_equal_plans_differ_in_nothing(store, differences):
    """A run, its folder, and another run of the same data and settings."""
    path, same = store(eval_lengths=LENGTHS[:9]), store(name="same", eval_lengths=LENGTHS[:9])

    for words in ((path, same), (path, same.with_suffix("")), (path, same, "--split", "eval")):
        assert {"facts": [], "samples": {}} == differences(*words)


LESS = [*LENGTHS[:-14], 45]


@pytest.mark.parametrize(
    ("other", "groups"),
    [
        ({"lengths": LESS}, {"counts", "data", "packs", "plan", "steps"}),
        ({"template": {"system": "Other."}}, {"lengths"}),
        ({"training": {"packing_min_fill_ratio": 0.1}}, {"counts", "packs", "plan", "steps"}),
        ({"training": {"effective_batch_size": 8}}, {"run", "steps"}),
        ({"training": {"seed": 7}}, {"order"}),
        ({"training": {"learning_rate": "2e-5"}}, {"run"}),
    ],
)
def test_each_kind_of_difference_is_found(store, shown, differences, other, groups):
    """Keys with both values, and each sample whose company changed, by a reference of sets."""
    path, second = store(), store(name="second", **other)
    found = differences(path, second)

    assert groups == {row["key"].split(".")[0] for row in found["facts"]}
    values = {row["key"]: (row["first"], row["second"]) for row in found["facts"]}
    figures = [shown(one) for one in (path, second)]
    for key, (part, name) in {
        "counts.num_packs": ("plan", "num_packs"), "steps.total_steps": ("schedule", "total_steps")
    }.items():  # fmt: skip
        pair = tuple(one[part][name] for one in figures)
        assert values.get(key, pair[:1] * 2) == pair
    packs = [open_stores(read_config(one), "train").plans.inspect().plan.packs.tolist() for one in (path, second)]
    first, then = ({sample: pack for pack in each for sample in pack} for each in packs)
    moved = sorted(sample for sample in first.keys() & then.keys() if first[sample] != then[sample])
    expected = {"new": sorted(then.keys() - first), "gone": sorted(first.keys() - then), "moved": moved}
    assert {kind: samples for kind, samples in expected.items() if samples} == found["samples"]
    folders = differences(path.with_suffix(""), second.with_suffix(""))
    assert groups - {"order", "run", "steps"} == {row["key"].split(".")[0] for row in folders["facts"]}


def save_checkpoint(path: Path, number: int, **changes) -> Path:
    """Write the state of a trainer that trained a run's stored plan; return the checkpoint."""
    config = read_config(path)
    stores = open_stores(config, "train")
    stored, lengths = stores.plans.inspect(), stores.lengths.inspect()
    aligned = align_plan(stored.plan, world_size=2, dataloader_drop_last=False)
    state = ResumeState.from_schedule(
        schedule_of_split(config, "train", aligned), plan=plan_checksum(stored.plan.packs), inputs=stored.key.inputs,
        data=lengths.origin.data_digest, identity=run_identity(config, files={}, model={"model.model a.json": "b1"}),
    )  # fmt: skip
    saved = seal(to_plain(attrs.evolve(state, **changes)))
    if "plan" in changes and changes["plan"] is None:
        del saved["plan"]
    held = {"global_step": 0, "stateful_callbacks": {PROGRESS: {"args": {}, "attributes": {"progress": saved}}}}
    held["stateful_callbacks"]["packplan_sha256"] = json_digest(json.loads(json.dumps(held)))
    folder = Path(config.training.output_dir) / f"checkpoint-{number}"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps(held))
    return folder


def test_a_checkpoint_is_compared_with_its_run_and_with_another(store, differences, said):
    """Its packs too, as long as its run has them; else they are known to be others."""
    path = store()
    checkpoint = save_checkpoint(path, 1)
    assert {"facts": [], "samples": {}} == differences(checkpoint, path)

    other = store(name="other", lengths=LESS, training={"learning_rate": "2e-5"})
    found = differences(checkpoint, other)
    assert {"data", "packs", "counts", "plan", "run"} == {row["key"].split(".")[0] for row in found["facts"]}
    assert differences(path, other)["samples"] == found["samples"]
    late = save_checkpoint(path, 2, plan="0" * 64, inputs={})
    assert ["packs.checksum"] == [row["key"] for row in differences(late, path)["facts"]]
    assert differences(late, path)["samples"] is None
    assert "--split is eval" in said("diff", late, checkpoint, "--split", "eval", status=2)
    assert "trained from a stream" in said("diff", path, save_checkpoint(path, 3, plan=None), status=2)


def test_a_side_that_cannot_be_compared_is_named(store, said, tmp_path, capfd):
    """Missing, not built, without such a split, damaged; keys of a folder, which has none."""
    path = store()
    (tmp_path / "empty").mkdir()
    for words, status, reason in (
        ((path, "no.yaml"), 2, "no.yaml cannot be read"),
        ((path, tmp_path / "empty"), 2, "empty holds no train plan"),
        ((path, path, "--split", "eval"), 2, "custom.val_jsonl"),
        ((path, tmp_path / "run", "training.seed=3"), 2, "training.seed=3 overrides a key of a YAML"),
    ):
        assert reason in said("diff", *words, status=status)
    assert 0 == command.main(["diff", str(path), str(path), "training.packing_min_fill_ratio=0.9", "template.system=A"])
    err = " ".join(capfd.readouterr().err.split())
    assert "plan again, since a setting has changed: min_fill_ratio was '0.65', now '0.9'" in err
    assert 1 == err.count("would plan again") == err.count("would refuse the stored lengths")
    checkpoint = save_checkpoint(path, 1) / "trainer_state.json"
    for file in (checkpoint, train_folder(path) / "raw_plan.json"):
        file.write_bytes(file.read_bytes().replace(b"0", b"1", 1))
        assert f"{file} is damaged" in said("diff", path, file.parent, status=3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *((f"whatif --max-length={number}", "a whole number of at least 1") for number in ("0", "4,x", "", "-1,2")),
        *((f"build --world-size={number}", "a whole number of at least 1") for number in ("0", "1.5")),
        *((f"{name} --world-size=100000000000", "at most 100,000") for name in ("build", "show", "whatif")),
        ("show --alll", "usage: packplan plan show"),
    ],
)
def test_options_are_checked(arguments, says, capfd):
    """Status 2, and what each has to be: no empty list, no memory for ranks that no one has."""
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments.split(), "run.yaml"])
    assert says in capfd.readouterr().err
