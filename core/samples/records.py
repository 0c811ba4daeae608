"""
Conversion of records into chat messages.

A record has one of the shapes of `core.samples.shapes`, or is a dense caption, which this module
converts into messages. A dense caption has `images`, `width`, `height`, `objects` (each with a
`desc` and a `bbox_2d` or `poly`), and optionally a `summary`.
"""

import json
from collections.abc import Mapping
from itertools import chain, product
from typing import Any, Literal

import attrs

from packplan.core.errors import counted
from packplan.core.samples.media import VIDEO_TAG, to_images, to_videos
from packplan.core.samples.shapes import IMAGE_TAG, NOTES, SYSTEM_KEYS, ShapedRecord, ignoring, quoted
from packplan.core.samples.tools import CALL, RESPONSE, WEIGHTS, to_tools
from packplan.core.samples.values import fail, has, is_empty

DENSE_PROMPT = "List every object in the image, each with its description and its place in pixels."

SUMMARY_PROMPT = "Summarise the image in one sentence."

_NO_MEDIA = "Packplan trains on text, images and videos: leave such records out"
_NO_PAIRS = "preference pairs and contrastive samples are not trained here: leave such records out"
_NO_TASK = "ms-swift reads it for another task than training on answers: remove it, or give it another name"
_AS_CONTENT = "write it into the 'content' of the answer, between the tags that the model thinks in, or remove it"

_SIDES, _PARTS = ("rejected", "positive", "negative"), ("messages", "images", "videos", "audios", "tools", "objects")
"""Sides of a preference pair or contrastive sample, and parts of a side; `side_part` is a key."""

REFUSED = {
    **dict.fromkeys(("audios", "audio", "ref_audios", "audio_codes", "omnijev_video"), _NO_MEDIA),
    **dict.fromkeys(map("_".join, product(_SIDES, _PARTS)), _NO_PAIRS),
    **dict.fromkeys(("rejected_response", "margin", "teacher_prompt", "teacher_images"), _NO_PAIRS),
    **dict.fromkeys(
        ("label", "questions", "kinds", "options", "target_probs", "state", "question_ids", "criteria"), _NO_TASK
    ),
    **dict.fromkeys(("omnijev_column_keys", "extra_kwargs", "mm_processor_kwargs", "add_eos"), _NO_TASK),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "thinking_content"), _AS_CONTENT),
    "functions": "ms-swift reads tools from 'tools' alone: rename 'functions', or remove it",
    "loss_scale": "a weight belongs to a message: write it into the answer that it weighs, or remove it",
    "chat_template_kwargs": "a template is set for all records, in the section 'template': remove it",
}
"""
Refused key of a record -> remedy. ms-swift or similar programs read these keys in a way that
Packplan does not support. All other unknown keys are ignored.
"""

_READ_OF_MESSAGES = ("role", "content", "loss", "loss_scale")

_KNOWN_IN_MESSAGES = {*_READ_OF_MESSAGES, *NOTES}

_KNOWN_OF_RESPONSES = {"name", "tool_call_id"}
"""Further keys of a tool's answer. Agent templates may read `name`; `tool_call_id` is ignored."""

_KNOWN_ROLES = ("system", "user", "assistant", CALL, RESPONSE)

_TRAINED = {"assistant", CALL}
"""Roles of messages whose text is trained."""

MAX_WEIGHT = 1_000_000
"""
Maximum weight of a message in the loss. With a larger weight, float32 sums would lose the other
messages.
"""

_REFUSED_IN_MESSAGES = {
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_content"),
        "write it into 'content', between the tags that the model thinks in, or remove it",
    ),
    "tool_calls": "write it into a message of the assistant",
    "function_call": "write it as 'tool_calls', or as a message of the role tool_call",
    "images": f"write the images into the record's 'images', and {IMAGE_TAG} into 'content', or remove it",
    **dict.fromkeys(("weight", "train"), "write 'loss': false if a message is not to be trained, or remove it"),
}
"""Refused key of a message -> remedy. `_OTHERWISE` is the remedy for all other unknown keys."""

_OTHERWISE = "write its text into 'content', or remove it"

_GEOMETRY = {"bbox_2d": 4, "poly": 6}
"""Kind of geometry -> minimum number of coordinates."""


@attrs.frozen
class MessageOptions:
    """Keys of the section `custom` that decide how a record is converted into messages."""

    object_field_order: Literal["desc_first", "geometry_first"] = "desc_first"
    use_summary: bool = False
    literal_image_tags: bool = False

    urls: bool = False
    """Whether images and videos may be URLs. This is the case if `media_cache` is set."""


def to_messages(shaped: ShapedRecord, options: MessageOptions) -> dict[str, Any]:
    """
    Convert a record into ms-swift's form.

    The result has `messages`, and `tools`, `images`, `videos` and `channel` if the record has them.

    Args:
        shaped: Result of `to_shape` for the record.
        options: Options of the run.

    Raises:
        ValueError: The record is invalid. The message says what is wrong with the record.

    >>> from packplan.core.samples.shapes import to_shape
    >>> dots = [{"desc": "red dot", "bbox_2d": [1, 2, 3, 4]}]
    >>> record = {"images": ["a.png"], "width": 8, "height": 8, "objects": dots}
    >>> to_messages(to_shape(record), MessageOptions())["messages"][1]["content"]
    '[{"desc": "red dot", "bbox_2d": [1, 2, 3, 4]}]'
    """
    record = shaped.record
    _refuse_keys(record)
    images = to_images(record.get("images"), urls=options.urls)
    if "messages" in record:
        messages = _checked_messages(record["messages"])
    else:
        messages = _dense_messages(record, len(images), options)
    system = next((held for name in SYSTEM_KEYS if (held := record.get(name)) is not None), None)
    if system is not None and not isinstance(system, str):
        fail(f"has the 'system' {system!r}, but it has to be a text")
    if system and messages[0]["role"] == "system":
        fail("has 'system' and a system message: keep one")
    if system is not None and messages[0]["role"] != "system":  # an empty message counts as none
        messages = [{"role": "system", "content": system}, *messages]
    if images or not options.literal_image_tags:
        messages = _add_tags(messages, IMAGE_TAG, "image", len(images))
    videos = to_videos(record.get("videos"), urls=options.urls)
    if videos:  # without a video, <video> in a text is plain text
        messages = _add_tags(messages, VIDEO_TAG, "video", len(videos))
    more = {"tools": to_tools(record.get("tools")), "images": images, "videos": videos}
    channel = {} if record.get("channel") is None else {"channel": str(record["channel"])}
    return {"messages": messages, **{name: held for name, held in more.items() if held}, **channel}


def _add_tags(messages: list[dict[str, Any]], tag: str, name: str, number: int) -> list[dict[str, Any]]:
    """
    Return messages with one tag for each image or video. If there is no tag, all tags are added at
    the start of the first user message's text. Any other number of tags is an error.
    """
    tags = sum(message["content"].count(tag) for message in messages)
    if tags == number:
        return messages
    if tags and not number:
        reason = f"has {counted(tags, f'{tag} tag')} but 0 {name}s: name its {name}s, or keep the tag as text"
        fail(reason, argument="literal_image_tags")
    if tags:
        fail(f"has {counted(tags, f'{tag} tag')} but {counted(number, name)}: write one tag for each {name}")
    for place, message in enumerate(messages):
        if message["role"] == "user":
            return [
                *messages[:place],
                {**message, "content": tag * number + message["content"]},
                *messages[place + 1 :],
            ]
    return fail(f"has {counted(number, name)}, but no {tag} tag, and no user message to put one into: write the tags")


def _refuse_keys(record: Mapping[str, Any]) -> None:
    """
    Raise an error for keys of a record or its messages that ms-swift knows but that would be
    ignored.
    """
    found = [name for name in record if name.lower() in REFUSED and has(record, name)]  # in any letter case
    inner = [*dict.fromkeys(chain.from_iterable(map(_unread_keys, record.get("messages", ()))))]
    also = f"a message with {quoted(inner)}, which would be ignored" if inner else ""
    if found:
        reason = f"has {quoted(found)}: {REFUSED[found[0].lower()]}{f'; and {also}' if inner else ''}"
        fail(f"{reason}{ignoring([*found, *inner])}", argument="columns")
    if inner:
        fail(f"has {also}: {_REFUSED_IN_MESSAGES.get(inner[0], _OTHERWISE)}{ignoring(inner)}", argument="columns")
    if "messages" not in record and has(record, "videos"):
        fail("has 'videos' and 'objects', whose coordinates belong to an image: write messages, or remove one")
    if "messages" in record and has(record, "objects"):
        fail(
            "has 'messages' and 'objects', which would be ignored: write their content into the messages, or remove one"
        )


def _unread_keys(message: Mapping[str, Any]) -> list[str]:
    """Return the keys of a message that have a value but would be ignored."""
    known = _KNOWN_IN_MESSAGES | _KNOWN_OF_RESPONSES if message.get("role") == RESPONSE else _KNOWN_IN_MESSAGES
    return [name for name, held in message.items() if name not in known and not is_empty(held)]


def _refuse_weights(message: Mapping[str, Any]) -> None:
    """Raise an error if a message has a loss or a weight that is invalid or would be ignored."""
    role, loss, weight = message["role"], message.get("loss"), message.get("loss_scale")
    if loss not in (None, 0, 1):
        fail(f"has a message with the loss {loss!r}, which would be ignored: remove it, or write true or false")
    if role not in _TRAINED and (loss or weight is not None):
        name = "loss_scale" if weight is not None else "loss"
        fail(f"has a {role} message with {name!r}, but only the model's messages have weights: remove it")
    if weight is None:
        return
    if not isinstance(weight, (int, float)) or not 0 <= weight <= MAX_WEIGHT:
        fail(f"has a message with the loss_scale {weight!r}: write a number from 0 to {MAX_WEIGHT:,}, or remove it")
    if loss in (0, False) and weight:
        fail("has a message with 'loss': false and a loss_scale, which would be ignored: remove one")


def _checked_messages(value: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            fail("has a message that is not an object with a text 'content'")
        if message.get("role") not in _KNOWN_ROLES:
            fail(f"has a message with the role {message.get('role')!r}: write one of {', '.join(_KNOWN_ROLES)}")
        _refuse_weights(message)
        _refuse_order(messages, message)
        # `loss` and `loss_scale` decide what ms-swift trains, and are kept.
        read = (*_READ_OF_MESSAGES, "name") if message["role"] == RESPONSE else _READ_OF_MESSAGES
        messages.append({name: message[name] for name in read if message.get(name) is not None})
    last = messages[-1]
    if last["role"] not in _TRAINED or not last["content"].strip():
        fail("does not end with an assistant message that has text, so there is nothing to learn from it")
    for name in ("loss", "loss_scale"):
        if last.get(name) in (0, False):
            pair = f"'{name}': {json.dumps(last[name])}"
            fail(f"has {pair} in its last message, whose end ms-swift would train anyway: leave it out")
    return messages


def _refuse_order(before: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Raise an error if a message's role cannot follow the messages *before* it."""
    role, previous = message["role"], before[-1] if before else None
    if role == "system" and before:
        fail("has a system message after other messages: write one, at the beginning")
    if previous is None or previous["role"] == "system":
        if role == RESPONSE:
            fail("begins with the answer of a tool: write the question or the call before it")
    elif previous["role"] == RESPONSE and role == "user":
        fail("has a user message right after the answer of a tool: write the assistant's reply between them")
    elif previous["role"] == role == CALL and any(previous.get(name) != message.get(name) for name in WEIGHTS):
        fail("has calls in one turn with different weights, of which only the first would count: give them one weight")


def _dense_messages(record: Mapping[str, Any], num_images: int, options: MessageOptions) -> list[dict[str, Any]]:
    if options.use_summary:
        if not isinstance(record.get("summary"), str) or not record["summary"].strip():
            fail("has no 'summary', but the run trains summaries", argument="use_summary")
        prompt, answer = SUMMARY_PROMPT, record["summary"]
    else:
        prompt, answer = DENSE_PROMPT, _objects_text(record["objects"], options.object_field_order)
    return [{"role": "user", "content": IMAGE_TAG * num_images + prompt}, {"role": "assistant", "content": answer}]


def _objects_text(objects: object, order: str) -> str:
    if not isinstance(objects, list) or not objects:
        fail("has no object in 'objects', so there is nothing to learn from it")
    rows = []
    for position, item in enumerate(objects):
        if not isinstance(item, Mapping) or not isinstance(item.get("desc"), str):
            fail(f"has no text 'desc' in object {position}")
        kinds = [kind for kind in _GEOMETRY if kind in item]
        if len(kinds) != 1:
            fail(f"has to have exactly one of {' and '.join(_GEOMETRY)} in object {position}")
        points = item[kinds[0]]
        if not isinstance(points, list) or not all(type(point) in {int, float} for point in points):
            fail(f"has coordinates that are not numbers in object {position}")
        if len(points) < _GEOMETRY[kinds[0]] or len(points) % 2 or (kinds[0] == "bbox_2d" and len(points) != 4):
            wanted = "4" if kinds[0] == "bbox_2d" else "an even number, at least 6"
            fail(f"has {counted(len(points), 'coordinate')} in the {kinds[0]} of object {position}: write {wanted}")
        fields = [("desc", item["desc"]), (kinds[0], points)]
        rows.append(dict(fields if order == "desc_first" else reversed(fields)))
    return json.dumps(rows, ensure_ascii=False)
