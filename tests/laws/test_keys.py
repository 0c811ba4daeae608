"""Every key of a run declares once how it enters stored lengths and plans, and both obey."""

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs
import pytest

from packplan.adapters.config.run import parse_config
from packplan.app.opening.policies import policy_of_split
from packplan.core.config.faults import run_faults
from packplan.core.config.identity import config_length_inputs, plan_policy, stream_inputs
from packplan.core.config.keys import key_facts, yield_keys
from packplan.core.config.run import RunConfig
from packplan.core.fingerprint import Fingerprint
from tests.laws.test_work import TEXT


def run(**sections: dict[str, object]) -> RunConfig:
    """Return a run with these keys beside the ones that every run needs."""
    least = {
        "model": {"model": "m"}, "template": {"max_length": 80}, "custom": {"train_jsonl": "a.jsonl"},
        "training": {"output_dir": "out"},
    }  # fmt: skip
    return parse_config({name: {**keys, **sections.get(name, {})} for name, keys in least.items()}, "run.yaml", {})


def length_inputs(config: RunConfig) -> dict[str, object]:
    return config_length_inputs(config)


@pytest.mark.parametrize(
    ("sections", "digests"),
    [
        ({}, ["3da729f5f1696655", "4e018f28bbeb4101", "d602e9e48b8d381a"]),
        ({"training": {"eval_packing": False}}, ["3da729f5f1696655", "4e018f28bbeb4101", "d5b8f7cc91e04d7c"]),
        (
            {"template": {"system": "Look.", "agent_template": "hermes", "loss_scale": "last_round", "max_pixels": 784,
                          "truncation_strategy": "raise"},
             "training": {"packing_algorithm": "first_fit_shuffle", "seed": 7, "packing_min_fill_ratio": 0.5,
                          "packing_allow_single_long": False}},
            ["85a135b83cfde42d", "090b6f1113962441", "290d390fca2202f4"],
        ),
        (
            {"template": {"truncation_strategy": "left"},
             "custom": {"object_field_order": "geometry_first", "use_summary": True,
                        "columns": {"q": "query", "a": "response"}},
             "training": {"packing_algorithm": "balanced", "packing_drop_last": False}},
            ["6b3727f07274a1d4", "1a18bac50a47997a", "1a18bac50a47997a"],
        ),
        (
            {"template": {"fps": 0.5, "fps_min_frames": 2, "fps_max_frames": 8, "video_min_pixels": 784,
                          "video_max_pixels": 7840, "video_total_pixels": 78400},
             "training": {"packing": False, "packing_allow_single_long": False}},
            ["d9fdbc1b6e05cb18", "78a5e9871572de28", "78a5e9871572de28"],
        ),
    ],
)  # fmt: skip
def test_golden_fingerprints_of_lengths_and_of_both_plans(sections, digests):
    """Another digest would measure, or plan, every stored data set again."""
    config = run(**sections)
    plans = [plan_policy(config, split).fingerprint("d") for split in ("train", "eval")]

    found = [one.digest[:16] for one in (Fingerprint(length_inputs(config)), *plans)]
    assert digests == found, "meant? write them here, and tell users in CHANGELOG.md"


DECLARED = dict(yield_keys(RunConfig))

OTHERWISE = {
    "model.model", "model.model_type", "model.max_model_len", "template.template", "template.max_length",
    "custom.train_jsonl", "custom.val_jsonl", "custom.media_dir", "global_max_length",
}  # fmt: skip
"""Keys that enter `length_inputs` under another name, or by what they name."""

SIZES = {
    "model_type": "glm4v", "text_config": {**TEXT, "model_type": "glm4v_text"},
    "vision_config": {
        "attention_bias": False, "image_size": 8, "depth": 2, "hidden_size": 4, "out_hidden_size": 8, "patch_size": 2,
        "intermediate_size": 6, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2,
    },
}  # fmt: skip
"""Sizes of a model with a vision tower, whose work is known."""

VALUES = {
    int: 7, float: 0.25, Decimal: Decimal("0.25"), str: "certified", Annotated: "certified", tuple: ("x",),
    dict: {"q": "query"}, Mapping: {"q": "query"},
}  # fmt: skip
"""Kind of a key -> a value that is no default."""


def other_value(kind: Any, value: object) -> object:
    """Return a value of a kind other than *value*."""
    if get_origin(kind) in {Union, UnionType}:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return next(choice for choice in reversed(get_args(kind)) if choice != value)
    return value is False if kind is bool else VALUES[get_origin(kind) or kind]


def changed(config: Any, path: str, *given: object) -> Any:
    """Return a configuration with another value of one key, *given* or not."""
    name, _, rest = path.partition(".")
    value, kind = getattr(config, name), getattr(attrs.fields(type(config)), name).type
    other = changed(value, rest, *given) if rest else given[0] if given else other_value(kind, value)
    return attrs.evolve(config, **{name: other})


def digests_of_plans(config: RunConfig) -> list[str]:
    return [policy_of_split(config, split).fingerprint("d").digest for split in ("train", "eval")]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Runs, one of which at least depends on each key that any depends on; their fingerprints."""
    model = {"model": str(tmp_path_factory.mktemp("model"))}
    Path(model["model"], "config.json").write_text(json.dumps(SIZES))
    configs = [
        run(model=model, training={"packing_algorithm": "balanced"}),
        run(template={"truncation_strategy": "left"}, training={"packing_algorithm": "first_fit_shuffle"}),
        run(model={"max_model_len": 80}, template={"max_length": None}),
    ]
    return [(config, length_inputs(config), digests_of_plans(config)) for config in configs]


@pytest.mark.parametrize("path", DECLARED)
def test_fingerprints_depend_on_exactly_the_keys_that_declare_it(path, bases):
    """Another value changes the fingerprint of some run, or of none, for a reason that is given."""
    facts, others = key_facts(DECLARED[path]), [changed(config, path) for config, _, _ in bases]
    by_length = any(inputs != length_inputs(other) for (_, inputs, _), other in zip(bases, others, strict=True))
    by_plan = any(digests != digests_of_plans(other) for (_, _, digests), other in zip(bases, others, strict=True))

    assert bool(facts.lengths or facts.plan) != bool(facts.neither), "its field needs lengths=, plan= or neither="
    assert by_plan == facts.plan, "plan= says whether plan_policy of core/config/identity.py reads the key"
    assert (path in length_inputs(others[0])) == (facts.lengths in {"value", "value if set"})
    assert by_length == bool(facts.lengths) or path in OTHERWISE, "length_inputs of adapters/samples/template.py"
    assert (path in OTHERWISE) == ("otherwise" == facts.lengths), "where it enters length_inputs, write it here"


STREAM = {"custom": {"trainer_variant": "rollout"}, "training": {"packing_mode": "dynamic", "max_steps": 1}}

READ_ELSEWHERE = {
    "training.freeze_llm": "decides which weights are trained",
    "training.freeze_vit": "decides which weights are trained",
    "training.eval_packing": "decides the evaluation",
    "custom.trainer_variant": "decides whether it is a stream",
}
"""Keys of a stream that change no inputs of its training data -> what they change."""


@pytest.mark.parametrize("path", DECLARED)
def test_a_stream_reads_or_refuses_every_key(path):
    """Another value changes samples or packs, is refused by name, or does neither."""
    facts, stream = key_facts(DECLARED[path]), run(**STREAM)
    other = changed(stream, path)
    is_refused = path in {fault.path for fault in run_faults(other)}
    decides = length_inputs(stream) != length_inputs(other) or stream_inputs(stream) != stream_inputs(other)

    assert not (facts.stream and decides)
    if facts.stream == "evaluation":  # whose lengths are those of a plan
        evaluated = run(**{**STREAM, "custom": {**STREAM["custom"], "val_jsonl": "b.jsonl"}})
        assert path not in {fault.path for fault in run_faults(changed(evaluated, path))}
    assert is_refused or not facts.stream
    if facts.plan and facts.lengths != "otherwise" and not path.startswith(tuple(READ_ELSEWHERE)):
        assert is_refused or decides


LEAST = {"training.seed": 0, "training.max_steps": -1, "template.fps_max_frames": 2}
"""Keys that take whole numbers, but not from 1 on."""


@pytest.mark.parametrize(
    ("path", "check"),
    [
        (path, key_facts(field).check)
        for path, field in yield_keys(RunConfig)
        if int in (field.type, *get_args(field.type)) and path != "model.quant_bits"  # 4 or 8
    ],
)
def test_whole_numbers_are_taken_from_one_on(path, check):
    """But for those that are listed with another number."""
    least = next(number for number in range(-3, 4) if not [*check(number)])
    assert LEAST.get(path, 1) == least, f"{path} takes {least}: add check=at_least(1) to it, or list it in LEAST"
