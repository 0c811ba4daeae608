"""Data as users have them are read as ms-swift reads them: the same tokens, the same labels."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
from pathlib import Path

import pytest
import zstandard
from PIL import Image

from packplan.core.errors import RecordError


def png(color: str) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (60, 60 + len(color) * 7), color).save(sink, "png")
    return sink.getvalue()


RED, BLUE = png("red"), png("blue")

CODED = base64.b64encode(RED).decode()


def asked(content, **more):
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a red dot"}], **more}


LLAVA = [
    {
        "id": f"{number}", "image": "red.png",
        "conversations": [
            {"from": "human", "value": f"<image>\nWhat is it, {number}?"}, {"from": "gpt", "value": "A dot."},
            {"from": "human", "value": "Which colour?"}, {"from": "gpt", "value": "Red."},
        ],
    }
    for number in range(3)
]  # fmt: skip
SHAREGPT = [
    {
        "conversations": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"},
        ]
    }
] * 2  # fmt: skip
ALPACA = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Say x.", "input": "", "output": "x"}]
TEXT = [asked("hi"), asked("who?")]


def tool(*names):
    properties = {name: {"type": "integer"} for name in names}
    return {"type": "function", "function": {"name": f"of_{'_'.join(names)}", "description": "Adds.",
                                             "parameters": {"type": "object", "properties": properties}}}  # fmt: skip


TOOLS = [
    {
        "tools": [tool("a"), tool("b", "c")][number:],
        "messages": [
            {"role": "user", "content": "1 and 2?"},
            {"role": "tool_call", "content": json.dumps({"name": "of_a", "arguments": {"a": number}})},
            {"role": "tool_response", "content": "3"}, {"role": "assistant", "content": "Three."},
        ],
    }
    for number in range(2)
]  # fmt: skip
OBSERVED = [
    {
        "tools": json.dumps([tool("a")]),
        "conversations": [
            {"from": "human", "value": "1 and 2?"},
            {"from": "function_call", "value": json.dumps({"name": "of_a", "arguments": {"a": 1}})},
            {"from": "observation", "value": "3"}, {"from": "gpt", "value": "Three."},
        ],
    }
]  # fmt: skip


def lines(records) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def table(records, name: str, folder: Path) -> None:
    import datasets

    held = datasets.Dataset.from_list(records)
    held.to_parquet(folder / name) if name.endswith("parquet") else held.save_to_disk(folder / name)


def sheet(records) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, records[0])
    writer.writeheader()
    writer.writerows(records)
    return sink.getvalue().encode()


CASES = {
    "LLaVA, an array": ("a.json", lambda: json.dumps(LLAVA, indent=2).encode()),
    "LLaVA, lines": ("a.jsonl", lambda: lines(LLAVA)),
    "ShareGPT": ("a.json", lambda: json.dumps(SHAREGPT).encode()),
    "alpaca": ("a.json", lambda: json.dumps(ALPACA).encode()),
    "query, response, history": (
        "a.jsonl",
        lambda: lines([{"query": "c", "response": "d", "history": [["a", "b"]], "system": "Be."}]),
    ),
    "prompt, completion": ("a.jsonl", lambda: lines([{"prompt": "a", "completion": "b"}])),
    "question, answer": ("a.jsonl", lambda: lines([{"Question": "a", "Answer": "b"}])),
    "text": ("a.jsonl", lambda: lines([{"text": "blue circle"}])),
    "messages": ("a.jsonl", lambda: lines(TEXT)),
    "human and gpt": ("a.jsonl", lambda: lines([{"conversation": [{"human": "a", "assistant": "b"}]}])),
    "several images": ("a.jsonl", lambda: lines([asked("<image> or <image>?", images=["red.png", "blue.png"])])),
    "an image without its tag": ("a.jsonl", lambda: lines([{"query": "what?", "response": "b", "image": "red.png"}])),
    "data URI": ("a.jsonl", lambda: lines([asked("<image>?", images=[f"data:image/png;base64,{CODED}"])])),
    "base64": ("a.jsonl", lambda: lines([asked("<image>?", images=[CODED])])),
    "bytes": ("a.jsonl", lambda: lines([asked("<image>?", images=[{"bytes": CODED}])])),
    "tools": ("a.jsonl", lambda: lines(TOOLS)),
    "roles of tools": ("a.json", lambda: json.dumps(OBSERVED).encode()),
    "tools in Parquet": ("a.parquet", lambda: TOOLS),
    "path in Parquet": ("a.parquet", lambda: [asked("<image>?", images=[{"bytes": None, "path": "red.png"}])]),
    "path": ("a.jsonl", lambda: lines([asked("<image>?", images=[{"path": "red.png"}])])),
    "content parts": (
        "a.jsonl",
        lambda: lines(
            [
                asked(
                    [
                        {"type": "text", "text": "see "},
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CODED}"}},
                        {"type": "text", "text": "?"},
                    ]
                )
            ]
        ),
    ),
    "Parquet": ("a.parquet", lambda: TEXT),
    "Parquet of LLaVA": ("a.parquet", lambda: LLAVA),
    "bytes in Parquet": ("a.parquet", lambda: [asked("<image>?", images=[{"bytes": RED, "path": None}])]),
    "save_to_disk": ("folder", lambda: [asked("<image>?", images=[{"bytes": BLUE, "path": None}]) for _ in range(3)]),
    "gz": ("a.jsonl.gz", lambda: gzip.compress(lines(LLAVA))),
    "zst": ("a.jsonl.zst", lambda: zstandard.ZstdCompressor().compress(lines(ALPACA))),
    "CSV": ("a.csv", lambda: sheet([{"query": "a, b", "response": 'say "c"'}, {"query": "\nd", "response": "e"}])),
    "a pattern": ("a*.jsonl", lambda: lines(TEXT)),
}

NOT_READ = {
    "bytes": "plain.jsonl", "gz": "a.jsonl", "zst": "a.jsonl", "save_to_disk": "a.parquet", "a pattern": "a1.jsonl",
}  # fmt: skip
"""Cases whose files ms-swift does not read as they are -> those that it reads in their place."""


def write(folder: Path, name: str, held) -> None:
    if isinstance(held, list):
        table(held, name, folder)
    else:
        (folder / name.replace("*", "1")).write_bytes(held)


@pytest.fixture
def encoder(write_run, one_template, tmp_path, monkeypatch):
    """Return a function that opens data files as a run does, in a folder that has two images."""
    from packplan.app.wiring import training

    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
    return lambda name, **custom: training.open_samples(
        training.read_config(write_run(custom={"train_jsonl": str(tmp_path / name), **custom}))
    )["train"]


def loaded_by_swift(path: Path, **options):
    from swift.dataset import load_dataset

    return load_dataset([str(path)], num_proc=1, load_from_cache_file=False, strict=True, **options)[0]


# The library that reads CSV for ms-swift leaves its file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_each_shape_has_the_tokens_and_labels_that_ms_swift_gives_it(case, encoder, tmp_path):
    """As its own loading of the same file, or of the same records where it cannot read the file."""
    name, made = CASES[case]
    write(tmp_path, name, made())
    ours = encoder(name)
    plain = NOT_READ.get(case, name)
    if case in {"gz", "zst"}:
        write(tmp_path, plain, lines(LLAVA if case == "gz" else ALPACA))
    elif case == "bytes":
        write(tmp_path, plain, lines([asked("<image>?", images=[CODED])]))
    elif case == "save_to_disk":
        write(tmp_path, plain, made())
    theirs = loaded_by_swift(tmp_path / plain)

    assert len(theirs) == len(ours)
    for index in range(len(ours)):
        row = {key: held for key, held in theirs[index].items() if held is not None and key != "dataset"}
        expected = ours.template.encode(row, return_length=True)
        found = ours.encode(index)
        assert expected["input_ids"] == found["input_ids"], ours.template.tokenizer.decode(expected["input_ids"])
        assert expected["labels"] == found["labels"]
        if "pixel_values" in expected:
            assert expected["pixel_values"].equal(found["pixel_values"])
        assert ours.measured(index, found).length == found["length"]


def test_columns_have_the_names_that_ms_swift_gives_them(encoder, tmp_path):
    """`custom.columns` is its option of that name."""
    write(tmp_path, "a.jsonl", lines([{"q": "a", "r": "b"}]))
    columns = {"q": "query", "r": "response"}
    ours = encoder("a.jsonl", columns=columns)

    theirs = loaded_by_swift(tmp_path / "a.jsonl", columns=columns)

    assert ours.template.encode({"messages": theirs[0]["messages"]})["input_ids"] == ours.encode(0)["input_ids"]


def test_an_image_in_a_record_measures_as_its_file_does(encoder, tmp_path):
    """By its header and in full, with the facts that its file has."""
    from packplan.adapters.samples.measurer import SwiftMeasurer

    rows = [["red.png"], [CODED], [f"data:image/png;base64,{CODED}"], [{"path": "red.png"}]]
    write(tmp_path, "a.jsonl", lines([asked("<image>?", images=images) for images in rows]))
    samples = SwiftMeasurer(encoder("a.jsonl"))

    outcomes = [*samples.measure_many(range(4), in_full=False), *samples.measure_many(range(4), in_full=True)]
    assert 1 == len({(outcome.measurement, outcome.media) for outcome in outcomes})
    write(tmp_path, "b.jsonl", lines([asked("<image>?", images=[base64.b64encode(RED[:60]).decode()])]))
    (broken,) = SwiftMeasurer(encoder("b.jsonl")).measure_many(range(1), in_full=True)
    assert "line 1: " in str(broken)
    assert "bytes in the record" in str(broken)


def test_messages_and_dense_captions_may_stand_in_one_file(encoder, tmp_path):
    """In any order: no key of one is one of the other."""
    dense = {"images": [], "objects": [{"desc": "dot", "bbox_2d": [1, 2, 3, 4]}], "width": 8, "height": 8}
    for name, rows in {"a.jsonl": [TEXT[0], dense], "b.jsonl": [dense, TEXT[0]]}.items():
        write(tmp_path, name, lines(rows))
        samples = encoder(name)
        assert all(samples.encode(index) for index in range(2))


def test_two_shapes_in_one_file_are_refused_with_both_rows(encoder, tmp_path):
    """Rows that are of no shape do not count; another file may have another shape."""
    write(tmp_path, "a1.jsonl", lines([{"id": 1}, *TEXT, ALPACA[0]]))
    write(tmp_path, "a2.jsonl", lines(ALPACA))
    samples = encoder("a*.jsonl")

    samples.encode(2)
    samples.encode(4)
    with pytest.raises(
        RecordError, match=r"line 4: the record is of the shape instruction, output, but .*line 2 is of"
    ):
        samples.encode(3)
    with pytest.raises(RecordError, match="line 1: the record is of no known shape"):
        samples.encode(0)
    shapes = [
        (str(tmp_path / "a1.jsonl"), "messages of role and content"),
        (str(tmp_path / "a2.jsonl"), "instruction, output"),
    ]
    assert shapes == [(one.file, one.shape) for one in samples.data_files()]
