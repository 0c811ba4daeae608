"""Tools, calls and weights of the loss are read as ms-swift reads them."""

import json

import pytest

from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.app.opening.runs import read_config
from packplan.app.opening.splits import open_encoders
from packplan.core.errors import ConfigError, RecordError
from tests.e2e.ready import measured
from tests.e2e.test_swift_shapes import compare, loaded_by_swift, template_of_swift, write

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "default": None}, "b": {}}},
    },
}
BARE = {"name": "look", "description": "Looks something up.", "parameters": {}}
ASKED = {"role": "user", "content": "1 and 2?"}
SAID = {"role": "assistant", "content": "<think>\n\n</think>\n\nThree."}
ARGUMENTS = {"b": 2, "a": 1}
CALLED = {"role": "tool_call", "content": json.dumps({"name": "add", "arguments": ARGUMENTS})}
GIVEN = {"role": "tool_response", "content": json.dumps({"sum": 3})}

ROWS = {
    "roles": {"tools": [ADD, BARE], "messages": [ASKED, CALLED, CALLED, GIVEN, GIVEN, SAID]},
    "tools as a text": {"tools": json.dumps([ADD, BARE]), "messages": [ASKED, CALLED, GIVEN, SAID], "system": "Be."},
    "a tool as a text": {"tools": [json.dumps(ADD)], "messages": [ASKED, SAID]},
    "roles of ShareGPT": {
        "tools": json.dumps([ADD]),
        "conversations": [
            {"from": "human", "value": "1 and 2?"}, {"from": "function_call", "value": CALLED["content"]},
            {"from": "observation", "value": "3"}, {"from": "gpt", "value": "Three."},
        ],
    },
    "tool_calls": {
        "tools": [ADD],
        "messages": [
            ASKED,
            {"role": "assistant", "content": "Wait.", "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}},
                {"id": "y", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "y", "content": "second"},
            {"role": "tool", "tool_call_id": "x", "content": "first"}, SAID,
        ],
    },
    "tool_use": {
        "tools": [ADD],
        "messages": [
            ASKED,
            {"role": "assistant", "content": [{"type": "text", "text": "Wait."},
                                              {"type": "tool_use", "id": "x", "name": "add", "input": ARGUMENTS}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "3"}]}, SAID,
        ],
    },
    "objects": {
        "tools": ADD, "messages": [
            ASKED, {"role": "tool_call", "content": {"name": "add", "arguments": ARGUMENTS}},
            {"role": "tool_response", "content": {"sum": None, "a": "é"}}, SAID]},
    "a call at the end": {"tools": [ADD], "messages": [ASKED, CALLED]},
    "tools beside columns": {"tools": [ADD], "query": "1 and 2?", "response": "3"},
    "an answer behind a question": {"tools": [ADD], "messages": [ASKED, GIVEN, SAID]},
    "weights": {"messages": [
        ASKED, {**SAID, "loss": False}, ASKED, {**SAID, "loss_scale": 0.25}, ASKED,
        {"role": "assistant", "content": "a", "loss": True}, {"role": "assistant", "content": "b", "loss_scale": 3}]},
    "weights of calls": {
        "tools": [ADD], "messages": [ASKED, {**SAID, "loss_scale": 2}, {**CALLED, "loss_scale": 0.5}, GIVEN, SAID]},
    "words of agents": {"messages": [
        ASKED, {"role": "assistant", "content": "Thought: add.\nAction: add\nAction Input: {}\nObservation: 3"},
        ASKED, {"role": "assistant", "content": "Thought: I know.\nFinal Answer: 3"}]},
}  # fmt: skip

AGENTS = ["hermes", "react_en", "qwen_en", "toolbench", "glm4_5", "llama3", "deepseek_v3_1"]

SCALES = [
    "default", "last_round", "all", "react", "last_round+hermes", "agentflan", "alpha_umi", "qwen",
    "ignore_empty_think+hermes",
]  # fmt: skip

WITHOUT_QUESTION = {"toolbench", "llama3", "deepseek_v3_1", "qwen_en"}
"""Notations that have no words for an answer without a call: ms-swift refuses such a record."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write each record into a file of its own."""
    folder = tmp_path_factory.mktemp("rows")
    paths = {case: folder / f"{number}.jsonl" for number, case in enumerate(ROWS)}
    for case, path in paths.items():
        write(path, [ROWS[case]])
    return paths


@pytest.fixture(scope="module")
def loaded(files):
    """Return the records as ms-swift's own loading gives them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_CACHE", str(next(iter(files.values())).parent / "modelscope"))
        rows = {case: loaded_by_swift(path)[0] for case, path in files.items()}
    return {case: {key: held for key, held in row.items() if held is not None} for case, row in rows.items()}


@pytest.fixture
def encoder(write_run):
    """Return a function that opens files as a run does, under settings."""

    def opened(*paths, of="qwen2", **template):
        run = write_run(of, custom={"train_jsonl": [*map(str, paths)]}, template=template)
        return open_encoders(read_config(run))["train"]

    return opened


@pytest.mark.parametrize("agent", AGENTS)
def test_tools_have_the_tokens_and_labels_that_ms_swift_gives_them(agent, encoder, files, loaded):
    """In every notation of calls, under each agent template."""
    samples = encoder(*files.values(), agent_template=agent)
    theirs = template_of_swift(samples, agent_template=agent)
    for index, case in enumerate(files):
        if case == "an answer behind a question" and agent in WITHOUT_QUESTION:
            with pytest.raises(RecordError, match="does not support standalone tool responses"):
                samples.encode(index)
            continue
        compare(samples, index, loaded[case], theirs)


HYBRID = ["default", "last_round", "all", "last_round+hermes"]


@pytest.mark.parametrize(
    ("of", "scale"), [*(("qwen2", scale) for scale in SCALES), *(("qwen3", scale) for scale in HYBRID)]
)
def test_tokens_weigh_what_ms_swift_says(of, scale, encoder, files, loaded):
    """
    Each record measures the same by its texts and in full. Hybrid thinking templates do not train
    empty thoughts.
    """
    samples = encoder(*files.values(), of=of, loss_scale=scale)
    theirs = template_of_swift(samples, loss_scale=scale)
    found = {case: compare(samples, index, loaded[case], theirs) for index, case in enumerate(files)}
    assert all(one.measurement for one in measured(SwiftMeasurer(samples)))
    assert "loss_scale" in found["weights"]


def test_what_a_template_cannot_tell_is_refused(encoder, files, tmp_path):
    for key in ("agent_template", "loss_scale"):
        with pytest.raises(ConfigError, match=rf"template\.{key}.* (has|is) '?mine'?, but"):
            encoder(files["roles"], **{key: "mine"})
    write(silent := tmp_path / "silent.jsonl", [{"messages": [{**ASKED, "loss": False}, SAID]}])
    samples = encoder(files["roles"], silent)
    samples.template._agent_template = None
    assert samples.encode(1)
    with pytest.raises(RecordError, match=r"has tools, which the template .* set template\.agent_template"):
        samples.encode(0)
    with pytest.raises(RecordError, match=r"but template\.loss_scale: all trains it anyway"):
        encoder(silent, loss_scale="all").encode(0)


def test_weights_that_a_template_loses_are_refused(encoder, files):
    """Where tokens are more than weights; where all weigh the same, none is needed."""
    samples = encoder(files["weights"], files["roles"])
    plain = samples.template.encode

    def short(record, **options):
        encoded = plain(record, **options)
        return {**encoded, "loss_scale": encoded["loss_scale"][:-1]}

    samples.template.encode = short
    with pytest.raises(RecordError, match=r"which the template qwen2_5 does not apply to its [\d,]+ tokens"):
        samples.encode(0)
    assert "loss_scale" not in samples.encode(1)
