"""Tools, their calls and answers become messages of ms-swift's roles; weights are checked."""

import json
from itertools import permutations

import pytest

from tests.records import chat, to_messages

ASKED = {"role": "user", "content": "1 and 2?"}
CALL = {"name": "add", "arguments": {"b": 2, "a": 1}}
CALLED = {"role": "tool_call", "content": json.dumps(CALL)}
GIVEN = {"role": "tool", "content": "3"}
SAID = {"role": "assistant", "content": "Three."}
TOLD = [ASKED, CALLED, GIVEN, SAID]


def openai(*calls, content=None, **more):
    listed = [{"id": str(n), "type": "function", "function": call} for n, call in enumerate(calls)]
    return {"role": "assistant", "content": content, "tool_calls": listed, **more}


NOTATIONS = [
    TOLD, [ASKED, {**CALLED, "content": CALL}, {**GIVEN, "role": "tool_response"}, SAID],
    [ASKED, {**CALLED, "role": "function_call"}, {**GIVEN, "role": "observation"}, SAID],
    [ASKED, {**CALLED, "role": "function-call"}, {**GIVEN, "role": "function-response", "tool_call_id": "1"}, SAID],
    [ASKED, openai(CALL), GIVEN, SAID],
    [ASKED, openai({**CALL, "arguments": json.dumps(CALL["arguments"])}, content=""), GIVEN, SAID],
    [ASKED, {**openai(), "tool_calls": [CALL]}, GIVEN, SAID],
    [
        {"from": "human", "value": ASKED["content"]}, {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "3"}, {"from": "gpt", "value": "Three."},
    ],
    [
        ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": CALL["arguments"]}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]}, SAID,
    ],
    [
        ASKED, {"role": "assistant", "content": [{"type": "tool_use", "name": "add", "input": CALL["arguments"]}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "3"}]}]}, SAID,
    ],
]  # fmt: skip


@pytest.mark.parametrize("messages", NOTATIONS)
def test_calls_in_every_notation_become_the_same_messages(messages):
    """The arguments in the order that they have; a call may end a record."""
    assert TOLD == to_messages(chat(*messages))["messages"]
    assert [ASKED, CALLED] == to_messages(chat(ASKED, CALLED))["messages"]


@pytest.mark.parametrize("tools", [[{"name": "add"}], '[{"name": "add"}]', {"name": "add"}, ['{"name": "add"}']])
def test_tools_may_be_texts_of_json(tools):
    """As tables have them; one may stand alone."""
    assert [{"name": "add"}] == to_messages(chat(*TOLD, tools=tools))["tools"]
    assert "tools" not in to_messages(chat(*TOLD, tools=[]))
    for nameless in ("add", [3], [{}], [{"function": {"name": 3}}]):
        with pytest.raises(ValueError, match="tool"):
            to_messages(chat(*TOLD, tools=nameless))
    wrapped = {"type": "function", "function": {"name_for_model": "add"}}
    assert [wrapped] == to_messages({"query": "a", "response": "b", "tools": [wrapped]})["tools"]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_answers_stand_in_the_order_of_their_calls(order):
    """In both notations, where each call has one; what a message says comes before its calls."""
    calls = [{"name": f"f{n}", "arguments": {}} for n in range(3)]
    answers = [{"role": "tool", "tool_call_id": str(n), "content": f"r{n}"} for n in order]
    blocks = [
        {"type": "text", "text": "wait"},
        *({"type": "tool_use", "id": str(n), "name": call["name"]} for n, call in enumerate(calls)),
    ]
    results = [{"type": "tool_result", "tool_use_id": str(n), "content": f"r{n}"} for n in order]
    expected = [
        ASKED, {"role": "assistant", "content": "wait"},
        *({"role": "tool_call", "content": json.dumps(call)} for call in calls),
        *({"role": "tool", "content": f"r{n}"} for n in range(3)), SAID,
    ]  # fmt: skip

    in_parts = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    for said in ([openai(*calls, content="wait"), *answers], in_parts):
        assert expected == to_messages(chat(ASKED, *said, SAID))["messages"]


def test_answers_that_lack_a_call_stay_where_they_are():
    """Ids that are not there, or of other calls, order nothing."""
    calls = [{"name": "f", "arguments": {}}] * 2
    for ids in (("1",), ("1", "7"), (None, None), ([1], "0")):
        answers = [{"role": "tool", "tool_call_id": one, "content": str(n)} for n, one in enumerate(ids)]
        said = to_messages(chat(ASKED, openai(*calls), *answers, SAID))["messages"]
        assert [str(n) for n in range(len(ids))] == [one["content"] for one in said if one["role"] == "tool"]


def test_texts_and_images_stand_between_answers():
    """What the user says with an answer comes behind it, a text after a call behind that."""
    told = [{"type": "tool_result", "content": [{"type": "image", "image": "a.png"}]}]
    said = [{"type": "tool_use", "name": "f"}, {"type": "text", "text": "wait"}]
    sample = to_messages(chat(ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": told},
                                       SAID))  # fmt: skip

    assert ["user", "tool_call", "assistant", "tool", "assistant"] == [one["role"] for one in sample["messages"]]
    assert "<image>" == sample["messages"][3]["content"]
    assert ["a.png"] == sample["images"]


@pytest.mark.parametrize("part", [{"image": "a.png"}, {"url": "a.png"}, {"source": {"type": "url", "url": "a.png"}}])
def test_an_image_in_an_answer_is_seen(part):
    """As in a `tool_result`; parts of text alone stay JSON, as ms-swift writes them."""
    parts = [{"type": "text", "text": "see "}, {"type": "image", **part}]
    for messages in ([CALLED, {"role": "tool", "content": parts}], [openai(CALL), {**GIVEN, "content": parts}]):
        sample = to_messages(chat(ASKED, *messages, SAID))
        assert ("see <image>", ["a.png"]) == (sample["messages"][2]["content"], sample["images"])
        told = {"role": "user", "content": [{"type": "tool_result", "content": parts}]}
        assert sample == to_messages(chat(ASKED, messages[0], told, SAID))

    for content in (parts[:1], [{"type": "image", "title": "a"}], {"type": "image", **part}):
        sample = to_messages(chat(ASKED, CALLED, {"role": "tool", "content": content}, SAID))
        assert json.dumps(content) == sample["messages"][2]["content"]
        assert "images" not in sample


def test_an_image_of_the_record_is_seen_where_its_answer_shows_it():
    """As a part that is nothing but its type says; not before what the user says first."""
    parts = [{"type": "text", "text": "see ", "image": None}, {"type": "image", "text": None}]
    sample = to_messages(chat(ASKED, CALLED, {**GIVEN, "content": parts}, SAID, images=["a.png"]))

    assert [ASKED["content"], "see <image>"] == [sample["messages"][place]["content"] for place in (0, 2)]


def test_an_answer_of_json_is_its_text():
    """Its keys stay in order, and null stays; its name reaches the notation that reads it."""
    answer = {"role": "tool", "name": "add", "content": {"z": None, "a": "é"}}

    (found,) = [one for one in to_messages(chat(ASKED, CALLED, answer, SAID))["messages"] if "name" in one]

    assert {**answer, "content": '{"z": null, "a": "é"}'} == found
    assert to_messages(chat(ASKED, CALLED, {**GIVEN, "content": json.dumps([IMAGE])}, SAID)), "a text is a text"


def test_what_weighs_a_message_goes_with_its_calls():
    """A number, in the last one above 0, of all messages that it becomes."""
    for weight in (0, 0.25, 3, 10**6):
        said = to_messages(chat(ASKED, {**SAID, "loss_scale": weight}, ASKED, SAID))["messages"]
        assert weight == said[1]["loss_scale"]
    assert to_messages(chat({**ASKED, "loss": False}, SAID))
    for content, number in (("wait", 2), (None, 1)):
        said = to_messages(chat(ASKED, openai(CALL, content=content, loss_scale=0.5), GIVEN, SAID))
        assert number == sum(message.get("loss_scale") == 0.5 for message in said["messages"])
    parts = [{"type": "text", "text": "wait"}, {"type": "tool_use", "name": "f"}]
    said = to_messages(chat(ASKED, {"role": "assistant", "content": parts, "loss": False}, GIVEN, SAID))
    assert 2 == sum(message.get("loss") is False for message in said["messages"])


IMAGE = "iVBORw0KGgo" + "A" * 80
REFUSED = [
    ([ASKED, {**openai(), "tool_calls": ["x"]}, SAID], "'tool_calls' that are not a list of objects"),
    ([ASKED, openai({"arguments": {}}), SAID], "without a 'name' of its function"),
    ([ASKED, openai({"name": "f", "arguments": "x"}), SAID], "call of 'f' with arguments that are not JSON"),
    ([ASKED, openai({"name": "f", "arguments": '{"a": "\\udfff"}'}), SAID], "half of a surrogate pair in the arg"),
    ([ASKED, {**CALLED, "content": "x"}, SAID], "a call of a tool as a text that is neither JSON nor Python"),
    ([ASKED, {**CALLED, "content": {"name": 3}}, SAID], "a call of a tool without a 'name'"),
    ([ASKED, {**CALLED, "content": {"name": "f"}}, SAID], "a call of 'f' without 'arguments'"),
    ([ASKED, {**CALLED, "content": {"name": "f", "parameters": "x"}}, SAID], "the arguments of a call of 'f' as"),
    ([ASKED, CALLED, {"role": "tool"}, SAID], "message of a tool without a 'content'"),
    ([ASKED, CALLED, {"role": "tool", "content": {"a": b"x"}}, SAID], "whose content is not JSON"),
    ([GIVEN, SAID], "begins with the answer of a tool"),
    ([ASKED, CALLED, GIVEN, ASKED, SAID], "a user message right after the answer of a tool"),
    ([ASKED, CALLED, GIVEN], "does not end with an assistant message"),
    ([ASKED, CALLED, {**CALLED, "loss": False}, GIVEN, SAID], "calls in one turn with different weights"),
    ([ASKED, {**SAID, "loss_scale": -1}], "the loss_scale -1: write a number from 0 to 1,000,000"),
    ([ASKED, {**SAID, "loss_scale": float("nan")}], "the loss_scale nan"),
    ([ASKED, {**SAID, "loss_scale": [1, 2]}], "the loss_scale .1, 2."),
    ([ASKED, {**SAID, "loss_scale": 0}], "'loss_scale': 0 in its last message"),
    ([ASKED, {**SAID, "loss": False, "loss_scale": 2}, ASKED, SAID], "'loss': false and a loss_scale"),
    ([{**ASKED, "loss_scale": 0}, SAID], "a user message with 'loss_scale', but"),
    ([{**ASKED, "loss": True}, SAID], "a user message with 'loss', but only the model's messages have weights"),
    *(  # a model would read hundreds of tokens of base64
        ([ASKED, CALLED, {**GIVEN, "content": content}, SAID], "an image in a tool's answer, where it would be text")
        for content in (
            [{"type": "image", "data": IMAGE, "mimeType": "image/png"}],
            {"screen": f"{IMAGE[:76]}\n{IMAGE[76:]}"},
        )
    ),
]


@pytest.mark.parametrize(("messages", "says"), REFUSED)
def test_messages_that_would_lose_something_are_refused(messages, says):
    """Calls, answers, weights and images that the model would not get as they are meant."""
    with pytest.raises(ValueError, match=says):
        to_messages(chat(*messages))
