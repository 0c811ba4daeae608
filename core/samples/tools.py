"""
Conversion of tool calls and tool answers into messages.

The messages have the roles `tool_call` and `tool`, which ms-swift's templates read.

A call is a JSON object with a `name` and `arguments`. As in ms-swift, the calls of a message become
separate messages after its text, and answers are in the order of the calls.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from packplan.core.samples.media import INLINE_IMAGE, shows_medium
from packplan.core.samples.values import fail, is_empty, parse_literal, require_encodable

CALL, RESPONSE = "tool_call", "tool"
"""Roles of a tool call and of the tool's answer."""

WEIGHTS = ("loss", "loss_scale")
"""Keys of a message that set its weight in the loss."""

_CALL, _RESULT = "tool_use", "tool_result"
"""Types of message parts: a tool call, and a tool's answer."""


def to_tools(value: object) -> list[dict[str, Any]]:
    """
    Return the tools of a record. Each tool is an object with a name, or with a function that has a
    name.

    >>> to_tools('[{"name": "add"}]')
    [{'name': 'add'}]

    Raises:
        ValueError: An entry is not a tool.
    """
    if is_empty(value):
        return []
    listed = parse_literal(value, "'tools'")
    tools = [parse_literal(tool, "a tool") for tool in (listed if isinstance(listed, (list, tuple)) else [listed])]
    for tool in tools:
        described = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = (described.get("name_for_model") or described.get("name")) if isinstance(described, Mapping) else None
        if not isinstance(name, str):
            fail("has a tool that is not an object with a 'name', or with a 'function' that has one")
    return tools


def split_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Split messages, so that each tool call and each tool answer is a separate message.

    Raises:
        ValueError: The calls are not a list of objects, or a call has no name or invalid arguments.
    """
    if all(is_empty(message.get("tool_calls")) for message in messages):
        return list(messages)
    converted: list[dict[str, Any]] = []
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or is_empty(calls):
            converted.append(message)
            continue
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            fail("has a message with 'tool_calls' that are not a list of objects")
        answers = next((at for at, one in enumerate(waiting) if one.get("role") != RESPONSE), len(waiting))
        waiting[:answers] = _sort_answers(calls, waiting[:answers], "tool_call_id")
        rest = {name: held for name, held in message.items() if name != "tool_calls"}
        text = [] if is_empty(rest.get("content")) else [rest]
        converted += [*text, *({**rest, **one} for one in map(_call_message, calls))]
    return converted


def _sort_answers(calls: Sequence[Any], answers: list[Any], key: str) -> list[Any]:
    """
    Return the answers in the order of their calls. Return the answers unchanged unless each call
    has exactly one answer.
    """
    ids = [call.get("id") for call in calls]
    asked = [answer.get(key) for answer in answers]
    if not all(isinstance(one, (str, int)) for one in (*ids, *asked)):
        return answers
    each_has_one = set(ids) == set(asked) and len(set(ids)) == len(ids) == len(asked)
    return sorted(answers, key=lambda answer: ids.index(answer[key])) if each_has_one else answers


def _call_message(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        fail("has a call of a tool without a 'name' of its function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            fail(f"has a call of {function['name']!r} with arguments that are not JSON")
        require_encodable(arguments, f"the arguments of a call of {function['name']!r}")
    return {"role": CALL, "content": call_text({"name": function["name"], "arguments": arguments})}


def to_text_content(message: dict[str, Any]) -> dict[str, Any]:
    """
    Return a message with its tool call or tool answer as text. Raise a ValueError if the call or
    the answer is invalid. Other messages, and answers with images or videos, do not change.
    """
    if message.get("role") == CALL:
        return {**message, "content": call_text(message.get("content"))}
    if message.get("role") != RESPONSE:
        return message
    content = message.get("content")
    if isinstance(content, list) and any(map(shows_medium, content)):  # ms-swift would write these as JSON text
        return message
    return {**message, "content": response_text(content)}


def split_parts(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """
    Split messages with parts, so that each tool call and each tool answer is a separate message.

    Raises:
        ValueError: A tool call has no name.
    """
    calls: list[Any] = []
    for message in messages:
        parts = message.get("content")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            calls = []
            yield message
            continue
        if calls:
            answers = next((at for at, part in enumerate(parts) if part.get("type") != _RESULT), len(parts))
            parts = [*_sort_answers(calls, parts[:answers], "tool_use_id"), *parts[answers:]]
        calls = [part for part in parts if part.get("type") == _CALL]
        yield from _split_by_kind(message, parts)


def _split_by_kind(message: dict[str, Any], parts: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """
    Yield each tool call and each tool answer as a separate message, and each run of other parts as
    one message. A message without calls and answers is yielded unchanged.
    """
    if not any(part.get("type") in {_CALL, _RESULT} for part in parts):
        yield message
        return
    rest = {name: held for name, held in message.items() if name not in {"role", "content"}}
    waiting: list[Any] = []
    for part in parts:
        if (kind := part.get("type")) not in {_CALL, _RESULT}:
            waiting.append(part)
            continue
        if waiting:
            yield {**rest, "role": message.get("role"), "content": waiting}
            waiting = []
        if kind == _CALL:
            yield {**rest, **_call_message({"name": part.get("name"), "arguments": part.get("input", {})})}
        else:
            answer = part.get("content", "")
            yield {**rest, "role": RESPONSE, "content": answer if isinstance(answer, list) else response_text(answer)}
    if waiting:
        yield {**rest, "role": message.get("role"), "content": waiting}


def call_text(content: object) -> str:
    """
    Check the content of a tool call, and return it as text.

    Raises:
        ValueError: The content is not a tool call.
    """
    call = parse_literal(content, "a call of a tool")
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        fail('has a call of a tool without a \'name\': write {"name": …, "arguments": {…}}')
    arguments = next((call[name] for name in ("arguments", "parameters") if call.get(name) is not None), None)
    if arguments is None:
        fail(f"has a call of {call['name']!r} without 'arguments': write {{}} if it has none")
    parse_literal(arguments, f"the arguments of a call of {call['name']!r}")
    return content if isinstance(content, str) else _json_text(content)


def response_text(content: object) -> str:
    """
    Return a tool's answer as text. Raise a ValueError if the answer is null, is not JSON, or
    contains an image in base64.
    """
    if content is None:
        fail("has a message of a tool without a 'content'")
    text = content if isinstance(content, str) else _json_text(content)
    if text is not content and INLINE_IMAGE.search(text):
        fail("has an image in a tool's answer, where it would be text: write a part, {type: image, image: …}")
    return text


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        fail("has a message of a tool whose content is not JSON")
