"""Data as users have them are read as ms-swift reads them: the same tokens, the same labels."""

import base64
import csv
import io
import json
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image
from swift.dataset import load_dataset
from swift.dataset.preprocessor.core import MessagesPreprocessor, ResponsePreprocessor, RowPreprocessor
from swift.template.template_inputs import StdTemplateInputs

from packplan.adapters.samples import dataset_rows
from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.adapters.swift.command import open_pipeline, read_command
from packplan.app.opening.runs import read_config
from packplan.app.opening.splits import open_encoders
from packplan.core.errors import RecordError
from packplan.core.samples.records import REFUSED
from packplan.core.samples.shapes import RECORD_KEYS
from tests.e2e.ready import measured
from tests.records import asked, chat


def png(color: str) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (60, 60 + len(color) * 7), color).save(sink, "png")
    return sink.getvalue()


def dialogue(*texts):
    """Return messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


RED, BLUE = png("red"), png("blue")

CODED = base64.b64encode(RED).decode()


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

PARTS = [
    {"type": "text", "text": "see "},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CODED}"}},
    {"type": "text", "text": "?"},
]

SEEN = [{"type": "text", "text": "see "}, {"type": "image", "source": {"type": "url", "url": "red.png"}}]

COLUMNS = {"q": "query", "r": "response", "state": None, "toxic": None}

CASES = {
    "LLaVA": ("json", LLAVA), "ShareGPT": ("json", SHAREGPT), "alpaca": ("json", ALPACA),
    "query, response, history": ("jsonl", [{"query": "c", "response": "d", "history": [["a", "b"]], "system": "Be."}]),
    "prompt, completion": ("jsonl", [{"prompt": "a", "completion": "b"}]),
    "question, answer": ("jsonl", [{"Question": "a", "Answer": "b"}]),
    "text": ("jsonl", [{"text": "blue circle"}]), "messages": ("jsonl", TEXT),
    "human and gpt": ("jsonl", [{"conversation": [{"human": "a", "assistant": "b"}]}]),
    "an image in a tool's answer": (
        "jsonl", [{"messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": SEEN}]},
            {"role": "assistant", "content": "A dot."}]}]
    ),
    "several images": ("jsonl", [asked("<image> or <image>?", images=["red.png", "blue.png"])]),
    "an image without its tag": ("jsonl", [{"query": "what?", "response": "b", "image": "red.png"}]),
    "tools in Parquet": ("parquet", TOOLS),
    "path in Parquet": ("parquet", [asked("<image>?", images=[{"bytes": None, "path": "red.png"}])]),
    "content parts": ("jsonl", [asked(PARTS)]), "LLaVA in Parquet": ("parquet", LLAVA),
    "bytes in Parquet": ("parquet", [asked("<image>?", images=[{"bytes": RED, "path": None}])]),
    "thoughts": (
        "jsonl", [
            chat(*dialogue("a", "<think>\n\n</think>\n\nb", "c", "<think>d</think>e")),
            chat(*dialogue("a", "b", "c", "d")),
            chat(*dialogue("a", "<think>\nb\n</think>\n\nc", "d", "e"), system="Think."),
        ]
    ),
    "no system prompt": ("jsonl", [chat(system=""), chat({"role": "system", "content": ""}, *dialogue("a", "b"))]),
    "no system prompt beside columns": ("jsonl", [{"query": "a", "response": "b", "system": ""}]),
    "no system_prompt": ("jsonl", [{"instruction": "a", "input": "", "output": "b", "system_prompt": ""}]),
    "no system prompt beside pairs": ("jsonl", [{"conversation": [{"human": "a", "assistant": "b"}], "system": ""}]),
    "no system prompt beside values": ("jsonl", [{"conversations": SHAREGPT[0]["conversations"][1:], "system": ""}]),
    "one system prompt of two": ("jsonl", [{**SHAREGPT[0], "system": ""}]),
    "no system prompt beside a history": (
        "jsonl", [{"query": "c", "response": "d", "history": [["a", "b"]], "System": ""}]),
    "CSV": ("csv", [{"query": "a, b", "response": 'say "c"'}, {"query": "\nd", "response": "e"}]),
    "columns": ("jsonl", [{"q": "a", "r": "b"}], {"columns": COLUMNS}),
    "WildChat": (
        "jsonl", [
            {"conversation": [{"role": role, "content": role[0], "toxic": False} for role in ("user", "assistant")],
             "state": "Texas", "toxic": False, "model": "a"}
        ], {"columns": COLUMNS}
    ),
    "SlimOrca": (
        "jsonl", [{"conversations": [
            {"from": "human", "value": "a", "weight": 0.0}, {"from": "gpt", "value": "b", "weight": 1.0}]}]
    ),
    "a literal tag": (
        "jsonl", [asked("what is <image>?"), asked("<image>?", images=["red.png"])], {"literal_image_tags": True}
    ),
}  # fmt: skip
"""Case -> file, records, keys of `custom.`; notations of tools are in `test_swift_tools.py`."""


def write(path: Path, records) -> None:
    """Write records in the format that the file's name says."""
    if path.suffix == ".parquet":
        import datasets

        datasets.Dataset.from_list(records).to_parquet(path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0])
            writer.writeheader()
            writer.writerows(records)
    else:
        path.write_text(json.dumps(records) if path.suffix == ".json" else "\n".join(map(json.dumps, records)))


@pytest.fixture
def encoder(write_run, tmp_path, monkeypatch):
    """Return a function that opens data files as a run does, in a folder that has two images."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))

    def opened(*names, of="qwen2_5_vl", template=(), **custom):
        custom["train_jsonl"] = [str(tmp_path / name) for name in names]
        return open_encoders(read_config(write_run(of, custom=custom, template=dict(template))))["train"]

    return opened


def template_of_swift(samples, **arguments):
    """Return the template that `SftArguments` opens, under a run's keys and other *arguments*."""
    config, ours = samples.config, samples.template
    asked = {
        "model": config.model.model, "model_type": ours.model_meta.model_type,
        "template": ours.template_meta.template_type, "dataset": config.custom.train_jsonl[0], "max_length": 256,
        "system": config.template.system, "is_binary_loss_scale": False, **arguments,
    }  # fmt: skip
    words = [word for name, value in asked.items() if value is not None for word in (f"--{name}", str(value))]
    theirs = open_pipeline(read_command("sft", words)[0]).template
    theirs.max_length = None
    for name in ("image_token_id", "video_token_id"):
        if hasattr(ours, name):  # of a tiny vocabulary
            setattr(theirs, name, getattr(ours, name))
    return theirs


def compare(samples, index, row, theirs):
    """Hold the encoding of a record against that of a template of ms-swift's, and return it."""
    expected = theirs.encode(row, return_length=True)
    sample = samples.read_sample(index)
    found = samples.encode(index, sample)
    assert sample == samples.read_sample(index), "encoding changes what measuring hands on"
    assert expected["input_ids"] == found["input_ids"], samples.template.tokenizer.decode(expected["input_ids"])
    assert expected["labels"] == found["labels"]
    weights = [1.0 if label != -100 else 0.0 for label in found["labels"]]
    assert expected.get("loss_scale") in (None, found.get("loss_scale", weights))
    if "pixel_values" in expected:
        assert expected["pixel_values"].equal(found["pixel_values"])
    counted = samples.measure_and_check(index, found)
    assert found["length"] == counted.length
    assert sum(label != -100 for label in expected["labels"]) == counted.supervised
    return found


def loaded_by_swift(path: Path, **options):
    return load_dataset([str(path)], num_proc=1, load_from_cache_file=False, strict=True, **options)[0]


# The library that reads CSV for ms-swift leaves its file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("custom", [{}, {"columns": COLUMNS}, {"literal_image_tags": True}], ids=str)
def test_each_shape_has_the_tokens_and_labels_that_ms_swift_gives_it(custom, encoder, tmp_path):
    """
    As its own loading of the same file, under the template that its own arguments open, for models
    that see, that think, and others; measured by its texts and headers as it is encoded.
    """
    columns, rows, texts = {name: known for name, known in custom.get("columns", {}).items() if known}, {}, []
    for suffix, records, *keys in CASES.values():
        if custom == (keys[0] if keys else {}):
            write(tmp_path / (name := f"{len(rows)}.{suffix}"), records)
            rows[name] = loaded_by_swift(tmp_path / name, columns=columns)
            texts += [name] if not any(mark in repr(records) for mark in ("png", "PNG")) else []

    for of, files in {"qwen2_5_vl": [*rows], **({} if custom else {"qwen3": texts, "qwen2": texts})}.items():
        ours, read = encoder(*files, of=of, **custom), [row for name in files for row in rows[name]]
        theirs = template_of_swift(ours)
        assert len(read) == len(ours)
        for index, row in enumerate(read):
            given = {key: held for key, held in row.items() if held is not None and key != "dataset"}
            compare(ours, index, given, theirs)
        assert all(one.measurement for one in measured(SwiftMeasurer(ours)))


def test_an_image_in_a_record_measures_as_its_file_does(encoder, tmp_path):
    """By its header and in full, with the facts that its file has; a broken one has its line."""
    rows = [["red.png"], [CODED], [{"bytes": CODED}], [f"data:image/png;base64,{CODED}"], [{"path": "red.png"}]]
    write(tmp_path / "a.jsonl", [asked("<image>?", images=images) for images in rows])

    assert 1 == len(set(measured(SwiftMeasurer(encoder("a.jsonl")))))
    write(tmp_path / "b.jsonl", [asked("<image>?", images=[base64.b64encode(RED[:60]).decode()])])
    (broken,) = SwiftMeasurer(encoder("b.jsonl")).measure_many(range(1), in_full=True)
    assert all(said in str(broken) for said in ("line 1: ", "bytes in the record"))


def test_no_cluster_is_joined_to_measure_nothing(encoder, tmp_path):
    """As after a run that was killed before its measurements were checked."""
    write(tmp_path / "a.jsonl", [asked("?")])
    source = SwiftMeasurer(encoder("a.jsonl"), join_cluster=lambda _: pytest.fail("it is joined"))

    assert [] == list(source.measure_many(range(1, 1), in_full=False))


@pytest.mark.parametrize("by", ["custom.media_dir", "ROOT_IMAGE_DIR"])
def test_relative_media_start_at_the_folder_that_the_user_names(by, encoder, tmp_path, monkeypatch):
    """As in ms-swift by its variable; the same paths in another folder are other data."""
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "new.png").write_bytes(RED)
    record = asked("<image>?", images=["new.png"])
    write(tmp_path / "a.jsonl", [record])
    unset = encoder("a.jsonl").records.digest(1)
    if by == "ROOT_IMAGE_DIR":
        monkeypatch.setenv(by, str(tmp_path / "media"))
    ours = encoder("a.jsonl", **({} if by == "ROOT_IMAGE_DIR" else {"media_dir": "media"}))
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path / "media"))

    compare(ours, 0, record, ours.template)
    assert unset != ours.records.digest(1)


def test_the_limit_of_pixels_is_the_users(encoder, tmp_path, monkeypatch):
    """In headers and where ms-swift opens the image."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    write(tmp_path / "a.jsonl", [asked("<image>?", images=["red.png"])])
    pixels = 60 * 81

    assert encoder("a.jsonl", max_image_pixels=pixels).encode(0)
    with pytest.raises(RecordError, match=r"more than 4,859 pixels: shrink it, or raise custom\.max_image_pixels"):
        encoder("a.jsonl", max_image_pixels=pixels - 1).encode(0)


def test_messages_and_dense_captions_may_stand_in_one_file(encoder, tmp_path):
    """In any order: no key of one is one of the other."""
    dense = {"images": [], "objects": [{"desc": "dot", "bbox_2d": [1, 2, 3, 4]}], "width": 8, "height": 8}
    write(tmp_path / "a.jsonl", [TEXT[0], dense, TEXT[0]])
    samples = encoder("a.jsonl")

    assert all(samples.encode(index) for index in range(3))


def test_two_shapes_in_one_file_are_refused_with_both_rows(encoder, tmp_path):
    """Rows that are of no shape do not count; another file may have another shape."""
    write(tmp_path / "a1.jsonl", [{"id": 1}, *TEXT, ALPACA[0]])
    write(tmp_path / "a2.jsonl", ALPACA)
    samples = encoder("a*.jsonl")

    assert samples.encode(2) != samples.encode(4)
    for index, said in {3: r"line 4: .*instruction, output, but .*line 2", 0: "line 1: .*no known shape"}.items():
        with pytest.raises(RecordError, match=said):
            samples.encode(index)
    write(tmp_path / "a3.jsonl", [ALPACA[0] | {"state": "Texas"}])  # refused, but its shape is known
    shapes = {"a1.jsonl": "messages of role and content"} | dict.fromkeys(
        ("a2.jsonl", "a3.jsonl"), "instruction, output"
    )
    samples = encoder("a*.jsonl")
    assert shapes == {Path(one.file).name: one.shape for one in samples.data_files()}


OWN = {"add_eos", "reasoning_content", "reasoning", "thinking", "thinking_content", "functions", "loss_scale"}
"""Refused, though no column of ms-swift: read by hand, or by other programs."""


def test_every_column_of_ms_swift_is_supported_or_refused():
    """Those that it keeps, those that it takes for one of them, and its templates' fields."""
    columns = {*RowPreprocessor.standard_keys, *MessagesPreprocessor().columns, *ResponsePreprocessor().columns}
    columns |= {field.name for field in fields(StdTemplateInputs)}

    assert columns == {*RECORD_KEYS, *REFUSED} - OWN - {"history", "summary"}
    assert not {*RECORD_KEYS} & {*REFUSED}
    assert OWN <= {*REFUSED}


def test_texts_without_a_chat_are_those_of_pretraining(write_run, tmp_path):
    """Every token of them is trained."""
    record = {"messages": [{"role": "assistant", "content": "blue circle on a red square"}]}
    keys = {"use_chat_template": False, "loss_scale": "all"}
    write(tmp_path / "a.jsonl", [record])
    path = write_run("qwen2", template={"system": None, **keys}, custom={"train_jsonl": str(tmp_path / "a.jsonl")})
    encoder = open_encoders(read_config(path))["train"]

    compare(encoder, 0, record, template_of_swift(encoder, **keys))


def test_an_image_of_a_row_is_its_path_or_its_bytes(tmp_path, monkeypatch):
    """Bytes where a server or the row has it."""
    coded = base64.b64encode(b"a png").decode()
    monkeypatch.setattr(
        dataset_rows, "load_file", {"http://a/bc.png": io.BytesIO(b"a png"), coded: io.BytesIO(b"a png")}.get
    )
    (file := tmp_path / "a.png").touch()

    images = "http://a/bc.png", coded, {"bytes": b"a png", "path": None}, str(file), {"bytes": None, "path": str(file)}
    assert [b"a png"] * 3 + [str(file)] * 2 == list(map(dataset_rows._path_or_bytes, images))
