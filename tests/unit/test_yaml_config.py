"""YAML becomes a frozen configuration, or all its faults at once, each with its path and remedy."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from pathlib import Path

import attrs
import pytest
import yaml

from packplan.adapters.config.run import load_config, parse_config
from packplan.adapters.config.trainer_keys import TrainerKey
from packplan.app.planning.schedule import warn_of_ignored
from packplan.core.config import REFUSED_TRAINING_KEYS, RunConfig, TrainingConfig
from packplan.core.errors import ConfigError

KEYS = {
    name: TrainerKey(tuple(types.split()))
    for name, types in {
        "learning_rate": "float", "logging_steps": "float", "report_to": "null str list", "lr_scheduler_type": "str",
        "bf16": "bool", "data_seed": "null int", "dataloader_num_workers": "null int", "deepspeed": "null str dict",
        "packing_length": "int", "optimizer": "null str", "vit_lr": "null float",
    }.items()
}  # fmt: skip
"""What a trainer of few settings takes."""


def minimal(**training) -> dict:
    return {
        "model": {"model": "m"},
        "template": {"max_length": 80},
        "custom": {"train_jsonl": "a.jsonl"},
        "training": {"output_dir": "out", **training},
    }


def parse(document) -> RunConfig:
    return parse_config(document, "run.yaml", KEYS)


def faults_of(document) -> dict[str, str]:
    with pytest.raises(ConfigError) as raised:
        parse(document)
    assert all(fault.path in str(raised.value) for fault in raised.value.faults)
    found: dict[str, str] = {}
    for fault in raised.value.faults:
        found[fault.path] = f"{found.get(fault.path, '')}{fault.reason}"
    return found


@pytest.mark.parametrize("name", ["varlan", "flash", "SDPA", ""])
def test_an_attention_that_is_none_is_named_with_those_that_are(name):
    """Before anything is measured, by every command; names of kernels are left to transformers."""
    with pytest.raises(ConfigError, match=f"model.attn_impl: is {name!r}, but has to be one of auto, varlen, sdpa"):
        parse(minimal() | {"model": {"model": "m", "attn_impl": name}})
    assert "paged|sdpa" == parse(minimal() | {"model": {"model": "m", "attn_impl": "paged|sdpa"}}).model.attn_impl


def test_defaults_are_the_specifications():
    """A YAML of four sections is enough."""
    config = parse(minimal())
    training = config.training

    assert (True, "static", "constant_volume") == (training.packing, training.packing_mode, training.packing_algorithm)
    assert (Decimal("0.65"), True, True) == (
        training.packing_min_fill_ratio, training.packing_drop_last, training.packing_allow_single_long,
    )  # fmt: skip
    assert (True, 7200.0, None, 8) == (
        config.eval_packing, training.packing_wait_timeout_s, training.packing_length_cache_persist_every,
        training.packing_length_precompute_workers,
    )  # fmt: skip
    assert "sft" == config.custom.trainer_variant
    assert ("a.jsonl",) == config.custom.train_jsonl


def test_the_budget_comes_from_the_nearest_key():
    """template.max_length, else global_max_length for it, else model.max_model_len."""
    document = minimal()
    document["global_max_length"] = 70
    document["model"]["max_model_len"] = 60
    assert 80 == parse(document).packing_length

    del document["template"]["max_length"]
    assert 70 == parse(document).packing_length

    del document["global_max_length"]
    assert 60 == parse(document).packing_length

    del document["model"]["max_model_len"]
    assert "budget" in faults_of(document)["template.max_length"]


def test_numbers_that_yaml_reads_as_text_are_numbers():
    """1e-5 has no dot, so YAML calls it a string."""
    config = parse(yaml.safe_load(yaml.safe_dump(minimal())) | minimal(learning_rate="1e-5", num_train_epochs="2"))

    assert 1e-5 == config.training.trainer["learning_rate"]
    assert 2.0 == config.training.num_train_epochs


def test_all_faults_are_reported_at_once_with_path_and_remedy():
    """Every section counts, own keys and the trainer's."""
    document = minimal(
        packing="no", packing_min_fill_ratio=1.5, packing_wait_timeout_s=-1, packing_lenght=3, packing_length=8,
        packing_avg_samples=4, learning_rat=1, bf16="yes", dataloader_num_workers=1.5, seed=True, max_steps=0,
        packing_algorithm="magic",
    )  # fmt: skip
    document["template"]["max_length"] = 4096.5
    document["model"] = {}
    document["custom"]["object_field_order"] = "random"
    document["custom"]["colour"] = 1
    document["policy"] = {"sequence_packing": {}}
    document["extra"] = 1

    found = faults_of(document)

    assert {
        "training.packing", "training.packing_lenght", "training.packing_length", "training.packing_avg_samples",
        "training.learning_rat", "training.bf16", "training.dataloader_num_workers", "training.seed",
        "template.max_length", "model.model", "custom.object_field_order", "custom.colour", "policy", "extra",
    } == set(found)  # fmt: skip
    assert "did you mean learning_rate?" in found["training.learning_rat"]
    assert "template.max_length" in found["training.packing_length"]
    assert "4096.5" in found["template.max_length"]
    assert "desc_first, geometry_first" in found["custom.object_field_order"]


def test_faults_of_values_are_reported_at_once():
    """Ranges and modes, when all types are right."""
    document = minimal(
        packing_min_fill_ratio=1.5, packing_wait_timeout_s=-1, max_steps=0, packing_algorithm="magic",
        effective_batch_size=0, packing_buffer=16, num_train_epochs=0, lora_dropout=1.0, packing_mode="dynamic",
        seed=-1,
    )  # fmt: skip
    document["custom"] = {"fusion_config": "mix.yaml"}

    found = faults_of(document)

    assert {
        "training.packing_min_fill_ratio", "training.packing_wait_timeout_s", "training.max_steps",
        "training.packing_algorithm", "training.effective_batch_size", "training.num_train_epochs",
        "training.lora_dropout", "training.packing_mode", "custom.fusion_config",
        "training.seed",
    } == set(found)  # fmt: skip
    assert "training.packing_mode: static" in found["training.packing_mode"]
    assert "one JSONL" in found["custom.fusion_config"]


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("custom", "dataset", ["a#0"], "has a#0, which asks for #0"),
        ("custom", "dataset", ["a"], "and custom.dataset both name data"),
        ("custom", "split_dataset_ratio", 1.0, "from 0 to below 1"),
        ("custom", "split_dataset_ratio", 0.5, "splits what custom.dataset names"),
        ("custom", "data_seed", -1, "from 0 to 2**32 - 1"),
        ("custom", "model_name", ["a", "b", "c"], "a Chinese and an English name"),
        ("training", "use_dora", True, "is of adapters: set training.tuner_type: lora"),
        ("training", "target_regex", "(", "is no pattern"),
        ("training", "freeze_parameters_ratio", 1.0, "from 0 to below 1"),
        ("training", "lorap_lr_ratio", -1, "has to be above 0"),
        ("model", "quant_bits", 4, "without model.quant_method"),
        ("model", "quant_method", "bnb", "quantises weights that would be trained"),
    ],
)
def test_data_and_tuners_are_checked(section, key, value, says):
    """Each fault by its key."""
    document = minimal()
    document[section][key] = value

    found = faults_of(document)

    assert any(says in reason for reason in found.values()), found


def test_tuners_that_exclude_each_other_are_refused():
    """Freezes of weights that are not trained, two groupings of the weights, bits that are none."""
    document = minimal(tuner_type="lora", freeze_parameters_ratio=0.5, lorap_lr_ratio=16, optimizer="muon", vit_lr=1e-5)
    document["model"] |= {"quant_method": "bnb", "quant_bits": 3}
    document["custom"] |= {
        "val_jsonl": "a", "split_dataset_ratio": 0.5, "train_jsonl": None, "dataset": ["b"], "fusion_config": "mix",
    }  # fmt: skip

    found = faults_of(document)

    assert {
        "training.freeze_parameters_ratio", "training.lorap_lr_ratio", "model.quant_bits", "custom.split_dataset_ratio",
        "custom.fusion_config",
    } == set(found)  # fmt: skip


def test_columns_and_shares_of_bad_records_are_checked():
    """A share is one, a column is one that is read, and a stream does not know its bad records."""
    document = minimal(packing_mode="dynamic", max_steps=1)
    document["custom"] |= {
        "max_bad_share": 1.5, "on_bad_record": "skip", "columns": {"ask": "questoin", "say": "response"},
        "trainer_variant": "rollout",
    }  # fmt: skip

    found = faults_of(document)

    assert {"custom.max_bad_share", "custom.on_bad_record", "custom.columns.ask"} == set(found)
    assert "from 0 to 1" in found["custom.max_bad_share"]
    assert "query" in found["custom.columns.ask"]


def test_names_of_sources_are_of_entries_of_the_data(monkeypatch):
    """An entry is one however its path is written; no name is blank, none of another file."""
    monkeypatch.setenv("DATA", "/data")
    document = minimal()
    document["custom"] = {
        "train_jsonl": ["${DATA}/a.jsonl", "b/*.parquet"], "val_jsonl": "c.jsonl",
        "source_names": {"${DATA}/a.jsonl": "chats", "b/*.parquet": "chats", "c.jsonl": "held out"},
    }  # fmt: skip

    assert {"/data/a.jsonl": "chats", "b/*.parquet": "chats", "c.jsonl": "held out"} == parse(
        document
    ).custom.source_names

    document["custom"]["source_names"] = {"a.jsonl": "chats", "c.jsonl": " "}
    found = faults_of(document)
    assert {"custom.source_names.a.jsonl", "custom.source_names.c.jsonl"} == set(found)
    assert "is no entry of custom.train_jsonl" in found["custom.source_names.a.jsonl"]


@pytest.mark.parametrize("key", sorted(REFUSED_TRAINING_KEYS))
def test_keys_that_mean_nothing_here_are_refused_with_what_to_do(key):
    """By name, even where the trainer knows them."""
    assert REFUSED_TRAINING_KEYS[key] == faults_of(minimal(**{key: 1}))[f"training.{key}"]


@pytest.mark.parametrize(
    ("section", "keys", "says"),
    [
        ("template", {"fps": 0}, "is 0.0, but has to be above 0"),
        ("template", {"fps": math.inf}, "has to be a finite number"),
        ("custom", {"max_video_s": -1}, "is -1.0, but has to be above 0"),
        ("custom", {"max_video_bytes": 0}, "is 0, but"),
        ("template", {"fps_min_frames": 8, "fps_max_frames": 6}, "is 8, but template.fps_max_frames is 6 frames"),
        ("template", {"fps_min_frames": 800}, "is 800, but template.fps_max_frames is 768 frames"),
        ("template", {"video_min_pixels": 9000, "video_max_pixels": 8000}, "video_max_pixels is 8000 pixels: lower it"),
        ("template", {"fps_max_frames": 1}, "is 1, but template|frames are taken in pairs"),
    ],
)
def test_sampling_that_leaves_a_video_nothing_is_refused(section, keys, says):
    """By its key, before a model or data are read; a limit alone is none."""
    document = minimal()

    faults = faults_of({**document, section: document[section] | keys})

    assert any(re.search(says, reason) for path, reason in faults.items() if path.partition(".")[2] in keys)
    assert parse({**document, "template": {"max_length": 80, "fps": 0.5, "video_min_pixels": 9000}})


@pytest.mark.parametrize("epochs", [0, -1, 1e6, 1e300])
def test_epochs_that_no_run_trains_are_a_typing_error(epochs):
    """Unless `max_steps` decides."""
    assert (
        "has to be above 0 and below 1,000,000"
        in faults_of(minimal(num_train_epochs=epochs))["training.num_train_epochs"]
    )
    assert parse(minimal(num_train_epochs=999_999))
    assert parse(minimal(num_train_epochs=1, max_steps=3))


def test_the_order_needs_a_seed():
    """From 0; without one it is that of the run."""
    assert "has to be a whole number of at least 0" in faults_of(minimal(data_seed=-1))["training.data_seed"]


def test_a_buffer_is_refused_in_static_mode_only():
    """With packing off, packing keys stay accepted."""
    assert "training.packing_buffer" in faults_of(minimal(packing_buffer=16))
    assert parse(minimal(packing_buffer=512))
    config = parse(minimal(packing=False, packing_buffer=16, packing_mode="dynamic", eval_packing=True))
    assert not config.eval_packing


def test_no_data_is_a_fault():
    """Something has to be learned from."""
    document = minimal()
    document["custom"] = {}

    assert "custom.train_jsonl" in faults_of(document)


@pytest.mark.parametrize("field", [f.name for f in attrs.fields(TrainingConfig) if f.name != "trainer"])
def test_every_training_key_refuses_a_section(field):
    """Each key's type is checked, and the fault has its path."""
    assert f"training.{field}" in faults_of(minimal(**{field: {"a": 1}}))


def test_one_yaml_builds_on_another(tmp_path: Path):
    """Sections merge key by key, lists are replaced; the path starts at the file that names it."""
    (tmp_path / "base").mkdir()
    document = minimal(learning_rate=1e-3, report_to=["a", "b"])
    (tmp_path / "base" / "base.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "run.yaml").write_text("extends: base/base.yaml\ntraining: {seed: 7, report_to: [c]}\n")

    config = load_config(tmp_path / "run.yaml", KEYS)

    assert (7, "out") == (config.training.seed, config.training.output_dir)
    assert {"learning_rate": 1e-3, "report_to": ["c"]} == dict(config.training.trainer)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: run.yaml\n", "circle"),
        ("extends: gone.yaml\n", "cannot be read"),
        ("extends: 3\n", "path of a YAML"),
        ("model: [\n", "no valid YAML"),
        ("seed: 1\nseed: 2\n", "written twice"),
        ("- 1\n", "sections"),
        ("", "sections"),
        ("model: 3\n", "a section of keys"),
        ("custom: {source_names: [a]}\n", "pairs, as"),
        ("!!python/object/apply:os.getcwd []\n", "no valid YAML"),
    ],
)
def test_files_that_are_no_configuration_say_why(tmp_path: Path, text, says):
    """Never a traceback, never code that runs."""
    (tmp_path / "run.yaml").write_text(text)

    with pytest.raises(ConfigError, match=says):
        load_config(tmp_path / "run.yaml", KEYS)


@pytest.mark.parametrize(
    ("text", "place", "why", "shown"),
    [
        ("a:\n  b: 1\n   c: 2\n", "line 3, column 5", "keys of one section begin in the same column", "   c: 2\n    ^"),
        ("a: 1\nb: c: d\n", "line 2, column 5", "a text that holds ': ' is quoted", "b: c: d\n    ^"),
        ("a: 1\n- c\n", "line 2, column 1", "'-', while parsing a block mapping that begins in line 1", "- c\n^"),
        ("a:\n\tb: 1\n", "line 2, column 1", "indent with spaces, not with tabs", " b: 1\n^"),
        ("a: [1,\n", "line 2, column 1", "close the bracket", ""),
        ("a: 'x\n", "line 2, column 1", "a quoted scalar that begins in line 1: close the quote", ""),
        ("a: 1\na: 2\n", "line 2, column 1", "the key 'a' is written twice (first in line 1)", "a: 2\n^"),
    ],
)
def test_a_broken_yaml_is_shown_where_it_breaks(tmp_path: Path, text, place, why, shown):
    """The place and what YAML says of it in one line; then the line itself, with a mark below."""
    (tmp_path / "run.yaml").write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "run.yaml", KEYS)

    head, fault, *lines = str(raised.value).split("\n")
    assert f"{tmp_path / 'run.yaml'} has 1 fault:" == head
    assert fault.startswith(f"  is no valid YAML, {place}: ")
    assert why in fault
    assert [f"    {line}" for line in shown.split("\n") if line] == lines


def test_a_byte_that_no_yaml_has_is_named_too(tmp_path: Path):
    """YAML gives its place in characters."""
    (tmp_path / "run.yaml").write_text("a: \x00b")

    with pytest.raises(ConfigError, match=r"is no valid YAML: unacceptable character #x0000.*position 3"):
        load_config(tmp_path / "run.yaml", KEYS)


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path):
    """Both name the file."""
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_config(tmp_path / "gone.yaml", KEYS)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "bytes.yaml", KEYS)


def test_numbers_that_are_none_and_empty_paths_are_faults():
    """Not a number is no share, and no folder is no other run."""
    found = faults_of(minimal(packing_min_fill_ratio=-1, packing_lengths_from="", packing_max_dropped_share=1.1))
    none = faults_of(minimal(packing_min_fill_ratio=math.nan))

    assert {"training.packing_min_fill_ratio": "is nan, but has to be a finite number"} == none
    assert "from 0 to 1" in found["training.packing_min_fill_ratio"]
    assert "is 1.1, but has to be from 0 to 1" in found["training.packing_max_dropped_share"]
    assert "the output_dir of another run" in found["training.packing_lengths_from"]


def test_null_is_as_if_it_were_not_set():
    """Keys with a default count too, ours and ms-swift's."""
    keys = dict.fromkeys(["packing_mode", "seed", "learning_rate", "report_to", "bf16"])

    assert parse(minimal()) == parse(minimal(**keys))


@pytest.mark.parametrize("key", ["effective_batch_size", "seed", "dataloader_num_workers"])
def test_numbers_that_count_nothing_are_refused(key):
    """They would leave 64 bits; ours and ms-swift's."""
    assert "a whole number below 1,000,000,000,000" in faults_of(minimal(**{key: 2**64}))[f"training.{key}"]


def test_no_is_a_word_where_it_is_a_choice():
    """YAML reads it as false, which is none of the choices."""
    choices = TrainerKey(("str",), choices=("no", "steps"))

    assert "no" == choices.checked(False)  # noqa: FBT003
    with pytest.raises(ValueError, match="one of no, steps"):
        choices.checked(True)  # noqa: FBT003


def test_packed_evaluation_without_packing_is_said(caplog):
    """It is not packed; what does not ask for it needs no word."""
    for keys in ({"packing": False}, {"packing": False, "eval_packing": False}, {"eval_packing": True}):
        warn_of_ignored(parse(minimal(**keys)))
    assert not caplog.records

    warn_of_ignored(parse(minimal(packing=False, eval_packing=True)))
    assert [
        "training.eval_packing is true, but training.packing is false, so evaluation is not packed either"
    ] == caplog.messages
