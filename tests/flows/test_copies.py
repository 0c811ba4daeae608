"""A record that is copied into another folder is read as the same record."""

import base64
import json
import os

import pytest

from packplan.adapters.samples.files import copied_line, open_records
from packplan.core.errors import RecordError
from packplan.core.samples import to_messages
from tests.records import ANSWER, QUESTION, asked, chat

pytestmark = pytest.mark.covers


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 120
CODED = base64.encodebytes(PNG).decode()


def seen(*content, **more):
    return asked([*content, {"type": "text", "text": "?"}], **more)


NOTATIONS = [
    asked("<image>", images=["0.png"]),
    asked("<image>", images=[{"url": "0.png"}, {"path": "0.png", "bytes": None}][:1]),
    asked("<image>", image={"path": "0.png", "source": "a.txt"}),
    {"Query": "?", "Response": "0.png", "Image": "0.png"},
    {"q": "?", "r": "so.", "bild": "0.png"},
    {"image": "./0.png", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "so."}]},
    seen({"type": "image", "image": "0.png"}),
    seen({"type": "image", "path": "0.png"}),
    seen({"type": "image_url", "image_url": {"url": "0.png", "detail": "low"}}),
    seen({"type": "image", "source": {"type": "url", "url": "0.png"}}),
    {"conversations": [{"from": "human", "value": [{"type": "image", "image": "0.png"}]}, ANSWER]},
    {"messages": json.dumps(seen({"type": "image", "image": "0.png"})["messages"])},
    {"prompt": seen({"type": "image", "url": "0.png"})["messages"][:1], "completion": [ANSWER]},
    asked("?", videos=[["0.png", {"path": "0.png"}]]),
    seen({"type": "video_url", "video_url": {"url": "0.png"}}),
    asked("<image>", images=[CODED]),
    asked("<image>", images=[{"bytes": CODED}]),
    seen({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CODED}"}}),
    chat(QUESTION, {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
         {"role": "tool", "content": [{"type": "image", "image": "0.png"}]}, ANSWER),
    chat(QUESTION, {"role": "tool_call", "content": {"name": "f", "arguments": {"image": "0.png"}}}, image="0.png"),
    {"images": ["0.png"], "objects": [{"desc": "0.png", "bbox_2d": [1, 2, 3, 4]}]},
]  # fmt: skip
"""Records that show one medium, in each notation, in a folder with `0.png`."""


def shown(path):
    """Return the messages of the only record of a file, and what its media hold."""
    records = open_records((str(path),))
    sample = to_messages(records[0], columns={"q": "query", "r": "response", "bild": "image"})
    videos = [video if isinstance(video, tuple) else (video,) for video in sample.pop("videos", ())]
    media = [*sample.pop("images", ()), *(frame for video in videos for frame in video)]
    return sample, [one if isinstance(one, bytes) else (path.parent / one).read_bytes() for one in media]


@pytest.mark.parametrize("record", NOTATIONS, ids=range(len(NOTATIONS)))
def test_a_copy_shows_the_same_media(tmp_path, record):
    """From another folder, through links on both sides, where the same name is another image."""
    for folder, held in (("data/real", PNG), ("out/real", b"another image")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "0.png").write_bytes(held)
    for link, target in (("in", "data/real"), ("to", "out/real")):
        (tmp_path / link).symlink_to(tmp_path / target)
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps(record))
    columns = {"q": "query", "r": "response", "bild": "image"}

    line = copied_line(open_records((str(tmp_path / "in" / "a.jsonl"),)), 0, tmp_path / "to", columns=columns)

    (tmp_path / "to" / "b.jsonl").write_bytes(line)
    sample, media = shown(tmp_path / "to" / "b.jsonl")
    assert shown(tmp_path / "in" / "a.jsonl") == (sample, media)
    assert {PNG} == {*media}


def test_what_names_no_media_is_written_as_it_is(tmp_path):
    """Parts of messages may have any shape: what is wrong with one is said where it is read."""
    record = {"messages": ["none", {"content": ["text", None, {"type": "text", "text": "more"}]}]}
    record |= {"images": [{"path": "/0.png", "source": "a.txt"}, "", None], "source": {"path": "a.txt"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))

    assert record == json.loads(copied_line(open_records((str(tmp_path / "a.jsonl"),)), 0, tmp_path / "b"))


def test_a_copy_that_would_be_read_otherwise_is_refused(tmp_path):
    """As a path that JSON cannot write, or one in the JSON of a tool, which is text."""
    folder = tmp_path / os.fsdecode(b"\xe9")
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "a.jsonl").write_text(json.dumps(asked("<image>", images=["link/0.png"])))

    told = {"role": "tool", "content": [{"content": [{"type": "image", "url": "0.png"}]}]}
    call = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}
    (tmp_path / "b.jsonl").write_text(json.dumps(chat(QUESTION, call, told, ANSWER)))

    for name, reason in (("a", "is not UTF-8 text"), ("b", "a copy of the record .* would be read otherwise")):
        with pytest.raises(RecordError, match=rf"{name}\.jsonl, line 1: {reason}"):
            copied_line(open_records((str(tmp_path / f"{name}.jsonl"),)), 0, tmp_path / "to")
