"""Records become messages by pure rules, or are refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.records import to_messages

BOX = {"desc": "red dot", "bbox_2d": [1, 2, 3, 4]}
ANSWER = {"role": "assistant", "content": "yes"}
QUESTION = {"role": "user", "content": "is it?"}


def dense(**changes):
    return {"images": ["a.png"], "objects": [BOX], "width": 9, "height": 9, "summary": "A dot.", **changes}


@given(st.lists(st.tuples(st.text(min_size=1), st.lists(st.integers(0, 999), min_size=4, max_size=4)), min_size=1))
def test_an_answer_holds_every_object_in_order(objects):
    """It parses back to the objects, in either order of fields."""
    record = dense(objects=[{"desc": desc, "bbox_2d": box} for desc, box in objects])

    for order, first in (("desc_first", "desc"), ("geometry_first", "bbox_2d")):
        answer = json.loads(to_messages(record, object_field_order=order)["messages"][-1]["content"])
        assert record["objects"] == answer
        assert all(first == next(iter(item)) for item in answer)


def test_a_summary_answers_when_asked_for():
    """With one tag for each image in the question."""
    sample = to_messages(dense(images=["a.png", "b.png"]), use_summary=True)

    assert "A dot." == sample["messages"][1]["content"]
    assert 2 == sample["messages"][0]["content"].count("<image>")
    assert ["a.png", "b.png"] == sample["images"]


def test_messages_pass_through_with_channel_and_system():
    """Other keys of a record are no concern of training."""
    record = {"messages": [QUESTION, ANSWER], "channel": "chat", "system": "Be brief.", "id": 7}

    sample = to_messages(record)

    assert [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER] == sample["messages"]
    assert "chat" == sample["channel"]
    assert {"messages", "channel"} == set(sample)


def test_polygons_and_text_alone():
    """A polygon of three points or more; no image is fine."""
    poly = {"desc": "tri", "poly": [0, 0, 4, 0, 2.5, 4]}

    sample = to_messages({"objects": [poly]})

    assert [poly] == json.loads(sample["messages"][1]["content"])
    assert "images" not in sample


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "has to be a JSON object"),
        ({}, "neither 'messages' nor 'objects'"),
        ({"messages": []}, "no message"),
        ({"messages": "hi"}, "no message"),
        ({"messages": [{"role": "user"}]}, "text 'content'"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "role 'bot'"),
        ({"messages": [QUESTION]}, "assistant"),
        (
            {"messages": [QUESTION, {**ANSWER, "reasoning_content": "because"}]},
            "'reasoning_content', which would be ignored",
        ),
        ({"messages": [QUESTION, {**ANSWER, "tool_calls": [{}]}]}, "'tool_calls', which would be ignored"),
        ({"messages": [QUESTION, *[ANSWER] * 4096]}, "has 4,097 messages, but may have 4,096: .* custom.max_messages"),
        ({"messages": [QUESTION, {"role": "assistant", "content": " "}]}, "assistant"),
        ({"messages": [QUESTION, ANSWER], "images": ["a.png"]}, "0 <image> tags but 1 images"),
        ({"messages": [{"role": "user", "content": "<image>"}, ANSWER]}, "1 <image> tags but 0 images"),
        ({"messages": [QUESTION, ANSWER], "videos": ["a.mp4"]}, "'videos'"),
        ({"messages": [QUESTION, ANSWER], "audios": ["a.wav"]}, "'audios'"),
        ({"messages": [QUESTION, ANSWER], "image": "a.png"}, "call it 'images'"),
        ({"messages": [QUESTION, ANSWER], "rejected_response": "no"}, "preference"),
        ({"messages": [{"role": "system", "content": "a"}, ANSWER], "system": "b"}, "keep one"),
        (dense(images="https://example.org/a.png"), "only files"),
        (dense(images=[3]), "not a list of paths"),
        (dense(objects=[]), "no object"),
        (dense(objects=["dot"]), "no text 'desc'"),
        (dense(objects=[{"desc": "x"}]), "exactly one of"),
        (dense(objects=[{**BOX, "poly": [0, 0, 1, 1, 2, 2]}]), "exactly one of"),
        (dense(objects=[{"desc": "x", "bbox_2d": [1, 2, 3]}]), "3 coordinates"),
        (dense(objects=[{"desc": "x", "bbox_2d": [1, 2, 3, True]}]), "not numbers"),
        (dense(objects=[{"desc": "x", "poly": [1, 2, 3, 4, 5, 6, 7]}]), "7 coordinates"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_by_name(record, reason):
    """Each with its reason."""
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        to_messages(record)


def test_what_a_message_holds_empty_is_no_concern():
    """As exports write it; and the most messages are as many as asked for."""
    answer = {**ANSWER, "reasoning_content": None, "tool_calls": []}

    assert to_messages({"messages": [QUESTION, answer]}, max_messages=2)
    with pytest.raises(ValueError, match="may have 1"):
        to_messages({"messages": [QUESTION, answer]}, max_messages=1)


def test_tags_of_other_media_are_text():
    """Where no such media are declared."""
    said = [{"role": "user", "content": "what does <video> mean in <audio>?"}, ANSWER]

    assert said == to_messages({"messages": said})["messages"]


def test_a_missing_summary_is_refused_only_when_asked_for():
    """The key that asks for it is named."""
    with pytest.raises(ValueError, match=r"custom\.use_summary"):
        to_messages(dense(summary=""), use_summary=True)
    assert to_messages(dense(summary=""))


def test_a_loss_scale_that_would_be_ignored_is_refused():
    """0 and 1 are what a message's `loss` says too."""
    said = {"role": "user", "content": "say"}
    for scale in (None, 0, 1):
        assert to_messages({"messages": [said, {"role": "assistant", "content": "it", "loss_scale": scale}]})

    with pytest.raises(ValueError, match=r"loss_scale 0\.5, which would be ignored"):
        to_messages({"messages": [said, {"role": "assistant", "content": "it", "loss_scale": 0.5}]})
