"""Exports of packs: every sample once, learned as its row says, in files that tell their plan."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

import packplan as pp
from packplan.adapters import exports
from packplan.adapters.exports import export_llama_factory, export_megatron_bridge, export_parquet
from packplan.core.errors import ArgumentError, OutputError, StaleError

EXPORTS = [export for name, export in vars(exports).items() if re.match("export_(?!cached)", name)]

PACKING_LENGTH = 20

each_export = pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.__name__)


WORDS = {"text": "a", "messages": [{"role": "user"}], "turns": [["user", "a"]], "revision": "a"}
"""Columns of a data set of texts that no model is given."""


@st.composite
def rows_of_text(draw):
    """Draw rows of 2 to 24 tokens: with labels, with a mask, or with neither."""
    rows = []
    for number, length in enumerate(draw(st.lists(st.integers(2, 24), min_size=1, max_size=30))):
        ids = [100 * number + place for place in range(length)]
        learned = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        kind = draw(st.sampled_from(["labels", "completion_mask", "neither"]))
        row = {"input_ids": ids, "images": draw(st.sampled_from([None, []])), **WORDS}
        if kind == "labels":
            row["labels"] = [token if one else -100 for token, one in zip(ids, learned, strict=True)]
        elif kind == "completion_mask":
            row["completion_mask"] = [int(one) for one in learned]
        rows.append(row)
    assume(any(label != -100 for row in rows for label in labels_of(row)))
    return rows


def plan_of(rows):
    return pp.plan([len(row["input_ids"]) for row in rows], PACKING_LENGTH)


def labels_of(row):
    """Return the labels of a row whose first token is not learned, as plain Python has them."""
    labels = row.get("labels", row["input_ids"])
    mask = row.get("completion_mask", [1] * len(labels))
    return [-100, *(label if one else -100 for label, one in zip(labels[1:], mask[1:], strict=True))]


def joined(parts):
    return [value for part in parts for value in part]


def packed(members, *, padding=0, pad=0):
    """Return tokens, labels and positions of samples, as plain Python has them."""
    return {
        "input_ids": joined(member["input_ids"] for member in members) + [pad] * padding,
        "labels": joined(map(labels_of, members)) + [-100] * padding,
        "position_ids": joined(range(len(member["input_ids"])) for member in members) + [0] * padding,
    }


@given(rows_of_text(), st.data())
def test_a_parquet_file_has_the_packs_of_the_plan(tmp_path_factory, rows, data):
    """Each pack is a row: its samples in order, their lengths, tokens, labels and positions."""
    plan = plan_of(rows)
    event(f"a sample longer than a pack: {bool(len(plan.raw.single_long))}")
    order = data.draw(st.none() | st.permutations(range(len(plan.packs))))
    path = tmp_path_factory.mktemp("export") / "packs.parquet"

    export_parquet(rows, plan, path, order=order)

    found = pq.read_table(path).to_pylist()
    assert [*(range(len(plan.packs)) if order is None else order)] == [row.pop("pack") for row in found]
    assert sorted(range(len(rows))) == sorted(joined(row["samples"] for row in found))
    for row in found:
        members = [rows[sample] for sample in row["samples"]]
        lengths = [len(member["input_ids"]) for member in members]
        assert {"samples": row["samples"], "lengths": lengths, **packed(members)} == row
    if order is None:
        assert plan.packs.tolist() == [row["samples"] for row in found]


@given(rows_of_text())
def test_a_megatron_bridge_file_foretells_what_the_rows_do(tmp_path_factory, rows):
    """As its reader cuts it: tokens without each sample's last, the next ones as labels, masks."""
    plan = plan_of(rows)
    path = tmp_path_factory.mktemp("export") / "packs.idx.parquet"

    export_megatron_bridge(rows, plan, path)

    table = pq.read_table(path)
    assert ["input_ids", "seq_start_id", "loss_mask"] == table.column_names
    assert ["int32", "int32", "int8"] == [str(field.type.value_type) for field in table.schema]
    found = {}
    for pack, row in zip(plan.packs, table.to_pylist(), strict=True):
        ids, mask, starts = row["input_ids"], row["loss_mask"], row["seq_start_id"]
        assert len(mask) == len(ids) <= max(PACKING_LENGTH, len(rows[pack[0]]["input_ids"]))
        for sample, start, end in zip(pack, starts, [*starts[1:], len(ids)], strict=True):
            assert sample not in found
            assert 0 == mask[end - 1]
            found[sample] = list(zip(ids[start : end - 1], ids[start + 1 : end], mask[start : end - 1], strict=True))
    for sample, row in enumerate(rows):
        ids, learned = row["input_ids"], [label != -100 for label in labels_of(row)]
        assert list(zip(ids[:-1], ids[1:], learned[1:], strict=True)) == found.pop(sample)
    assert {} == found


@given(rows_of_text(), st.integers(0, 9))
def test_a_llama_factory_folder_has_rows_that_its_collators_keep(tmp_path_factory, rows, pad):
    """The mask numbers a row's samples; padding of at least one token follows, to 8s."""
    datasets = pytest.importorskip("datasets")
    plan = plan_of(rows)
    folder = tmp_path_factory.mktemp("export") / "packs"

    export_llama_factory(rows, plan, folder, pad_token_id=pad)

    loaded = datasets.load_from_disk(str(folder))
    assert ["train"] == list(loaded)
    for pack, row in zip(plan.packs, loaded["train"], strict=True):
        members = [rows[sample] for sample in pack]
        num_tokens = sum(len(member["input_ids"]) for member in members)
        width = len(row["input_ids"])
        assert 0 == width % 8
        assert max(num_tokens, PACKING_LENGTH) < width <= max(num_tokens, PACKING_LENGTH) + 8
        padding = width - num_tokens
        numbers = joined([number] * len(member["input_ids"]) for number, member in enumerate(members, 1))
        assert packed(members, padding=padding, pad=pad) | {"attention_mask": numbers + [0] * padding} == row


ROWS = [{"input_ids": list(range(1, length + 1))} for length in (12, 8, 11, 9, 20, 3)]


@each_export
def test_an_export_tells_its_plan_and_is_divided_at_any_pack(export, tmp_path, monkeypatch):
    """Checksum and packing length; rows are those of one batch; Parquet has a group for each."""
    rows = [{"input_ids": list(range(length))} for length in np.random.default_rng(1).integers(2, 20, 200)]
    plan, whole, parts = plan_of(rows), tmp_path / "whole", tmp_path / "parts"
    export(rows, plan, whole)
    monkeypatch.setattr(exports, "BATCH_TOKENS", 100)
    export(rows, plan, parts)

    assert content(whole) == content(parts)
    if whole.is_dir():
        found = json.loads(json.loads((whole / "train" / "dataset_info.json").read_text())["description"])
    else:
        found = {key.decode(): value.decode() for key, value in pq.read_schema(whole).metadata.items()}
        groups = [pq.ParquetFile(path).num_row_groups for path in (whole, parts)]
        assert 1 == groups[0] < groups[1] <= len(plan.packs) / 5 + 1
    told = found["packplan_checksum"], str(found["packplan_packing_length"])
    assert (plan.checksum, str(PACKING_LENGTH)) == told


def content(path):
    if path.is_file():
        return pq.read_table(path).to_pylist()
    return pytest.importorskip("datasets").load_from_disk(str(path))["train"].to_list()


MEDIA = {"images": ["a.png"], "pixel_values": np.ones((4, 3)), "spans": [[1, 2, 2]], "mels": np.ones(3)}


@each_export
@pytest.mark.parametrize(
    ("rows", "order", "words"),
    [
        (ROWS[:-1], None, "6 samples, but the data set has 5 rows"),
        ([*ROWS[:-1], {"input_ids": [1, 2, 3, 4]}], None, "row 5"), (iter(ROWS), None, "one after the other"),
        *((ROWS, order, "from 0 to 3") for order in ([], [0, 99], [-1], [0.5], [[0]], ["0"])),
        *(([*ROWS[:-1], ROWS[-1] | {name: value}], None, f"has {name}, but this format stores text only")
          for name, value in MEDIA.items()),
        ([*ROWS[:-1], ROWS[-1] | {"attention_mask": [1, 1, 0]}], None, "row 5 has padding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_exported_is_refused(*, export, rows, order, words, tmp_path, monkeypatch):
    """Rows and orders of other plans, media, padding; of what was written, nothing is left."""
    monkeypatch.setattr(exports, "BATCH_TOKENS", 1)
    with pytest.raises((ArgumentError, StaleError), match=words):
        export(rows, plan_of(ROWS), tmp_path / "packs", order=order)

    assert [] == list(tmp_path.iterdir())


@each_export
def test_samples_that_teach_nothing_are_counted(export, tmp_path, caplog):
    """Each once, whatever is repeated; nothing is written if they are all."""
    rows, plan = [row | {"labels": [-100] * len(row["input_ids"])} for row in ROWS], plan_of(ROWS)

    export([ROWS[0], *rows[1:]], plan, tmp_path / "some", order=[*range(len(plan.packs)), 0])

    assert ["5 of 6 samples have no supervised token"] == caplog.messages
    with pytest.raises(ArgumentError, match="none of 6 samples has a supervised token"):
        export(rows, plan, tmp_path / "all")
    assert ["some"] == [path.name for path in tmp_path.iterdir()]


@each_export
def test_nothing_is_replaced_and_no_folder_made(export, tmp_path):
    """A file, a folder, a dangling link: each stays, and is named; so is a missing folder."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")

    for name, error, says in (
        *((name, ArgumentError, f"{name} exists") for name in ("file", "folder", "link")),
        ("gone/packs", OutputError, "gone"),
    ):
        with pytest.raises(error, match=says):
            export(ROWS, plan_of(ROWS), tmp_path / name)
    assert "kept" == (tmp_path / "file").read_text()
    assert ["file", "folder", "link"] == sorted(path.name for path in tmp_path.iterdir())


def test_megatron_bridge_refuses_what_its_columns_cannot_say(tmp_path):
    """Labels that are other tokens, since it has a mask."""
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 4]}]
    with pytest.raises(ArgumentError, match="pack 0 has labels that differ from its tokens"):
        export_megatron_bridge(rows, plan_of(rows), tmp_path / "packs")
    assert [] == list(tmp_path.iterdir())
