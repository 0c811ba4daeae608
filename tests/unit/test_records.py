"""Records become messages by pure rules, or are refused by name."""

import base64
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.samples.records import REFUSED
from packplan.core.samples.shapes import RECORD_KEYS
from packplan.core.samples.values import UnusableRecordError
from tests.records import ANSWER, QUESTION, asked, chat, to_messages

BOX = {"desc": "red dot", "bbox_2d": [1, 2, 3, 4]}


def dense(**changes):
    return {"images": ["a.png"], "objects": [BOX], "width": 9, "height": 9, "summary": "A dot.", **changes}


boxes = st.lists(st.integers(0, 999), min_size=4, max_size=4)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), boxes), min_size=1, max_size=5))
def test_an_answer_holds_every_object_in_order(objects):
    """It parses back to the objects, in either order of fields."""
    record = dense(objects=[{"desc": desc, "bbox_2d": box} for desc, box in objects])

    for order, first in (("desc_first", "desc"), ("geometry_first", "bbox_2d")):
        answer = json.loads(to_messages(record, object_field_order=order)["messages"][-1]["content"])
        assert record["objects"] == answer
        assert all(first == next(iter(item)) for item in answer)


def test_a_summary_answers_when_asked_for():
    """With one tag for each image in the question; without one, the key that asks is named."""
    sample = to_messages(dense(images=["a.png", "b.png"]), use_summary=True)

    assert "A dot." == sample["messages"][1]["content"]
    assert 2 == sample["messages"][0]["content"].count("<image>")
    assert ["a.png", "b.png"] == sample["images"]
    assert to_messages(dense(summary=""))
    with pytest.raises(UnusableRecordError, match="no 'summary'", check=lambda one: one.argument == "use_summary"):
        to_messages(dense(summary=""), use_summary=True)


def test_polygons_and_text_alone():
    """A polygon of three points or more; no image is fine; a channel of ms-swift is a text."""
    poly = {"desc": "tri", "poly": [0, 0, 4, 0, 2.5, 4]}
    sample = to_messages({"objects": [poly]})

    assert ([poly], False) == (json.loads(sample["messages"][1]["content"]), "images" in sample)
    assert "3" == to_messages(chat(channel=3))["channel"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "is not a JSON object"),
        ({"query": "a", "response": ""}, "has no text in 'response', so there is nothing to learn from it"),
        ({}, "has no known shape: none of its keys has a value"),
        (chat(system=["be"]), "has the 'system' .'be'., but it has to be a text"),
        (chat(QUESTION, {"role": "system", "content": "x"}, ANSWER), "a system message after other messages"),
        (chat({"role": "system", "content": "a"}, ANSWER, system="b"), "keep one"),
        (chat(QUESTION, {**ANSWER, "loss": False}), "'loss': false in its last message"),
        (chat({"role": "narrator", "content": "x"}), "role 'narrator'"),
        (chat(QUESTION, {**ANSWER, "content": " "}), "assistant"),
        (chat({**QUESTION, "tool_calls": [{}]}, ANSWER), "'tool_calls', which would be ignored"),
        (chat(ANSWER, videos=["a.mp4"]), "1 video, but no <video> tag, and no user message to put one"),
        (asked("<video>", videos=["a", "b"]), "1 <video> tag but 2 videos"),
        (chat(videos=["https://example.org/a.mp4"]), "the video .* name the copy, or set media_cache"),
        (chat(videos=["A" * 9999]), "the video .* it is not a path: write the video to a file"),
        (chat(videos=[[]]), "a video that is not a path"),
        (chat(videos=[["a.png", 3]]), "a frame that is not a path"),
        (chat(videos="data:video/mp4;base64,AAAA"), "write it to a file"),
        (chat(video="a.mp4", videos=["b.mp4"]), "'videos' and 'video', which mean"),
        (dense(videos=["a.mp4"]), "'videos' and 'objects'"),
        (chat(objects=[BOX]), "has 'messages' and 'objects'"),
        (dense(objects=[]), "no object"),
        (dense(objects={"desc": "x"}), "no object"),
        (dense(objects=[{"desc": "x"}]), "exactly one of"),
        (dense(objects=[{**BOX, "poly": [0, 0, 1, 1, 2, 2]}]), "exactly one of"),
        (dense(objects=[{"desc": "x", "bbox_2d": [1, 2, 3]}]), "3 coordinates"),
        (dense(objects=[{"desc": "x", "bbox_2d": [1, 2, 3, True]}]), "not numbers"),
        (dense(objects=[{"desc": "x", "poly": [1, 2, 3, 4, 5, 6, 7]}]), "7 coordinates"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_by_name(record, reason):
    with pytest.raises(ValueError, match=reason):
        to_messages(record)


@given(
    st.sampled_from(sorted(REFUSED)),
    st.sampled_from([str, str.upper, str.title]),
    st.sampled_from([{"a": 1}, ["x"], "x", 0, False]),
)
def test_a_key_that_would_be_ignored_is_refused_whatever_it_holds(key, written, value):
    """Zero and false are values; ms-swift takes capitals too; what is empty is an export's."""
    with pytest.raises(ValueError, match=f"has '{written(key)}': .*(remove|leave|call|write)"):
        to_messages(chat(**{written(key): value}))

    for empty in (None, "", [], {}):
        assert to_messages(chat(**{written(key): empty}))


@pytest.mark.parametrize("key", sorted(RECORD_KEYS - {"messages", "conversation", "conversations"}))
def test_a_supported_key_in_capitals_is_the_same_column(key):
    """As ms-swift takes it; twice, it is refused, whichever comes first."""
    record = chat(**{key: "x"})

    assert outcome(record) == outcome(chat(**{key.title(): "x"}))
    for both in ({**record, key.upper(): "y"}, {key.upper(): "y", **record}):
        with pytest.raises(ValueError, match=f"has '{key}' twice, once as"):
            to_messages(both)


def outcome(record):
    try:
        return to_messages(record)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "key", ["reasoning_content", "reasoning_details", "images", "audio", "weights", "tool_call_id", "name", "Loss"]
)
def test_a_message_has_the_keys_that_are_read_and_notes(key):
    """Any other would be ignored, also where it holds 0."""
    with pytest.raises(ValueError, match=f"has a message with '{key}', which would be ignored: .*remove it"):
        to_messages(chat(QUESTION, {**ANSWER, key: 0}))

    notes = {"id": 3, "model": "a", "source": "b", "timestamp": 1.5, "language": "en", "index": 0, key: None}
    read = to_messages(chat(QUESTION, {**ANSWER, "loss": False, **notes, "tool_calls": []}, QUESTION, ANSWER))
    assert {**ANSWER, "loss": False} == read["messages"][1]


NOTES = {
    "WildChat": (
        {"conversation": [{**QUESTION, "country": "US", "toxic": False, "header": {"a": 1}},
                          {**ANSWER, "country": None, "toxic": False}], "state": "Texas", "toxic": False},
        "state country toxic header",
    ),
    "a classifier's data": (chat(label=0, options=["a", "b"], name="x", info="y"), "label options"),
    "OpenAI": (
        chat({**QUESTION, "name": "Al"}, {**ANSWER, "x": 3}, chat_template_kwargs={"a": 1}),
        "chat_template_kwargs name x",
    ),
    "two passages": ({"query": "why?", "context": "a", "Article": "b", "answer": "so."}, "context Article"),
    "messages as a text": ({"messages": repr([{**QUESTION, "info": 3}, ANSWER])}, "info"),
    "messages in two columns": ({"prompt": [{**QUESTION, "info": 3}], "completion": [ANSWER]}, "info"),
    "pairs": ({"conversation": [{"human": "why?", "gpt": "so.", "score": 3, "rank": 1}]}, "score rank"),
}  # fmt: skip
"""Data set -> a record, and the keys that its refusal names."""


@pytest.mark.parametrize(("record", "names"), NOTES.values(), ids=NOTES)
def test_a_refusal_names_the_columns_that_ignore_its_keys(record, names):
    """All of a record and its messages at once; then what is left is what it says."""
    with pytest.raises(UnusableRecordError, check=lambda one: one.argument == "columns") as raised:
        to_messages(record)
    found = re.findall(r"(\w+): null", str(raised.value))

    assert names.split() == found
    assert all(repr(name) in str(raised.value).partition("; or ignore ")[0] for name in found)
    assert [QUESTION, ANSWER] == to_messages(record, columns=dict.fromkeys(found))["messages"]


@pytest.mark.parametrize(("key", "off", "on"), [("weight", 0.0, 1.0), ("weight", 0, 1), ("train", False, True)])
def test_a_weight_of_0_or_1_and_train_are_the_loss_of_a_message(key, off, on):
    """As SlimOrca, OpenAI and axolotl write it; another weight, or a second value, is refused."""
    said = [{"from": "human", "value": "why?", key: off}, {"from": "gpt", "value": "so.", key: off},
            {"from": "human", "value": "and?", key: None}, {"from": "gpt", "value": "ok.", key: on}]  # fmt: skip

    found = to_messages({"conversations": said})["messages"]

    assert [False, False, None, True] == [message.get("loss") for message in found]
    assert all(key not in message for message in found)
    for wrong in ({**ANSWER, key: 0.5}, {**ANSWER, key: off, "loss": True}, {**QUESTION, key: on}):
        with pytest.raises(ValueError, match=f"has a message with '{key}', which would be ignored"):
            to_messages(chat(QUESTION, wrong, QUESTION, ANSWER))


@pytest.mark.parametrize(
    ("image", "remedy"),
    [
        ("data:image/png;base64,iVBORw0KGgo=A", "has a data URI that is not valid base64"),
        ("data:text/plain;base64,iVBORw0KGgo=", "a data URI has to begin with data:image/…;base64,"),
        ("/9j/4AAQSkZJRgABAQ" + "A" * 91, "has an image that is not valid base64"),
        ({"bytes": "ä"}, "has 'bytes' that is not valid base64"),
        ({"path": "https://example.org/a.png", "bytes": None}, "copy the file here"),
        ({"name": "a.png"}, "an entry that is not an image"),
        ("x" * 5000, "neither a path nor base64"),
        ("file:///data/a.png", "write the path alone, without file://"),
        ("s3://bucket/a.png", "copy the file here"),
    ],
)
def test_an_image_that_is_none_is_refused_with_what_to_do(image, remedy):
    """As exports of other programs have them; a path of letters alone is one."""
    with pytest.raises(ValueError, match=remedy):
        to_messages(dense(images=[image]))
    for path in ("a.png", "C://a.png", "/9j/a.jpg", f"/9j/{80 * 'a'}.jpg", "iVBORw0KGgo", "a/" * 2000 + "a"):
        assert [path] == to_messages(dense(images=[path]))["images"]


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
CODED = base64.b64encode(PNG).decode()
SPLIT = f"{CODED[:76]}\n{CODED[76:]}\n"


@pytest.mark.parametrize(
    "images",
    [CODED, [CODED], [SPLIT], f"data:image/png;base64,{CODED}", {"bytes": CODED}, [{"bytes": PNG, "path": "a"}], [PNG]],
)
@pytest.mark.parametrize("key", ["images", "image"])
def test_an_image_in_a_record_is_what_its_file_would_hold(key, images):
    """In every notation, by itself or in a list; and a path is a path."""
    record = {"query": "what?", "response": "a dot", key: images}

    assert [PNG] == to_messages(record)["images"]
    assert ["a.png"] == to_messages({**record, key: {"path": "a.png", "bytes": None}})["images"]


def test_an_image_tag_is_text_where_the_user_says_so():
    """In a record without images; with some, each has its tag all the same."""
    record = asked("what is <image>?")

    assert record["messages"] == to_messages(record, literal_image_tags=True)["messages"]
    with pytest.raises(UnusableRecordError, match=r"1 <image> tag but 0 images: .*keep the tag as text") as raised:
        to_messages(record)
    assert "literal_image_tags" == raised.value.argument
    with pytest.raises(ValueError, match="1 <image> tag but 2 images"):
        to_messages({**record, "images": ["a.png", "b.png"]}, literal_image_tags=True)


def test_a_part_of_a_loss_that_would_be_ignored_is_refused():
    """A message is trained, or it is not; how much it weighs is another key."""
    for scale in (None, 0, 1, True, False):
        assert to_messages(chat(QUESTION, {**ANSWER, "loss": scale}, QUESTION, ANSWER))

    for scale in (0.5, "false", [1]):
        with pytest.raises(ValueError, match=r"the loss .*, which would be ignored: remove it"):
            to_messages(chat(QUESTION, {**ANSWER, "loss": scale}))


def test_a_url_is_an_image_where_it_may_be_fetched():
    """Of schemes that are read, in any case; others are refused, and so is one that is too long."""
    for url in ("http://a/b.png", "HTTPS://a/b.png", "s3://a/b.png"):
        assert [url] == to_messages(chat(image=url), urls=True)["images"]
        assert [url, (url,)] == to_messages(chat(videos=[url, [url]]), urls=True)["videos"]
        with pytest.raises(ValueError, match="or set media_cache to a folder that keeps a copy"):
            to_messages(chat(image=url))
    for url in ("ftp://a/b.png", "zip://a::s3://b/c.zip"):
        with pytest.raises(ValueError, match="only files are read"):
            to_messages(chat(image=url), urls=True)
    with pytest.raises(ValueError, match="neither a path nor"):
        to_messages(chat(image="http://" + "a" * 5000), urls=True)
