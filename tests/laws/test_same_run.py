"""Ranks agree on a run exactly if each key that decides training has one value on all."""

import json
import re
from dataclasses import make_dataclass
from pathlib import Path

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.adapters.config.run import SECTIONS, known_keys
from packplan.adapters.config.trainer_keys import SFT_KEYS_FILE
from packplan.core.config.identity import (
    FIXED_ARGUMENTS,
    PATH_KEYS,
    PER_RANK,
    UNCOMPARED,
    flat_values,
    rank_differences,
    run_identity,
    shared_values,
)
from packplan.core.config.keys import key_facts, yield_keys
from packplan.core.config.run import LOADS, TRAINS, CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.config.tuners import UNSET
from packplan.core.errors import RankDifference
from packplan.core.fingerprint import Fingerprint, RunIdentity
from tests.laws.test_keys import changed

values = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["1", "2", "true"]), max_size=6)
runs_of_ranks = st.lists(values, min_size=1, max_size=5)

RUN = RunConfig(
    model=ModelConfig(model="m"), template=TemplateConfig(max_length=8), custom=CustomConfig(train_jsonl=("t",)),
    training=TrainingConfig(output_dir="o"),
)  # fmt: skip


@given(runs_of_ranks)
def test_the_keys_that_differ_are_named_each_with_the_value_of_every_rank(runs):
    """A missing key differs too, and digests are equal exactly where nothing differs."""
    found = rank_differences(runs)

    event(f"a key is missing somewhere: {any(None in one.values for one in found)}")
    by_key = {key: tuple(run.get(key) for run in runs) for run in runs for key in run}
    assert {key: held for key, held in by_key.items() if set(held) != {held[0]}} == {
        one.key: one.values for one in found
    }
    assert sorted(one.key for one in found) == [one.key for one in found]
    assert (not found) == (1 == len({Fingerprint(run).digest for run in runs}))


def identity(**training) -> RunIdentity:
    """Identity of `RUN` with other keys of `training.`, of ours and of the trainer."""
    ours = {name: training.pop(name) for name in [*training] if name in attrs.fields_dict(TrainingConfig)}
    run = attrs.evolve(RUN, training=attrs.evolve(RUN.training, **ours, trainer=training))
    return run_identity(run, files={}, model={"model.model config.json": "a1"})


@pytest.mark.parametrize(
    ("keys", "refused", "told"),
    [
        ({"loss_reduction": "sample"}, True, False), ({"warmup_ratio": 0.1}, True, False),
        ({"optim": "sgd"}, True, False),
        ({"lora_rank": 4}, True, False), ({"vera_rank": 4}, True, False), ({"freeze_vit": True}, True, False),
        ({"max_steps": 9}, False, True), ({"effective_batch_size": 9}, False, True), ({"bf16": True}, False, True),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, False, True),
        ({"output_dir": "p"}, False, False), ({"save_steps": 9}, False, False), ({"learning_rate": 1.0}, True, False),
        ({"resume_from_checkpoint": "last"}, False, False), ({"packing_algorithm": "certified"}, False, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_changed_setting_is_refused_or_told_or_decides_no_step(keys, refused, told):
    """By the table of the page, which names each that is refused."""
    then, now = identity(), identity(**keys)

    assert (refused, told) == (then.fixed != now.fixed, then.changeable != now.changeable)
    page = Path("docs/training.md").read_text()
    names = FIXED_ARGUMENTS - {"freeze_llm", "freeze_vit"}
    listed = page.split("- `loss_reduction`")[1].split("which the optimizer")[0]
    assert {*names} == {"loss_reduction", *re.findall(r"`(\w+)`", listed)}, "docs/training.md lists them"
    known = {*json.loads(SFT_KEYS_FILE.read_text())["keys"], *attrs.fields_dict(TrainingConfig)}
    assert known >= FIXED_ARGUMENTS


@pytest.mark.parametrize("key", UNSET)
def test_a_key_of_a_tuner_is_compared_by_its_default_where_it_is_not_set(key):
    """Between ranks and with a checkpoint, which each have its value."""
    stated = {key: UNSET[key]}

    assert identity() == identity(**stated)
    assert f"training.{key}" in identity().fixed.inputs
    assert shared_values(RUN, {}) == shared_values(with_trainer(**stated), {})


def test_a_resumed_run_keeps_samples_weights_and_which_of_them_are_trained():
    """
    Also where samples keep their lengths, since their labels may be others. Other settings of a
    step may change, but for the listed ones, and are told.
    """
    plain = run_identity(RUN, files={}, model={})
    for key, field in yield_keys(RunConfig):
        facts, name = key_facts(field), key.partition(".")[2]
        of_samples = (facts.lengths or "").startswith("value") and name != "truncation_strategy"
        if of_samples or (facts.neither in {LOADS, TRAINS} and not UNCOMPARED.fullmatch(name)):
            other = run_identity(changed(RUN, key, "b"), files={}, model={})
            keeps = of_samples or facts.neither != TRAINS or name in FIXED_ARGUMENTS
            differing = [one.key for one in plain.fixed.differences(other.fixed)]
            assert ([key] * keeps, keeps) == (differing, plain.changeable == other.changeable), key


@pytest.mark.parametrize("key", [path for path in known_keys(RunConfig) if path not in SECTIONS])
def test_every_key_is_compared_but_for_those_that_say_why_not(key):
    """Those of sections in sections too; of a path, whether it is set."""
    plain, other = shared_values(RUN, {}), shared_values(changed(RUN, key, "another"), {})

    expected = [] if key in PER_RANK else [key]
    if key in PATH_KEYS and key in plain:
        assert plain == other
        expected = [key]
        other = shared_values(changed(RUN, key, ()), {})
    assert expected == [one.key for one in rank_differences([plain, other])]


def with_trainer(**keys: object) -> RunConfig:
    return attrs.evolve(RUN, training=attrs.evolve(RUN.training, trainer=keys))


def test_keys_of_the_trainer_are_compared_too():
    """Sections are compared key by key, and files of settings by their content."""
    plain = shared_values(RUN, {})
    for name in json.loads(SFT_KEYS_FILE.read_text())["keys"]:
        if name in {field.name for field in attrs.fields(TrainingConfig)}:
            continue
        other = shared_values(with_trainer(**{name: 1}), {})
        key = f"training.{name}"
        assert ([] if key in PER_RANK else [key]) == [one.key for one in rank_differences([plain, other])]
    stage = {"training.deepspeed": {"zero_optimization": {"stage": 2}}}
    of_file = shared_values(with_trainer(deepspeed="ds.json"), stage)
    assert "2" == of_file["training.deepspeed.zero_optimization.stage"]
    assert of_file == shared_values(with_trainer(deepspeed=stage["training.deepspeed"]), {})


def test_every_key_of_a_path_is_said_to_be_one():
    """Else paths that differ between machines would be refused; `last` is a choice, not a path."""
    of_trainer = json.loads(SFT_KEYS_FILE.read_text())["keys"]

    assert PATH_KEYS >= {f"training.{name}" for name, key in of_trainer.items() if key.get("path")}
    assert {"training.output_dir", "custom.train_jsonl"} < PATH_KEYS
    resumed = [changed(RUN, "training.resume_from_checkpoint", path) for path in ("last", "a", "b")]
    last, one, two = (shared_values(config, {})["training.resume_from_checkpoint"] for config in resumed)
    assert last != one == two


def test_values_keep_their_types_and_tell_no_secret():
    """1 is not true, a text is no number, and nothing is like an empty section."""
    assert flat_values({"a": {}, "b": None}) == {}
    assert 4 == len(set(flat_values({"a": 1, "b": True, "c": "1", "d": 1.5}).values()))
    assert "/" not in flat_values({"a": Path("x")})["a"]
    assert {"a": '["x", "y"]', "b": '"<object object>"'} == flat_values({"a": {"y", "x"}, "b": object()})
    lora = make_dataclass("Lora", ["hf_token", "targets"])("hf_secret", {"y", "x"})
    assert {"a": '{"targets": ["x", "y"]}'} == flat_values({"a": lora, "wandb_api_key": "secret"})
    assert "hf_secret" not in str(shared_values(with_trainer(hub_token="hf_secret"), {}))  # noqa: S106


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_values_that_are_alike_for_long_are_shown_from_where_they_differ(before, behind):
    """Both can be told apart, and their ends are marked as left out."""
    one, two = ("=" * before + word + "=" * behind for word in ("left", "right"))

    text = str(RankDifference("template.system", (one, two)))

    left, right = text.split(" on rank 0; ")
    assert "left" in left
    assert "right" in right
    assert ("…=" in right) == (len(two) > 80 and before > 20)
    assert len(text) < 250


@pytest.mark.parametrize(("num", "named"), [(1, "rank 0"), (3, "ranks 0, 1, 2"), (4, "ranks 0, 1, 2 and 1 more")])
def test_the_first_ranks_of_a_value_are_named_and_the_others_counted(num, named):
    assert f"seed: 7 on {named}; 8 on rank {num}" == str(RankDifference("seed", ("7",) * num + ("8",)))
