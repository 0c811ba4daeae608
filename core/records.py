"""
Records -> chat messages, by pure rules.

A record is either one of ms-swift's (`messages`, `images`, …) or a dense caption (`images`, `objects` with a `desc`
and a `bbox_2d` or `poly`, `width`, `height`, optionally `summary`), which is turned into messages here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

IMAGE_TAG = "<image>"

MAX_MESSAGES = 4096
"""Messages of a record, unless `custom.max_messages` says otherwise."""

DENSE_PROMPT = "List every object in the image, each with its description and its place in pixels."

SUMMARY_PROMPT = "Summarise the image in one sentence."

FieldOrder = Literal["desc_first", "geometry_first"]

_REFUSED = {
    "videos": "Packplan trains on text and images: leave such records out",
    "audios": "Packplan trains on text and images: leave such records out",
    "tools": "write the tools into the system message",
    "rejected_messages": "preference pairs are no packing task: leave them out",
    "rejected_response": "preference pairs are no packing task: leave them out",
    "image": "call it 'images' and write a list",
    "video": "Packplan trains on text and images: leave such records out",
    "audio": "Packplan trains on text and images: leave such records out",
}
"""Keys that ms-swift would give a meaning which packing here does not; all other unknown keys are ignored."""

_REFUSED_IN_MESSAGES = {
    "reasoning_content": "write it into 'content', between the tags that the model thinks in, or remove it",
    "reasoning": "write it into 'content', between the tags that the model thinks in, or remove it",
    "thinking": "write it into 'content', between the tags that the model thinks in, or remove it",
    "tool_calls": "write the calls into 'content', as the model writes them",
    "function_call": "write the call into 'content', as the model writes it",
}
"""Keys of a message that hold what a model says, and that are not trained."""

_GEOMETRY = {"bbox_2d": 4, "poly": 6}
"""Kind of geometry -> fewest coordinates."""


def to_messages(
    record: object,
    *,
    object_field_order: FieldOrder = "desc_first",
    use_summary: bool = False,
    max_messages: int = MAX_MESSAGES,
) -> dict[str, Any]:
    """
    Return *record* as ms-swift reads it: `messages`, and `images` and `channel` where it has them.

    Args:
        record: One JSON value of a data file.

        object_field_order: Whether each object's description or its geometry comes first.

        use_summary: Answer a dense caption with its `summary` instead of its objects.

        max_messages: A record of more messages is refused.

    Raises:
        ValueError: What is wrong with the record, in words for its author.

    >>> to_messages({"images": ["a.png"], "width": 8, "height": 8,
    ...              "objects": [{"desc": "red dot", "bbox_2d": [1, 2, 3, 4]}]})["messages"][1]["content"]
    '[{"desc": "red dot", "bbox_2d": [1, 2, 3, 4]}]'
    """
    if not isinstance(record, Mapping):
        _fail(f"is {type(record).__name__}, but has to be a JSON object")
    for name, remedy in _REFUSED.items():
        if record.get(name):
            _fail(f"has {name!r}: {remedy}")
    images = _images(record)
    if "messages" in record:
        messages = _messages(record["messages"], max_messages)
    elif "objects" in record:
        messages = _dense(record, len(images), object_field_order, use_summary=use_summary)
    else:
        _fail("has neither 'messages' nor 'objects', so there is nothing to learn from it")
    if record.get("system"):
        if messages[0]["role"] == "system":
            _fail("has 'system' and a system message: keep one")
        messages = [{"role": "system", "content": str(record["system"])}, *messages]
    tags = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if tags != len(images):
        _fail(f"has {tags} {IMAGE_TAG} tags but {len(images)} images: write one tag for each image")
    return {
        "messages": messages,
        **({"images": images} if images else {}),
        **({"channel": str(record["channel"])} if record.get("channel") is not None else {}),
    }


def _fail(reason: str) -> NoReturn:
    raise ValueError(reason)


def _images(record: Mapping[str, Any]) -> list[str]:
    images = record.get("images") or []
    if isinstance(images, str):
        images = [images]
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        _fail("has 'images' that are not a list of paths")
    for image in images:
        if image.startswith(("http://", "https://", "data:")):
            _fail(f"has the image {image[:60]!r}: only files are read, so that training needs no network")
    return list(images)


def _messages(value: object, most: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        _fail("has no message in 'messages'")
    if len(value) > most:
        reason = f"has {len(value):,} messages, but may have {most:,}: split it, or raise custom.max_messages"
        _fail(reason)
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            _fail("has a message that is not an object with a text 'content'")
        if message.get("role") not in {"system", "user", "assistant"}:
            _fail(f"has a message with the role {message.get('role')!r}; known are system, user and assistant")
        for name, remedy in _REFUSED_IN_MESSAGES.items():
            if message.get(name):
                _fail(f"has a message with {name!r}, which would be ignored: {remedy}")
        if message.get("loss_scale") not in {None, 0, 1}:
            _fail(f"has a message with the loss_scale {message['loss_scale']!r}, which would be ignored: remove it")
        # `loss` and the like steer ms-swift's per-message loss, and pass through.
        messages.append(dict(message))
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        _fail("does not end with an assistant message that says something, so there is nothing to learn from it")
    return messages


def _dense(record: Mapping[str, Any], num_images: int, order: FieldOrder, *, use_summary: bool) -> list[dict[str, Any]]:
    if use_summary:
        if not isinstance(record.get("summary"), str) or not record["summary"].strip():
            _fail("has no 'summary', which custom.use_summary asks for")
        prompt, answer = SUMMARY_PROMPT, record["summary"]
    else:
        prompt, answer = DENSE_PROMPT, _objects(record["objects"], order)
    return [
        {"role": "user", "content": IMAGE_TAG * num_images + prompt},
        {"role": "assistant", "content": answer},
    ]


def _objects(objects: object, order: FieldOrder) -> str:
    if not isinstance(objects, list) or not objects:
        _fail("has no object in 'objects', so there is nothing to learn from it")
    rows = []
    for position, item in enumerate(objects):
        if not isinstance(item, Mapping) or not isinstance(item.get("desc"), str):
            _fail(f"has no text 'desc' in object {position}")
        kinds = [kind for kind in _GEOMETRY if kind in item]
        if len(kinds) != 1:
            _fail(f"has to have exactly one of {' and '.join(_GEOMETRY)} in object {position}")
        points = item[kinds[0]]
        if not isinstance(points, list) or not all(type(point) in {int, float} for point in points):
            _fail(f"has coordinates that are not numbers in object {position}")
        if len(points) < _GEOMETRY[kinds[0]] or len(points) % 2 or (kinds[0] == "bbox_2d" and len(points) != 4):
            _fail(f"has {len(points)} coordinates in the {kinds[0]} of object {position}")
        fields = [("desc", item["desc"]), (kinds[0], points)]
        rows.append(dict(fields if order == "desc_first" else reversed(fields)))
    return json.dumps(rows, ensure_ascii=False)
