"""
A mix is written as one data file, whole or not at all, whose records are those of its sources.
"""

from __future__ import annotations

import base64
import json
import os

import pytest
import yaml

from packplan.adapters.samples.files import copied_line, open_records
from packplan.app.wiring.mixes import materialise
from packplan.core.errors import ConfigError, RecordError
from packplan.core.mixes import quotas
from packplan.core.samples import to_messages
from tests.records import ANSWER, QUESTION, asked, chat

pytestmark = pytest.mark.covers


@pytest.fixture
def write_mix(tmp_path):
    """Return a function that writes two sources in folders of their own, and a mix of them."""

    def write(*sources: dict, **more) -> str:
        for name, count in (("a", 30), ("b", 12)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "0.png").write_bytes(name.encode())
            records = [{"messages": [], "number": n, "from": name, "images": ["0.png"]} for n in range(count)]
            del records[1]["images"]
            (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        rows = [{"jsonl": str(tmp_path / row.pop("of") / "data.jsonl"), **row} for row in sources]
        path = tmp_path / "mix.yaml"
        path.write_text(yaml.safe_dump({"sources": rows, **more}))
        return str(path)

    return write


def test_the_file_holds_the_scheduled_records_with_their_images(write_mix, tmp_path):
    """
    Ratios exact, no record twice, images found from the file's own folder; another epoch, another
    mix.
    """
    path = write_mix({"of": "a", "ratio": 3}, {"of": "b", "ratio": 1})
    output = tmp_path / "out" / "deep" / "mix.jsonl"

    materialise(path, output, seed=1, epoch=0)

    records = [json.loads(line) for line in output.read_text().splitlines()]
    from packplan.adapters.config.run import load_mixes

    drawn = [sum(record["from"] == name for record in records) for name in "ab"]
    assert quotas(load_mixes(path).at(0), [30, 12]) == drawn == [30, 10]
    assert 40 == len({(record["from"], record["number"]) for record in records})
    for record in records:
        for image in record.get("images", ()):
            assert record["from"].encode() == (output.parent / image).read_bytes()
    assert 2 >= sum("images" not in record for record in records) >= 1
    first = output.read_bytes()
    materialise(path, output, seed=1, epoch=0)
    assert first == output.read_bytes()
    materialise(path, output, seed=1, epoch=1)
    assert first != output.read_bytes()


@pytest.mark.parametrize(
    ("sources", "more", "says"),
    [
        ([{"of": "a"}], {}, r"sources\[0\].*either a ratio or a count"),
        ([{"of": "a", "ratio": 1, "wieght": 2}], {}, "wieght"),
        ([{"of": "b", "count": 13}], {}, "has 12 samples: lower it, or set replacement: true"),
        ([{"of": "a", "ratio": 1}, {"of": "b", "ratio": 1}], {"samples_per_epoch": 40}, "but its share is 20"),
        ([], {}, "name at least one"),
        ([{"of": "a", "ratio": "often"}], {}, "has to be a number"),
    ],
)
def test_what_is_wrong_with_a_mix_is_said(write_mix, tmp_path, sources, more, says):
    """And nothing is written."""
    with pytest.raises(ConfigError, match=says):
        materialise(write_mix(*sources, **more), tmp_path / "mix.jsonl", seed=0, epoch=0)

    assert not (tmp_path / "mix.jsonl").exists()


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


def test_a_source_is_never_overwritten(write_mix, tmp_path):
    """Nor a folder taken for a file, nor a pipe or a device replaced by one."""
    path = write_mix({"of": "a", "ratio": 1})
    before = (tmp_path / "a" / "data.jsonl").read_bytes()

    with pytest.raises(ConfigError, match="is one of the sources"):
        materialise(path, tmp_path / "b" / ".." / "a" / "data.jsonl", seed=0, epoch=0)
    with pytest.raises(ConfigError, match="is a folder"):
        materialise(path, tmp_path, seed=0, epoch=0)
    with pytest.raises(ConfigError, match=r"--output: .*cannot be written"):
        materialise(path, tmp_path / "a" / "data.jsonl" / "mix.jsonl", seed=0, epoch=0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--output: .*pipe cannot be written: it is a pipe or a device"):
        materialise(path, tmp_path / "pipe", seed=0, epoch=0)

    assert (tmp_path / "pipe").is_fifo()
    assert before == (tmp_path / "a" / "data.jsonl").read_bytes()


@pytest.mark.slow
def test_a_static_run_trains_from_it(write_mix, tmp_path, capfd):
    """By the command that the refusal of a mix names."""
    from packplan.app.plan.__main__ import main

    path = write_mix({"of": "a", "count": 5})

    assert 0 == main(["materialise", path, "-o", str(tmp_path / "mix.jsonl"), "--epoch", "3"])
    assert "5 of 5 samples from" in capfd.readouterr().err
    assert 5 == len((tmp_path / "mix.jsonl").read_text().splitlines())
    with pytest.raises(SystemExit, match="2"):
        main(["materialise", path, "-o", str(tmp_path / "mix.jsonl"), "--epoch", "-1"])
