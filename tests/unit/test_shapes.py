"""Records of every shape become messages, or say what they lack."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.samples.shapes import RECORD_KEYS, shape_name, to_shape
from packplan.core.samples.values import UnusableRecordError
from tests.records import ANSWER, QUESTION, asked, chat, json_values, to_messages

ASKED = [QUESTION, ANSWER]

TOLD = [{"role": "system", "content": "be"}, *ASKED]

SHAPES = {
    "messages of role and content": [
        {"messages": ASKED},
        {"messages": json.dumps(ASKED)},
        {"messages": repr(ASKED)},
        {"conversations": ASKED},
        {"messages": [{"role": "human", "content": "why?"}, {"role": "gpt", "content": "so."}]},
        asked([{"type": "text", "text": "why?"}]),
        {"Messages": ASKED, "prompt": "why?"},
    ],
    "conversations of from and value": [
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}]},
        {"conversation": [{"from": "user", "value": "why?"}, {"from": "bot", "value": "so."}], "id": 3},
    ],
    "conversations of user and assistant": [
        {"conversation": [{"human": "why?", "assistant": "so."}]},
        {"messages": [{"user": "why?", "bot": "so."}]},
    ],
    "instruction, output": [
        {"instruction": "why?", "input": "", "output": "so."},
        {"instruction": "why?", "output": "so.", "text": "### why? so."},
        {"input": "why?", "output": "so."},
    ],
    "instruction, response": [{"instruction": "why?", "response": "so."}],
    "query, response": [
        {"query": "why?", "response": "so."},
        {"query": "why?", "response": ["so."], "answer": "left out", "prompt": "left out"},
    ],
    "question, answer": [{"Question": "why?", "Answer": "so."}],
    "prompt, completion": [{"prompt": "why?", "completion": "so."}, {"prompt": ASKED[:1], "completion": ASKED[1:]}],
    "problem, solution": [{"problem": "why?", "solution": "so."}],
}

CASES = [(shape, record) for shape, records in SHAPES.items() for record in records]


@pytest.mark.parametrize(("shape", "record"), CASES)
def test_records_of_every_shape_become_the_same_messages(shape, record):
    """With a system prompt under either name, and with null for what they lack."""
    assert shape == to_shape(record).shape == shape_name({**record, "beside": 1}, {})
    assert ASKED == to_messages(record)["messages"]
    for system in ("system", "system_prompt"):
        assert TOLD == to_messages({**record, system: "be", "images": None})["messages"]


def test_what_is_no_record_has_no_shape():
    with pytest.raises(UnusableRecordError, match="is not a JSON object"):
        shape_name([], {})


def own_parts(kind):
    """Yield each way in which a part of a message names its file."""
    file = f"a.{kind}"
    for url in (file, {"url": file}):
        yield {"type": f"{kind}_url", f"{kind}_url": url}, file
    for path in (file, {"path": file}):
        yield {"type": kind, kind: path}, file
    yield {"type": kind, "path": file}, file
    yield {"type": kind, "url": file, kind: None}, file


@pytest.mark.parametrize(
    ("part", "file"),
    [
        *own_parts("image"),
        *own_parts("video"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/x", "data": "QUI="}}, b"AB"),
        ({"type": "image"}, "top.png"),
        ({"type": "video", "video": ["a.png", {"path": "b.png"}]}, ("a.png", "b.png")),
    ],
)
def test_an_image_or_video_between_texts_is_a_tag_there(part, file):
    """Its file is the part's own, frames, or the next of the record; beside an image too."""
    kind = part["type"].removesuffix("_url")
    texts = [{"type": "text", "text": text} for text in ("see ", "?")]
    top = {"images": ["top.png"]} if file == "top.png" else {}

    sample = to_messages(asked([texts[0], part, texts[1]], **top))

    assert f"see <{kind}>?" == sample["messages"][0]["content"]
    assert [file] == sample[f"{kind}s"]
    if kind == "video":
        beside = to_messages(asked([{"type": "image", "image": "c.png"}, part]))
        assert (["c.png"], [file]) == (beside["images"], beside["videos"])
        assert "<image><video>" == beside["messages"][0]["content"]


@pytest.mark.parametrize(
    ("record", "contents"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, ["Add.\n1 2", "3"]),
        *(({"query": "why?", "response": "so.", "history": history}, ["a", "b", "c", "why?", "so."])
          for history in ([["a", "b"], ["c", None]], '[["a", "b"], ["c", null]]', "[('a', 'b'), ('c', None)]")),
        *((record, ["so."]) for record in
          ({"text": "so."}, {"query": None, "response": "so."}, {"query": None, "response": [ANSWER]})),
        *(({"query": "<video>?", "response": "so.", "videos": none}, ["<video>?", "so."])
          for none in (None, "", [], {})),
        (chat({"role": "system", "content": None}, QUESTION, ANSWER), ["why?", "so."]),
        (chat({"role": "system", "content": ""}, QUESTION, ANSWER), ["", "why?", "so."]),
        (chat(Messages=[]), ["why?", "so."]),
        *((chat({**ANSWER, **weighed}, *ASKED), ["so.", "why?", "so."])
          for weighed in ({"loss": True}, {"loss": False}, {"loss_scale": 2}, {"loss": False, "loss_scale": 0})),
        (chat(ANSWER, ANSWER), ["so.", "so."]),
    ],
)  # fmt: skip
def test_what_a_record_says_is_read_in_its_order(record, contents):
    """A history before its question; what is null, or empty, is none, but an empty system text."""
    sample = to_messages(record)

    assert contents == [message["content"] for message in sample["messages"]]
    assert "videos" not in sample
    if "loss" in str(record):
        assert record["messages"] == sample["messages"]


@given(st.integers(1, 3), st.booleans())
def test_images_that_no_tag_places_come_before_what_the_user_says_first(number, told):
    record = {"query": "why?", "response": "so.", "images": ["a.png"] * number, **({"system": "be"} if told else {})}

    assert "<image>" * number + "why?" == to_messages(record)["messages"][told]["content"]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"instruction": "a"}, "no known shape: it has 'instruction'"),
        ({"q": "a", "a": "b"}, r"no known shape: it has 'q', 'a'\. .* or map them, as {q: query}"),
        (dict.fromkeys("cdefghij", "a"), r"it has 'c', .*, 'j'\. "),
        ({f"{n}{'x' * 99}": "a" for n in range(99)}, r"7x+', …\. .* as {0x{39}: query}"),
        ({"conversations": [{"speaker": "x", "text": "y"}]}, "neither a role nor one question and one answer"),
        ({"conversations": [{"human": "x", "gpt": "y", "bot": "z"}]}, "neither a role nor one question and one answer"),
        ({"conversations": [{"human": "x", "gpt": "y", "score": 3}]}, "with 'score', which would be ignored"),
        ({"conversations": [{"from": None, "value": None}]}, "not an object with a text 'content'"),
        ({"messages": {"a": 1}}, "has messages that are not a list but an object"),
        ({"conversations": "hello"}, "has its messages as a text that is neither JSON nor Python: write a list"),
        ({"conversations": []}, "has no message in 'conversations', so there is nothing to learn from it"),
        ({"messages": "[]"}, "has an empty list of messages$"),
        ({"data": [chat(), chat()]}, "list of 2 objects in 'data': write each on a line of its own, or map messages"),
        (chat({"role": "system", "content": None}), "only a system message without text"),
        (chat({"from": "gpt", "value": "why?"}, QUESTION, ANSWER), "begins with a message of the assistant: swap"),
        (asked([{"type": "image"}, {"type": "text", "text": "?"}]), "refers to one of its images, but no images"),
        *(
            (asked([part]), f"has '{name}' of one image or video, which would be ignored: remove it")
            for name, part in [
                ("max_pixels", {"type": "image", "image": "a.png", "max_pixels": 50176}),
                ("min_pixels", {"type": "image_url", "image_url": {"url": "a.png", "min_pixels": 1}}),
                ("resized_width", {"type": "image", "image": {"path": "a.png", "resized_width": 28}}),
                ("fps", {"type": "video", "video": "a.mp4", "fps": 1.0}),
                ("nframes", {"type": "video", "video": {"path": "a.mp4", "nframes": 4}}),
            ]
        ),
        ({"messages": repr(asked("\ud83d")["messages"])}, "half of a surrogate pair in its messages"),
        (chat({**QUESTION, "from": "gpt"}, ANSWER), "'role' and 'from', and one would be ignored"),
        (chat(conversations=ASKED), "'messages' and 'conversations', which mean the same"),
        (chat(query="x"), "'messages' and 'query', and one would be ignored"),
        (asked(None), "not an object with a text 'content'"),
        (asked([None]), "not an object with a type"),
        (asked([{"type": "audio", "audio": "a"}]), "type 'audio': write text"),
        (asked([{"type": "text"}]), "of the type text without a 'text'"),
        (asked([{"type": "image", "source": {"type": "file"}}]), "source is neither base64 nor a url"),
        (asked([{"type": "video", "video": "a"}], videos=["b"]), "has videos in its messages and in 'videos'"),
        ({"objects": [None]}, "no text 'desc' in object 0"),
        *(
            (
                record | {"objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}},
                "'objects' of <ref-object> and <bbox>: write",
            )
            for record in (asked("<image>Where is <ref-object>?"), {"query": "<bbox>?", "response": "so."}, {})
        ),
        ({"prompt": "a", "question": "b", "answer": "c"}, "'prompt' and 'question', .*{prompt: query}"),
        ({"instruction": "a", "query": "b", "output": "c"}, "'instruction' and 'query', and one"),
        ({"instruction": 3, "output": "c"}, "'instruction' that is not a text"),
        ({"query": "a", "response": ["b", "c"]}, "'response' that is not a text: write one text"),
        ({"query": "a", "response": "b", "images": [{"bytes": None, "path": None}]}, "an entry that is not an image"),
        ({"query": "a", "response": "b", "history": [["a"]]}, r"\[question, answer\] each"),
        ({"query": "a", "response": "b", "history": "x"}, "'history' as a text that is neither JSON nor Python"),
        ({"query": "a", "response": "b", "history": {"a": 1}}, "not a list of questions with their answers"),
    ],
)
def test_a_record_that_would_lose_something_is_refused(record, says):
    with pytest.raises(ValueError, match=says):
        to_messages(record)


@pytest.mark.parametrize(
    ("record", "columns", "question"),
    [
        ({"Frage": "Why?", "response": "so"}, {"Frage": "query"}, "Why?"),
        ({"inputs": "Why?", "targets": "so"}, {"inputs": "query"}, "Why?"),
        ({"title": "Why?", "content": "so"}, {"title": "query"}, "Why?"),
        ({"instruction_text": "Why?", "output": "so"}, {"instruction_text": "query"}, "Why?"),
        ({"response": "so", "text": "Why?"}, {"text": "query"}, "Why?"),
        ({"instruction": "Why?", "context": "It is.", "response": "so"}, {"context": "input"}, "Why?\nIt is."),
        (
            {"question": "Why?", "Passage": "It is.", "answer": "so"},
            {"question": "instruction", "Passage": "input"}, "Why?\nIt is.",
        ),
    ],
)  # fmt: skip
def test_a_text_of_the_question_is_read_only_under_a_name_and_never_lost(record, columns, question):
    """The refusal names two mappings: one reads the text, the other ignores it."""
    lost, mapping = [*columns][-1], ", ".join(f"{name}: {known}" for name, known in columns.items())
    with pytest.raises(UnusableRecordError) as refused:
        to_messages(record)

    assert f"map it, as {{{mapping}}}; or ignore it, as {{{lost}: null}}" in str(refused.value)
    assert [question, "so"] == [one["content"] for one in to_messages(record, columns)["messages"]]
    assert "so" == to_messages(record, {lost: None})["messages"][-1]["content"]
    assert to_messages({"text": "so", "title": "Why?"}) == to_messages({"text": "so", "source": "a", "id": "b"})


@pytest.mark.parametrize("records", [SHAPES[name] for name in SHAPES], ids=SHAPES)
def test_an_empty_system_prompt_is_none_in_every_shape(records):
    """A message of the system that says nothing: the template's own prompt is not trained."""
    for record in records:
        for system in ("system", "System", "system_prompt"):
            assert [{"role": "system", "content": ""}, *ASKED] == to_messages({**record, system: ""})["messages"]


odd_values = st.recursive(
    json_values | st.dates() | st.datetimes() | st.decimals() | st.binary(max_size=3) | st.timedeltas(),
    lambda inner: st.lists(inner, max_size=2) | st.lists(st.tuples(st.text(max_size=2), inner), max_size=2),
    max_leaves=4,
)
"""Values of JSON, and of types that columns of Parquet have."""


@given(st.dictionaries(st.sampled_from(sorted(RECORD_KEYS)), odd_values, min_size=1, max_size=4))
def test_any_value_under_any_key_is_read_or_refused_as_a_record(record):
    """No other error, and no message of more than a few hundred characters."""
    try:
        assert to_messages(record)["messages"]
    except UnusableRecordError as refused:
        assert len(str(refused)) < 500  # noqa: PT017


def test_keys_have_the_names_that_the_user_gives_them():
    """Two may change places; a name that is taken is refused."""
    columns = {"q": "query", "a": "response"}
    assert ASKED == to_messages({"q": "why?", "a": "so."}, columns=columns)["messages"]
    swapped = {"query": "response", "response": "query"}
    assert ASKED == to_messages({"query": "so.", "response": "why?"}, columns=swapped)["messages"]
    assert ASKED == to_messages({"prompt": "why?", "query": None, "a": "so."}, columns={"a": "answer"})["messages"]
    with pytest.raises(ValueError, match="has 'query' twice, once as 'q'"):
        to_messages({"query": "x", "q": "why?", "a": "so."}, columns=columns)
