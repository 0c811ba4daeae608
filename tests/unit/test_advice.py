"""Advice on unknown keys points to the right place, and never to a key of another meaning."""

import json
import re
from itertools import chain
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from packplan.adapters.config.run import known_keys, load_mixes, parse_config
from packplan.adapters.config.trainer_keys import FOREIGN_KEYS_FILE, SFT_KEYS_FILE, read_foreign_keys
from packplan.core.config.faults import explain_unknown_key, similar_keys
from packplan.core.config.refusals import Host, active_refusals, refused_settings
from packplan.core.config.remedies import REMEDIES, name_arguments
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError
from tests.documents import KEYS, faults_of

REFUSED = {key: str(refusal) for key, refusal in refused_settings("sft").items()}

PATHS = sorted({*known_keys(RunConfig), *(f"training.{key}" for key in set(KEYS) - set(REFUSED))})

NAMES = [path.rpartition(".")[2] for path in PATHS]


@pytest.mark.parametrize("level", ["", "model", "template", "custom", "training"])
def test_every_key_at_every_wrong_level_is_told_its_right_one(level):
    """Ours and ms-swift's, and sections, in each section that does not have them."""
    wrong = {path: f"{level}.{path.rpartition('.')[2]}".lstrip(".") for path in PATHS}
    wrong = {path: place for path, place in wrong.items() if place not in PATHS}
    assert len(wrong) >= 40

    found = faults_of(dict.fromkeys(wrong.values(), 1))

    for path, place in wrong.items():
        said, _, advice = found[place].partition(": write ")
        assert f"is not a key of {level or 'the top level'}" == said
        assert path in advice.split(" or "), place


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refused_key_at_a_wrong_level_is_told_why(key):
    """And not to be written where it is refused as well; a misspelling of it neither."""
    assert REFUSED[key] == faults_of({key: 1})[key] == faults_of({f"training.{key}": 1})[f"training.{key}"]
    typo = key + key[-1]
    reason = faults_of({f"training.{typo}": 1})[f"training.{typo}"]
    assert f"is unknown; {key}, which it resembles, {REFUSED[key]}" == reason


@pytest.mark.parametrize("host", get_args(Host))
def test_a_host_refuses_what_is_on(host):
    """Switches, sizes above 1, settings of a section; not what is absent, off, or a size of 1."""
    settings = refused_settings(host)
    assert settings
    sizes = {name for name in settings if name.endswith("_size")}
    for value, told in ((True, {*settings}), (2, {*settings}), (1, {*settings} - sizes), (False, set()), (None, set())):
        section = SimpleNamespace(**{name.rpartition(".")[2]: value for name in settings})
        section.accelerator_config = section
        assert told == {one.setting for one in active_refusals(section, host)}
    assert all(str(one).startswith(f"{one.effect}: ") for one in settings.values())
    assert not [*active_refusals(object(), host)]


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        *((path, "remove it") for path in ("tile_size", "training.min_patches", "template.fp8", "training.adam_beta3",
                                           "training.min_steps", "x", "é", "training.3")),
        ("training.packing_bufer", "did you mean packing_buffer?"),
        ("training.learningRate", "did you mean learning_rate?"),
        ("learning-rate", "did you mean training.learning_rate?"),
        ("training.max_pixel", "did you mean template.max_pixels?"),
        ("training.per_device_batch_size", "did you mean per_device_eval_batch_size or per_device_train_batch_size?"),
        ("traning.a", "did you mean training?"),
    ],
)  # fmt: skip
def test_a_misspelling_names_what_it_misspells_and_no_key_of_another_meaning(path, advice):
    """Keys of this section before those of others; a maximum is no minimum, and 8 is not 16."""
    assert f"is unknown: {advice}" == faults_of({path: 1})[path.removesuffix(".a")]


@pytest.mark.parametrize("level", ["", "training", "custom", "model"])
def test_a_key_of_another_program_is_answered_with_ours(level):
    """
    In every section, whatever it holds; ours exists. A key that nothing replaces is told so, with
    the reason if it is an argument of `swift sft`.
    """
    prefix = f"{level}." if level else ""
    rows = json.loads(FOREIGN_KEYS_FILE.read_text())
    programs = {*chain.from_iterable(rows)} - {"here", "about"}
    ours = {name: row["here"] for row in rows for program in programs for name in row.get(program, "").split()}
    known = {path.rpartition(".")[2] for path in known_keys(RunConfig)} | {*KEYS}
    asked = {name: key for name, key in ours.items() if name in read_foreign_keys() and name not in known}
    assert len(asked) > 150
    assert {"training.learning_rate", ""} < {*asked.values()} < {*PATHS, ""}
    others = json.loads(SFT_KEYS_FILE.read_text())["others"]

    found = faults_of(dict.fromkeys((f"{prefix}{name}" for name in (*asked, *others)), 2))

    told = {name: found[f"{prefix}{name}"] for name in (*asked, *others)}
    due = {name: f": write {key}" if key else ": remove it" for name, key in asked.items()}
    assert [] == [name for name, advice in due.items() if advice not in told[name]]
    assert [] == [name for name in others if re.match("is unknown|.*has no counterpart", told[name])]


def test_the_optimizer_of_axolotl_is_not_that_of_ms_swift():
    """One names an algorithm, the other a grouping of weights; both places name the first."""
    found = faults_of({"optimizer": "adamw_torch"}, optimizer="adamw_torch")

    assert "is not a key of the top level: write training.optim or training.optimizer" == found["optimizer"]
    assert found["training.optimizer"].endswith(", or write training.optim if you mean the key of axolotl")


def test_a_key_that_an_advice_names_is_not_said_to_be_missing():
    """By another program's name, in another place, or with a typo; other keys are."""
    wrong = {"base_model": "m", "datasets": "d", "template": {"max_lenght": 9}}

    with pytest.raises(ConfigError) as raised:
        parse_config(wrong, "axolotl.yaml", KEYS)

    found = {fault.path for fault in raised.value.faults}
    assert {"training.output_dir", "template.max_lenght", "base_model", "datasets"} == found


def test_a_mix_has_the_same_advice(tmp_path):
    known = ["policy.sequence_packing.enabled"]
    dotted = explain_unknown_key("sequence_packing.enabled", "policy", known, refused={}, foreign={})
    assert "is written with a dot: write enabled in the section policy.sequence_packing" == dotted
    mix = tmp_path / "mix.yaml"
    mix.write_text("sources: [{jsonl: a, ratio: 1}, {jsnl: b, samples_per_epoch: 3}]\ncount: 1\n")

    with pytest.raises(ConfigError) as raised:
        load_mixes(mix)

    assert {
        "sources[1].jsnl": "is unknown: did you mean jsonl?",
        "sources[1].samples_per_epoch": "is not a key of sources[]: write samples_per_epoch",
        "count": "is not a key of the top level: write sources[].count",
    } == {fault.path: fault.reason for fault in raised.value.faults}


@given(name=st.sampled_from([name for name in NAMES if len(name) > 4]), data=st.data())
def test_one_letter_off_is_found(name, data):
    """Left out, doubled, or swapped with the next, in words that a key has alone."""
    words = ((at + 1, name[at : at + 4]) for at in range(len(name) - 3))
    starts = [at for at, word in words if word.isalpha() and word[:3] not in {"min", "max"}]
    assume(starts)
    at = data.draw(st.sampled_from(starts))
    head, tail = name[:at], name[at + 2 :]
    wrong = data.draw(st.sampled_from([name[at + 1], name[at] * 2 + name[at + 1], name[at + 1] + name[at]]))

    assert head + wrong + tail in NAMES or name in similar_keys(head + wrong + tail, NAMES)


@pytest.mark.parametrize(
    ("of_yaml", "of_command"),
    [
        ("training.dataloader_drop_last: false trains them", "--dataloader_drop_last false trains them"),
        ("training.packing_allow_single_long: false skips long", "a lower --max_length skips long"),
        ("training.gradient_accumulation_steps: 1,204 gives", "--gradient_accumulation_steps 1,204 gives"),
        ("with template.max_length: 90, 95 % fit", "with --packing_length 90, 95 % fit"),
        ("5 of which are truncated (template.max_length): 1..5", "5 of which are truncated (--max_length): 1..5"),
        ("swift.max_length was 8, now 9; custom.val_jsonl is", "--max_length was 8, now 9; --val_dataset is"),
        ("since packing_length was 8, now 9", "since --packing_length was 8, now 9"),
        ("--packing_length was 8, now 9", None),
        ("model.safetensors in run/model.model, of python -m swift.cli.sft", None),
        ("training.jsonl, record 3 of template.json: a file is no key, nor are training.csv and model.py", None),
        ("template.prompt was 'a', now 'training.'", None),
        ("lower training.packing_length_precompute_workers", None),
    ],
)  # fmt: skip
def test_a_message_about_a_command_names_its_arguments(of_yaml, of_command):
    """With their values, as ms-swift calls them; files, modules and fingerprints stay."""
    assert (of_yaml if of_command is None else of_command) == name_arguments(of_yaml)


def test_remedies_for_a_command_name_no_key():
    """Except of errors that only a run of a YAML can have."""
    of_yaml = {"batch_size", "all_skipped", "all_dropped", "dropped_tokens", "borrowed_lengths", "table_lengths"}

    named = {
        kind
        for kind, text in REMEDIES.items()
        if re.search(r"(?:custom|training|template)\.|packing_(?!length)", name_arguments(text))
    }

    assert named <= of_yaml
