"""
Conversion of common shapes of records into messages.

ms-swift reads messages in several notations, and columns of many names as a question and its
answer. This module reads records in the same way as ms-swift. If ms-swift would ignore a part of a
record or choose between two columns, the module refuses the record and names a remedy.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from packplan.core.errors import counted
from packplan.core.samples.media import IMAGE_KEYS, PART_KEYS, PATH_KEYS, VIDEO_KEYS, VIDEO_TAG, refuse_media_settings
from packplan.core.samples.tools import CALL, RESPONSE, split_calls, split_parts, to_text_content
from packplan.core.samples.values import fail, has, is_empty, parse_literal

IMAGE_TAG = "<image>"

Media = defaultdict[str, list[Any]]
"""Key of a record (`images` or `videos`) -> media from inside its messages."""

_NAMED_BY_RECORD = "named by the record"
"""
Key of `Media` that lists `images` or `videos` for each message part that refers to the record's
next medium.
"""

MESSAGE_KEYS = ("messages", "conversations", "conversation")

SYSTEM_KEYS = ("system", "system_prompt")

QUERY_KEYS = ("query", "prompt", "input", "instruction", "question", "problem")

RESPONSE_KEYS = (
    "response", "answer", "output", "targets", "target", "answer_key", "answers", "solution", "text", "completion",
    "content",
)  # fmt: skip

RECORD_KEYS = frozenset(
    {
        *MESSAGE_KEYS, *SYSTEM_KEYS, *IMAGE_KEYS, *VIDEO_KEYS, *QUERY_KEYS, *RESPONSE_KEYS,
        "history", "objects", "summary", "channel", "tools",
    }
)  # fmt: skip
"""Keys that at least one shape reads, in any letter case."""

NOTES = ("id", "index", "source", "model", "language", "timestamp")
"""Keys of a record or a message that contain nothing to train on, and are ignored."""

_CONTEXTS = ("context", "passage", "document", "article")
"""Keys, in any letter case, of texts to which a question refers."""

_ANSWERED = (
    "query", "response", "history", "instruction", "output", "prompt", "completion", "question", "answer",
)  # fmt: skip
"""
Keys that a record with `objects` must not have. A record with `messages` must not have the first
three.
"""

_ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant",
    "system": "system",
    "tool_call": CALL, "function_call": CALL,
    "tool": RESPONSE, "tool_response": RESPONSE, "function_response": RESPONSE, "observation": RESPONSE,
    "observations": RESPONSE,
}  # fmt: skip
"""Name of a role in messages -> role of ms-swift."""

_LOSSES = ("weight", "train")
"""Keys of messages with which other programs set whether a message is trained (1) or not (0)."""

MESSAGES, DENSE = "messages of role and content", "dense captions"

MIXABLE = frozenset({MESSAGES, DENSE})
"""
Shapes that one file may mix, because their keys differ: a record is never mistaken for the other
shape.
"""


_KINDS = {int: "a number", float: "a number", bool: "true or false", dict: "an object", bytes: "bytes"}
"""Type of a value -> its name in error messages."""

_SHOWN = 8
"""Maximum number of keys that an error message names."""


@attrs.frozen
class ShapedRecord:
    """Record converted to the keys that `to_messages` reads, and the name of its original shape."""

    shape: str

    record: Mapping[str, Any]
    """The record with keys such as `messages`, `images`, `system` and `objects`."""


def to_shape(record: object, columns: Mapping[str, str | None] | None = None) -> ShapedRecord:
    """
    Recognise the shape of a record, and convert it into messages unless it is a dense caption.

    Args:
        record: One JSON value of a data file.
        columns: Key in the record -> key of `RECORD_KEYS` that it is read as. None ignores the key,
            also in messages.

    Raises:
        ValueError: The record has no known shape, or a part of it would be ignored.

    >>> to_shape({"question": "Why?", "answer": "So."}).shape
    'question, answer'
    """
    if not isinstance(record, Mapping):
        fail("is not a JSON object: write {…} with 'messages', or in another shape that docs/records.md lists")
    record = rename_keys(record, columns or {})
    for names in (SYSTEM_KEYS, IMAGE_KEYS, VIDEO_KEYS, MESSAGE_KEYS):
        record = _merge_synonyms(record, names)
    if ignored := {name for name, known in (columns or {}).items() if known is None}:
        record = {name: _drop_keys(held, name, ignored) for name, held in record.items()}
    if isinstance(objects := record.get("objects"), Mapping) and {"ref", "bbox"} & objects.keys():
        fail("has 'objects' of <ref-object> and <bbox>: write names and boxes into the texts, or train with swift sft")
    for known, others in (("messages", _ANSWERED[:3]), ("objects", _ANSWERED)):
        if has(record, known) and (other := next((name for name in others if has(record, name)), None)):
            fail(f"has {known!r} and {other!r}, and one would be ignored: remove one")
    if has(record, "messages"):
        return _from_messages(record)
    if has(record, "objects"):
        return ShapedRecord(DENSE, {**record, "objects": parse_literal(record["objects"], "'objects'")})
    if any(has(record, name) for name in RESPONSE_KEYS):
        return _from_columns(record)
    return _refuse_unknown_shape(record)


def shape_name(record: object, columns: Mapping[str, str | None]) -> str:
    """Return the name of a record's shape, ignoring unknown keys; see `to_shape`."""
    if isinstance(record, Mapping):
        record = {name: held for name, held in record.items() if name in columns or name.lower() in RECORD_KEYS}
    return to_shape(record, columns).shape


def _refuse_unknown_shape(record: Mapping[str, Any]) -> NoReturn:
    """
    Raise an error for a record without a known shape. The message names missing or unmapped keys.
    """
    empty = [*((name, "message") for name in MESSAGE_KEYS), ("objects", "object")]
    for known, held in (*empty, *((name, "text") for name in RESPONSE_KEYS)):
        if known in record:
            fail(f"has no {held} in {known!r}, so there is nothing to learn from it")
    if name := next((name for name, held in record.items() if _is_chat(held) and name not in RECORD_KEYS), None):
        listed = f"has a list of {counted(len(record[name]), 'object')} in {name!r}"
        fail(f"{listed}: write each on a line of its own, or map messages, as {{{name}: messages}}", argument="columns")
    fail(f"has no known shape: {_describe_keys(record)}", argument="columns")


def rename_keys(record: Mapping[str, Any], columns: Mapping[str, str | None]) -> Mapping[str, Any]:
    """
    Rename the keys of a record by *columns*; raise an error if two keys get the same name.

    Keys that a shape reads are converted to lower case.
    """
    renamed: dict[str, Any] = {}
    for name, held in record.items():
        if columns.get(name, "") is None:
            continue
        known = columns.get(name) or (name.lower() if name.lower() in RECORD_KEYS else name)
        if not has(renamed, known):
            renamed[known] = held
        elif not is_empty(held):
            fail(f"has {known!r} twice, once as {name!r}: remove one, or give one another name", argument="columns")
    return renamed


def _drop_keys(value: Any, name: str, ignored: Collection[str]) -> Any:
    """
    Return the value of a record's key *name*, with the *ignored* keys removed from its messages.
    """
    messages = parse_literal(value, "its messages") if name == "messages" else value
    if name not in {"messages", *QUERY_KEYS, *RESPONSE_KEYS} or not _is_chat(messages):
        return value
    return [{key: held for key, held in message.items() if key not in ignored} for message in messages]


def quoted(names: Sequence[str]) -> str:
    """
    Return key names in quotes for an error message. If there are many names, only the first ones
    are listed.
    """
    return ", ".join(repr(name[:40]) for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def ignoring(names: Sequence[str]) -> str:
    """
    Return the end of an error message about keys: the `columns` entry with which the keys are
    ignored.
    """
    listed = ", ".join(f"{name[:40]}: null" for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"; or ignore {'them' if len(names) > 1 else 'it'}, as {{{listed}}}"


def _merge_synonyms(record: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """
    Rename a record's only key among the synonyms *names* to the first of them; raise an error if
    the record has two of these keys.
    """
    found = [name for name in names if has(record, name)]
    if len(found) > 1:
        fail(f"has {found[0]!r} and {found[1]!r}, which mean the same: remove one")
    if not found or found == [names[0]]:
        return record
    return {**{name: held for name, held in record.items() if name not in names}, names[0]: record[found[0]]}


# Messages in several notations.


def _from_messages(record: Mapping[str, Any]) -> ShapedRecord:
    """Convert a record that has messages into ms-swift's notation."""
    messages = parse_literal(record["messages"], "its messages")
    if not isinstance(messages, list):
        fail(f"has messages that are not a list but {_KINDS.get(type(messages), type(messages).__name__)}")
    if not messages:
        fail("has an empty list of messages")
    if not all(isinstance(message, Mapping) for message in messages):
        fail("has a message that is not an object with a role and a content")
    media: Media = defaultdict(list)
    if any(name in messages[0] for name in ("role", "from", "content", "value")):
        shape = MESSAGES if "role" in messages[0] else "conversations of from and value"
        converted = _normalise_messages(messages, media)
    else:
        shape = "conversations of user and assistant"
        converted = [one for message in messages for one in _split_pair(message)]
    if not converted:
        fail("has only a system message without text, so there is nothing to learn from it")
    _refuse_answer_first(converted)
    return ShapedRecord(shape, _add_media({**record, "messages": converted}, media))


def _normalise_messages(messages: Sequence[Mapping[str, Any]], media: Media) -> list[dict[str, Any]]:
    """
    Return messages that have only a role and text. Images and videos in the messages are moved to
    *media*.
    """
    # Some exports write a system message that has only null values.
    said = [one for one in map(_normalise_role, messages) if one != {**dict.fromkeys(one), "role": "system"}]
    converted = list(split_parts(map(to_text_content, split_calls(said))))
    for message in converted:
        if isinstance(parts := message.get("content"), list):
            message["content"] = "".join(_flatten_part(part, media) for part in parts)
    return converted


def _add_media(record: Mapping[str, Any], media: Media) -> Mapping[str, Any]:
    """
    Add the images and videos of a record's messages to the record; raise an error if the record has
    others.
    """
    for name in media.pop(_NAMED_BY_RECORD, ()):
        if not has(record, name):
            fail(f"has a message part that refers to one of its {name}, but no {name}: name the file in the part")
    for name in media:
        if has(record, name):
            fail(f"has {name} in its messages and in {name!r}, and one would be ignored: keep one")
    return {**record, **media}


def _normalise_role(message: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a message with the keys `role` and `content`; raise an error if one of them has two
    values.
    """
    converted = {name: held for name, held in message.items() if name not in {"from", "value"}}
    for name, other in (("role", "from"), ("content", "value")):
        if other in message:
            if not is_empty(message.get(name)) and message[name] != message[other]:
                fail(f"has a message with {name!r} and {other!r}, and one would be ignored: keep one")
            converted[name] = message[other]
    if isinstance(role := converted.get("role"), str):
        converted["role"] = _ROLES.get(role, _ROLES.get(role.replace("-", "_"), role))
    for name in _LOSSES:
        trained, learns = converted.get(name), converted.get("role") in ("assistant", CALL)
        if trained in (0, 1) and converted.get("loss") in (None, trained) and (learns or not trained):
            converted |= {"loss": bool(trained), name: None}
    return converted


def _refuse_answer_first(messages: Sequence[Mapping[str, Any]]) -> None:
    """
    Raise an error if an assistant's message comes before the first user message, since the roles
    may be swapped.
    """
    roles = [message.get("role") for message in messages]
    if "assistant" not in roles or "user" not in roles or roles.index("user") < (first := roles.index("assistant")):
        return
    if messages[first].get("loss") is None and messages[first].get("loss_scale") is None:
        fail(
            "begins with a message of the assistant: swap the roles if they are swapped; otherwise write whether it is "
            "trained, as 'loss': true or false"
        )


def _flatten_part(part: object, media: Media) -> str:
    """
    Return the text of a part, or the tag of an image or video, which is moved to *media*. Raise an
    error for an invalid part.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        fail("has a message part that is not an object with a type: write a text, or a list of such objects")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            fail("has a message part of the type text without a 'text'")
        return str(part["text"])
    if kind not in PART_KEYS:
        fail(f"has a message part of the type {kind!r}: write text, image, image_url, video or video_url")
    refuse_media_settings(part)
    medium = next((part[name] for name in (kind, *PATH_KEYS) if not is_empty(part.get(name))), None)
    if medium is None and isinstance(source := part.get("source"), Mapping):
        medium = _source_image(source)
    if isinstance(medium, Mapping) and "url" in medium:
        refuse_media_settings(medium)
        medium = medium["url"]
    if is_empty(medium):
        media[_NAMED_BY_RECORD].append(PART_KEYS[kind])
    else:
        media[PART_KEYS[kind]].append(medium)
    return IMAGE_TAG if PART_KEYS[kind] == "images" else VIDEO_TAG


def _source_image(source: Mapping[str, Any]) -> str:
    """
    Return the image in the `source` of a part as a URL or a data URI; raise an error for any other
    source.
    """
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type')};base64,{source['data']}"
    if isinstance(source.get("url"), str):
        return str(source["url"])
    return fail("has an image whose source is neither base64 nor a url: write one of the two")


def _split_pair(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a question and its answer from an object with both."""
    asking = {name for name, role in _ROLES.items() if role in {"user", "assistant"}}
    for role in ("user", "assistant"):
        found = [name for name in message if _ROLES.get(name) == role]
        if len(found) != 1:
            fail(
                "has a message with neither a role nor one question and one answer: write 'role' and 'content' (or "
                "'from' and 'value'), or 'user' and 'assistant'"
            )
        yield {"role": role, "content": message[found[0]]}
    if more := [name for name, held in message.items() if name not in asking and not is_empty(held)]:
        reason = f"has a message with {quoted(more)}, which would be ignored: remove such keys{ignoring(more)}"
        fail(reason, argument="columns")


# Columns that hold a question and its answer.


def _from_columns(record: Mapping[str, Any]) -> ShapedRecord:
    """Convert a record with a question and an answer in columns into messages."""
    query: Any = None
    answer = "output" if has(record, "instruction") and has(record, "output") else _find_key(record, RESPONSE_KEYS)
    if has(record, "instruction") or (has(record, "input") and answer == "output"):
        query, asked = _read_alpaca_query(record)
    elif asked := _find_key(record, QUERY_KEYS) or "":
        query = record[asked]
    _refuse_lost_texts(record, asked, answer)
    response = record[answer]
    if isinstance(response, list) and len(response) == 1 and isinstance(response[0], str):
        response = response[0]
    media: Media = defaultdict(list)
    if _is_chat(query) or _is_chat(response):
        messages = [*_chat_messages(query, "user", media), *_chat_messages(response, "assistant", media)]
    else:
        messages = [*_history_messages(record), *_turn_messages(query, response, (asked, answer))]
    read = {*asked.split(", "), answer, "history", "input", "instruction"}
    rest = {name: held for name, held in record.items() if name not in read}
    return ShapedRecord(", ".join(filter(None, (asked, answer))), _add_media({**rest, "messages": messages}, media))


def _refuse_lost_texts(record: Mapping[str, Any], asked: str, answer: str) -> None:
    """
    Raise an error if a text would be ignored. This concerns the context of a question, and any text
    in a record that has an answer but no question.
    """
    read = {*RECORD_KEYS, *NOTES} - {*RESPONSE_KEYS} | {answer}
    is_bare = not asked and answer != "text" and not has(record, "history") and not _is_chat(record[answer])
    texts = [name for name, held in record.items() if isinstance(held, str) and held.strip()]
    lost = [name for name in texts if (name.lower() in _CONTEXTS if asked else is_bare and name not in read)]
    if lost:
        first = "" if asked in {"", "instruction"} else f"{asked}: instruction, "
        mapping = f"{{{first}{lost[0][:40]}: {'input' if asked else 'query'}}}"
        what = f"beside {asked!r}" if asked else f"and an answer in {answer!r} without a question"
        lose = f"which would be ignored: map {'one' if lost[1:] else 'it'}, as {mapping}{ignoring(lost)}"
        fail(f"has {quoted(lost)} {what}, {lose}", argument="columns")


def _read_alpaca_query(record: Mapping[str, Any]) -> tuple[str, str]:
    """
    Return the query of an alpaca record, which joins its instruction and its input, and the query's
    key.
    """
    parts = {name: record[name] for name in ("instruction", "input") if has(record, name)}
    for name, part in parts.items():
        if not isinstance(part, str):
            fail(f"has {name!r} that is not a text")
    if other := next((name for name in QUERY_KEYS if name not in {"instruction", "input"} and has(record, name)), None):
        reason = f"has {next(iter(parts))!r} and {other!r}, and one would be ignored: remove one, as {{{other}: null}}"
        fail(reason, argument="columns")
    return "\n".join(parts.values()), "instruction"


def _find_key(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """
    Return the record's key of a question or an answer, one of *names*; empty if the record has none
    of them. If the record has several, return the first of *names*, or raise an error if the record
    lacks the first.
    """
    found = [name for name in names if has(record, name)]
    if len(found) > 1 and found[0] != names[0]:
        fail(
            f"has {found[0]!r} and {found[1]!r}, and one would be ignored: choose which one is the {names[0]}, "
            f"as {{{found[0]}: {names[0]}}}",
            argument="columns",
        )
    return found[0] if found else ""


def _history_messages(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a record's `history` of questions and answers."""
    history = parse_literal(record["history"], "'history'") if has(record, "history") else []
    if not isinstance(history, list):
        fail("has a 'history' that is not a list of questions with their answers")
    for turn in history:
        if not isinstance(turn, (list, tuple)) or len(turn) != 2:
            fail("has a 'history' that is not a list of questions with their answers, [question, answer] each")
        yield from _turn_messages(turn[0], turn[1], ("history", "history"))


def _turn_messages(query: object, response: object, names: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """
    Yield the messages of one question and answer, without null values; raise an error if a value is
    not a text.
    """
    for role, text, name in (("user", query, names[0]), ("assistant", response, names[1])):
        if text is None:
            continue
        if not isinstance(text, str):
            fail(f"has {name!r} that is not a text: write one text")
        yield {"role": role, "content": text}


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _chat_messages(value: Any, role: str, media: Media) -> list[dict[str, Any]]:
    """
    Return the messages in a question or an answer; a plain text becomes one message of *role*.
    """
    if _is_chat(value):
        return _normalise_messages(value, media)
    return [] if value is None else [{"role": role, "content": value}]


def _describe_keys(record: Mapping[str, Any]) -> str:
    """Return a text with a record's keys and how to map them."""
    names = [name for name in record if isinstance(name, str) and has(record, name)]
    if not names:
        return "none of its keys has a value"
    return f"it has {quoted(names)}. Rename them as in docs/records.md, or map them, as {{{names[0][:40]}: query}}"
