"""Prompts and labels are those that ms-swift's own arguments give, and measuring compares them."""

import contextlib
import shutil
import sys
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

import pytest
import swift.template
from swift import get_model_processor, get_template
from swift.template import TEMPLATE_MAPPING, Template

from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.samples.arguments import swift_types
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.adapters.samples.template import _stop_clock, length_inputs, open_template, render_prompt
from packplan.adapters.swift.command import read_command
from packplan.app.opening.runs import read_config
from packplan.app.opening.splits import open_splits
from packplan.app.plan import __main__ as plan
from packplan.app.sft.stream import prepare_stream
from packplan.core.config.run import ModelConfig, TemplateConfig
from packplan.core.errors import ConfigError, DataSetError
from packplan.core.samples.tables import MeasuredSample
from tests.e2e.test_swift_shapes import compare, dialogue, template_of_swift
from tests.records import chat, write_lines

ASKED = chat(*dialogue("why?", "so.", "and?", "also."))

WEIGHED = chat(
    *dialogue("why?", "so."), dialogue("and?")[0], {"role": "assistant", "content": "also.", "loss_scale": 2}
)

DENSE = {"images": [], "objects": [{"desc": "dot", "bbox_2d": [1, 2, 3, 4]}], "width": 8, "height": 8}


@pytest.mark.parametrize(("system", "text"), [("sys.txt", "Look,\nagain\\n."), (r"Look\nagain.", "Look\nagain.")])
def test_a_system_prompt_is_read_as_ms_swift_reads_it(system, text, open_source, tmp_path, monkeypatch):
    """A text file by its name, which enters the fingerprint, and a line break as two characters."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sys.txt").write_text("Look,\nagain\\n.")
    source, encoder = open_source([ASKED], "qwen2", system=system)

    assert text == encoder.config.template.system
    compare(encoder, 0, ASKED, template_of_swift(encoder, system=system))
    (tmp_path / "sys.txt").write_text("Look away.")
    changed = open_source([ASKED], "qwen2", system=system)[0].fingerprint() != source.fingerprint()
    assert changed == system.endswith(".txt")


def test_tokens_are_read_from_a_file_as_ms_swift_reads_them(write_run, tmp_path):
    """Lengths depend on the tokens, not on the file's name; a missing file is refused."""
    (tmp_path / "tokens.txt").write_text("<a> <b>\n<c>")
    named = [str(tmp_path / "tokens.txt"), "<d>"]
    path = write_run("qwen2", model={"new_special_tokens": named})
    words = ["--model", read_config(path).model.model, "--model_type", "qwen2", "--template", "qwen2_5"]
    theirs, _ = read_command("sft", [*words, "--dataset", "a", "--new_special_tokens", *named])

    assert theirs.new_special_tokens == [*read_config(path).model.new_special_tokens] == ["<a>", "<b>", "<c>", "<d>"]
    (tmp_path / "tokens.txt").unlink()
    with pytest.raises(ConfigError, match=r"model\.new_special_tokens is .*tokens\.txt, .* cannot be read"):
        read_config(path)


def test_a_system_prompt_that_is_no_file_is_refused(write_run):
    path = write_run("qwen2", template={"system": "gone.txt"})
    with pytest.raises(
        ConfigError, match=r"template\.system is gone\.txt, .* but /.*/gone\.txt cannot be read .*: name"
    ):
        read_config(path)


def test_a_folder_of_ms_swift_names_its_template(demo, tmp_path):
    """In its `args.json`; the run's own key comes first, and damage is named."""
    shutil.copytree(demo / "models" / "qwen3", folder := tmp_path / "saved")
    (folder / "args.json").write_text(
        '{"model_type": "qwen3", "template": "qwen3_nothinking", "swift_version": "4.6.0"}'
    )
    saved = ModelConfig(model=str(folder))

    assert ("qwen3", "qwen3_nothinking") == swift_types(saved, TemplateConfig())
    words = ["--model", str(folder), "--dataset", "a.jsonl", "--max_length", "80"]
    assert "qwen3_nothinking" == read_command("sft", words)[0].template
    assert ("qwen3", "qwen3") == swift_types(saved, TemplateConfig(template="qwen3"))
    (folder / "args.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.model has an unreadable args\.json, in "):
        swift_types(saved, TemplateConfig())


@pytest.fixture
def dated_model(demo, tmp_path, monkeypatch):
    """Return a model whose folder has a system prompt with dates; clocks go on after the test."""
    shutil.copytree(demo / "models" / "qwen2", folder := tmp_path / "dated")
    (folder / "SYSTEM_PROMPT.txt").write_text("On {today}, after {yesterday}.")
    for module in ("llm", "mistral", "museglimmer"):
        monkeypatch.setattr(f"swift.template.templates.{module}.datetime", datetime)
    return ModelConfig(model=str(folder))


def test_no_template_writes_another_date_tomorrow(dated_model):
    """
    Each that writes today's is refused without `template.today`, and writes that day with it. All
    modules of ms-swift with a clock have such templates; others take no day.
    """
    processor, modules = get_model_processor(dated_model.model, load_model=False, model_type="qwen2")[1], set()
    today, refused = f"{datetime.now():%Y-%m-%d}", {}  # noqa: DTZ005  # as ms-swift
    for name in TEMPLATE_MAPPING:
        with contextlib.suppress(AttributeError):  # of processors for media
            opened = get_template(processor, template_type=name)
            try:
                _stop_clock(opened, TemplateConfig())
            except ConfigError as error:
                refused[name] = str(error)
                _stop_clock(opened, TemplateConfig(today="2020-02-03"))
                modules |= {kind.__module__.split(".")[-1] for kind in (type(opened), type(opened.template_meta))}
            assert today not in (prompt := render_prompt(opened))
            assert (name in refused) == any(date in prompt for date in ("2020-02-03", "03 Feb 2020"))

    assert {
        f"template.today is not set, but {name} writes today's date into prompts: set one date for the whole run, "
        f"such as {today}" for name in refused
    } == {*refused.values()}  # fmt: skip
    found = Path(swift.template.__file__).parent.rglob("*.py")
    assert {file.stem for file in found if "strftime" in file.read_text()} <= modules
    with pytest.raises(ConfigError, match=r"template\.today is set, but qwen2_5 writes no date"):
        open_template(dated_model, TemplateConfig(template="qwen2_5", today="2020-02-03"), packing_length=80)
    with pytest.raises(ConfigError, match=r"template\.today is not a date: write it as 2"):
        open_template(dated_model, TemplateConfig(template="llama3_2", today="2020-02-30"), packing_length=80)


class WritesDate(Template):
    """Template that writes the date in a notation of its own."""

    def _get_system(self, inputs):
        return f"It is {datetime.now():%A, %d.%m.%y}."  # noqa: DTZ005  # as ms-swift


@pytest.mark.parametrize("notation", ["%A, %d.%m.%y", "%d %B %Y", "%B %d, %Y", "%Y/%m/%d"])
def test_a_date_is_found_in_any_notation(dated_model, monkeypatch, notation):
    """The first is of each prompt, the others have been written since the template was imported."""
    monkeypatch.setattr(sys.modules[__name__], "datetime", datetime)  # clocks go on after the test
    opened = open_template(dated_model, TemplateConfig(template="qwen2_5"), packing_length=80)
    if notation == "%A, %d.%m.%y":
        opened.__class__ = type("Dated", (WritesDate, type(opened)), {"__module__": __name__})
    else:
        text = f"It is {datetime.now().strftime(notation)}."  # noqa: DTZ005  # as ms-swift
        opened.template_meta = replace(opened.template_meta, default_system=text)

    with pytest.raises(ConfigError, match=r"template\.today is not set, but qwen2_5 writes today's date"):
        _stop_clock(opened, TemplateConfig())
    _stop_clock(opened, TemplateConfig(today="2020-02-03"))

    assert f"It is {date(2020, 2, 3).strftime(notation)}." in render_prompt(opened)


def test_the_prompt_of_a_chat_template_is_that_of_its_day(dated_model, monkeypatch):
    """ms-swift's plugin renders by jinja where `template_backend` says so; a plan knows the day."""
    opened = open_template(dated_model, TemplateConfig(template="qwen2_5"), packing_length=80)
    opened.template_backend, opened.tokenizer.chat_template = "jinja", "It is {{ strftime_now('%d %B %Y') }}."

    assert f"It is {datetime.now():%d %B %Y}." == render_prompt(opened)  # noqa: DTZ005  # as transformers


@pytest.mark.usefixtures("dated_model")
def test_a_day_is_part_of_the_fingerprint_and_today_is_as_ms_swift_has_it(open_source):
    """Also that of a system prompt of the model's folder."""
    days = [f"{datetime.now():%Y-%m-%d}", "2020-02-03"]  # noqa: DTZ005  # as ms-swift
    (source, encoder), (other, _) = (open_source([ASKED], "qwen2", template="llama3_2", today=day) for day in days)

    compare(encoder, 0, ASKED, template_of_swift(encoder))
    changed = {one.key for one in source.fingerprint().differences(other.fingerprint())}
    assert {"template.today", "template.prompt"} == changed
    assert render_prompt(encoder.template) == length_inputs(encoder.config, encoder.template).inputs["template.prompt"]


THOUGHT = chat(*dialogue("a", "<think>b</think>c", "d", "e", "f", "<think>g</think>h <note>"))


@pytest.mark.parametrize(
    "keys",
    [
        {"template": {"preserve_thinking": False}},
        {"template": {"preserve_thinking": True, "loss_scale": "last_round"}},
        {"template": {"add_non_thinking_prefix": False}},
        {"template": {"disable_ignore_empty_think": True}},
        {"model": {"new_special_tokens": ["<note>"]}},
    ],
    ids=str,
)
def test_a_key_of_ms_swift_has_its_effect_by_its_own_name(keys, write_run, tmp_path):
    """On tokens, labels and weights of a hybrid thinking template; it enters the fingerprint."""
    path = str(write_lines(tmp_path / "data.jsonl", [THOUGHT]))
    given = {name: one for section in keys.values() for name, one in section.items() if name != "new_special_tokens"}
    plain, ours = (
        open_splits(read_config(write_run("qwen3", custom={"train_jsonl": path}, **more)))["train"]
        for more in ({"template": {"loss_scale": given.get("loss_scale", "default")}}, keys)
    )
    theirs = template_of_swift(ours.encoder, **given, new_special_tokens="<note>" if "model" in keys else None)

    compare(ours.encoder, 0, THOUGHT, theirs)
    assert all(one.measurement for one in ours.source.measure_many(range(1), in_full=False))
    assert ours.encoder.encode(0) != plain.encoder.encode(0)
    changed = {one.key for one in ours.source.fingerprint().differences(plain.source.fingerprint())}
    assert changed >= {f"{section}.{name}" for section, named in keys.items() for name in {*named} - {"loss_scale"}}


def wrapped(change):
    """Return a plan to change what the template of an encoder encodes."""

    def plant(encoder):
        plain = encoder.template.encode
        encoder.template.encode = lambda *given, **more: change(plain(*given, **more))

    return plant


def reading(change):
    """Return a plan to change the messages that an encoder reads of a record."""

    def plant(encoder):
        plain = encoder.read_sample
        encoder.read_sample = lambda index: (sample := plain(index)) | {"messages": change(sample["messages"])}

    return plant


def setting(**values):
    """Return a plan to set attributes of an encoder's template."""
    return lambda encoder: vars(encoder.template).update(values)


PLANTED = {
    "the bare loss scale": (ASKED, setting(_loss_scale="default"), "label"),
    "another strategy": (ASKED, setting(_loss_scale="last_round+ignore_empty_think"), "token"),
    "no prefix of thoughts": (ASKED, setting(add_non_thinking_prefix=False), "token"),
    "thoughts of earlier turns": (
        chat(*dialogue("a", "<think>b</think>c", "d", "e")), setting(preserve_thinking=False), "token"
    ),
    "an untrained end": (ASKED, wrapped(lambda one: {**one, "labels": [*one["labels"][:-1], -100]}), "label"),
    "labels of the next token": (
        ASKED, wrapped(lambda one: {**one, "labels": [*one["labels"][1:], -100]}), "label"
    ),
    "a lost token": (
        ASKED, wrapped(lambda one: {**one, "input_ids": one["input_ids"][:-1], "labels": one["labels"][:-1]}), "token"
    ),
    "no weights": (WEIGHED, wrapped(lambda one: {**one, "loss_scale": None}), "weight"),
    "a lost turn": (ASKED, reading(lambda messages: messages[2:]), "token"),
    "a stripped text": (chat(*dialogue(" a", "b ")), reading(
        lambda messages: [{**one, "content": one["content"].strip()} for one in messages]), "token"),
    "a system prompt that the record has not": (
        {**ASKED, "system": ""}, reading(lambda messages: messages[1:]), "token"
    ),
    "a dense caption's end": (DENSE, wrapped(lambda one: {**one, "labels": [*one["labels"][:-1], -100]}), "label"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_the_first_sample_of_each_kind_is_compared_with_ms_swift(case, open_source):
    """By name: the sample, the position, and both values; the shortcut hides none."""
    record, plant, name = PLANTED[case]
    source, encoder = open_source([record], "qwen3")
    assert [MeasuredSample] == [type(one) for one in source.measure_many(range(1), in_full=False)]
    plant(encoder)

    for in_full in (False, True):
        with pytest.raises(
            DataSetError, match=rf"line 1: {name} [\d,]+ of [\d,]+ is [-\w.]+, but ms-swift has [-\w.]+, near"
        ):
            list(SwiftMeasurer(encoder).measure_many(range(1), in_full=in_full))
    with pytest.raises(DataSetError, match=f"line 1: {name} "):
        SwiftMeasurer(encoder).measure_in_full(0)


RUNS = {
    "stream": {"custom": {"trainer_variant": "rollout"}, "training": {"packing_mode": "dynamic", "max_steps": 1}},
    "skips bad records": {"custom": {"on_bad_record": "skip", "max_bad_share": 1}},
    "stored": {},
}
"""Kind of run -> its settings."""


@pytest.mark.parametrize("kind", RUNS)
def test_every_run_is_compared_with_ms_swift_before_a_step(kind, write_run, execute, monkeypatch):
    """A stream, one that skips bad records, and one whose lengths are all stored."""
    path = write_run("qwen2", **RUNS[kind])
    if kind == "stored":
        assert 0 == plan.main(["build", str(path), "--quiet"])
    plain = SwiftEncoder.apply_template

    def lose_label(self, index, sample):
        encoded = plain(self, index, sample)
        return {**encoded, "labels": [*encoded["labels"][:-1], -100]}

    monkeypatch.setattr(SwiftEncoder, "apply_template", lose_label)
    with pytest.raises(DataSetError, match=r"line \d+: label .*, but ms-swift has"):
        prepare_stream(read_config(path), OneRank()) if kind == "stream" else execute(path)
