"""Rows of other trainers: samples as they seem, or refused by number; known by what they teach."""

import logging
from collections import Counter
from weakref import WeakSet

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packplan as pp
from packplan.adapters.loaders.packs import PackInputs, RowsOfPacks, flatten
from packplan.adapters.loaders.rows import RowFacts, pad_rows
from packplan.core.errors import ArgumentError, StaleError

pytestmark = pytest.mark.untraced

IDS = [5, 6, 7, 8]

SEVERAL = "holds several samples, as its"

NO_SAMPLES = [
    ("padding: attention_mask is 0 at 2 of its 4 tokens", {"attention_mask": [1, 1, 0, 0]}),
    ("4 tokens, but 3 values of attention_mask", {"attention_mask": [1, 1, 1]}),
    ("4 tokens, but 3 values of labels", {"labels": [5, 6, 7]}),
    ("4 tokens, but 5 values of completion_mask", {"completion_mask": [0, 1, 1, 1, 1]}),
    ("row 2 has labels of type float64 and shape (4,)", {"labels": [5.0, 6.5, 7.0, 8.0]}),
    ("row 2 has input_ids of type float32 and shape (4,)", {"input_ids": torch.tensor(IDS).float()}),
    ("row 2 has input_ids of type int64 and shape (2, 2)", {"input_ids": [[5, 6], [7, 8]]}),
    ("row 2 has input_ids of type list", {"input_ids": [[5, 6, 7], [8]]}),
    (f"{SEVERAL} attention_mask", {"attention_mask": [1, 1, 2, 2]}),
    (f"{SEVERAL} seq_lengths", {"seq_lengths": [1, 3]}),
    (f"{SEVERAL} seq_lens", {"seq_lens": [2, 2]}),
    (f"{SEVERAL} seq_idx", {"seq_idx": [0, 0, 1, 1]}),
    (f"{SEVERAL} seq_start_id", {"seq_start_id": [0, 2]}),
    (f"{SEVERAL} segment_ids", {"segment_ids": torch.tensor([[1, 1, 2, 2]])}),
    (f"{SEVERAL} cu_seqlens", {"cu_seqlens": [0, 2, 4]}),
    (f"{SEVERAL} cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([[0, 2, 4]])}),
    (f"{SEVERAL} position_ids", {"position_ids": [0, 1, 0, 1]}),
    (f"{SEVERAL} position_ids", {"position_ids": [1, 2, 1, 2]}),
    (f"{SEVERAL} position_ids", {"position_ids": [[3, 4, 2, 3], [3, 4, 0, 1], [3, 5, 2, 0]]}),
    ("row 2 has the columns messages, id, but no input_ids: tokenize", {"input_ids": None, "messages": [], "id": 3}),
    ("row 2 has no column, but no input_ids", {"input_ids": None}),
    ("row 2 is of type list, but has to be a mapping such as {'input_ids': [", IDS),
    ("row 2 is of type Tensor, but has to be a mapping such as", torch.tensor(IDS)),
]
"""Words of the message -> columns of a row that is no sample, None for none; or what has none."""


@pytest.mark.parametrize(("words", "columns"), NO_SAMPLES, ids=lambda one: str(one)[:60])
def test_a_row_that_is_no_sample_is_refused_by_its_number(words, columns):
    """By the loader of its pack, and by the pass over all rows before the first step."""
    rows = [{"input_ids": IDS} for _ in range(3)]
    if isinstance(row := columns, dict):
        row = {name: values for name, values in (rows[2] | columns).items() if values is not None}
    packs = RowsOfPacks([*rows[:2], row], pp.plan([4, 4, 4], 4))

    for read in (lambda: packs[2], packs.inspect):
        with pytest.raises(ArgumentError, match="row 2") as raised:
            read()
        assert words in str(raised.value)


def test_packs_that_are_no_plan_are_refused():
    """With the call that returns one; and what is no pack, with the arguments of the loader."""
    plan = pp.plan([4], 4)
    for other in (plan.packs, plan.raw, 4):
        with pytest.raises(ArgumentError, match=rf"not a {type(other).__name__}: .* packplan\.plan\(lengths"):
            RowsOfPacks([{"input_ids": IDS}], other)
    for rows in ([{"input_ids": IDS}], [], [RowsOfPacks([{"input_ids": IDS}], plan)[0]] * 2):
        with pytest.raises(ArgumentError, match=rf"passes {len(rows)} items? .*RowsOfPacks .* PackBatches"):
            PackInputs()(rows)


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"seq_idx": [0, 0, 0, 0], "cu_seqlens": [0, 4], "position_ids": [3, 4, 5, 6]}, [-100, 6, 7, 8]),
        ({"position_ids": [[0, 1, 1, 3], [0, 1, 2, 3], [0, 2, 1, 3]]}, [-100, 6, 7, 8]),
        ({"attention_mask": [1, 1, 1, 1], "seq_lengths": [4], "position_ids": [0, 1, 2, 3]}, [-100, 6, 7, 8]),
        ({"position_ids": np.arange(12).reshape(3, 1, 4)}, [-100, 6, 7, 8]),
        ({"input_ids": torch.tensor([IDS]), "completion_mask": [0, 0, 1, 1]}, [-100, -100, 7, 8]),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]}, [-100, -100, 7, -100]),
        ({"labels": [-100, 6, 7, -100], "completion_mask": [0, 0, 1, 1]}, [-100, 6, 7, -100]),
        ({"text": "a", "turns": [["user", "a"]], "labels": IDS}, [-100, 6, 7, 8]),
    ],
    ids=str,
)
def test_a_sample_is_learned_as_it_says(columns, labels):
    """By its labels, as they are; without labels, by its masks."""
    packs = RowsOfPacks([{"input_ids": IDS} | columns], pp.plan([4], 4))

    batch = PackInputs()([packs[0]])

    assert (IDS, labels) == (batch["input_ids"][0].tolist(), batch["labels"][0].tolist())
    assert {"input_ids", "labels", "attention_mask", "packplan_pack"} == set(batch)
    assert [3 - labels[1:].count(-100)] == packs.inspect().num_supervised.tolist()


ROWS = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=5, unique_by=tuple)


@given(ROWS, st.data())
def test_other_rows_of_equal_lengths_have_another_digest(ids, data):
    """One other token, label or value of an image, or two rows in each other's place."""
    rows = [{"input_ids": row, "labels": row, "pixel_values": torch.tensor([[row[0] / 2]])} for row in ids]
    index = data.draw(st.integers(0, len(rows) - 1))
    first, second, *rest = rows
    others = [
        {"input_ids": [10, *ids[index][1:]]}, {"labels": [*ids[index][:-1], 10]},
        {"pixel_values": torch.tensor([[9.5]])}, {"pixel_values": rows[index]["pixel_values"][..., None]},
    ]  # fmt: skip

    assert digest_of(rows) == digest_of([{k: torch.as_tensor(v) for k, v in row.items()} for row in rows])
    assert digest_of(rows) != digest_of([second, first, *rest])
    for other in others:
        assert digest_of(rows) != digest_of([*rows[:index], rows[index] | other, *rows[index + 1 :]])


def digest_of(rows):
    return RowsOfPacks(rows, pp.plan([len(row["input_ids"]) for row in rows], 8)).inspect().digest


def test_blocks_of_rows_are_read_as_rows_one_by_one():
    """By this process or others, which hand an error on as it is."""
    rows = [{"input_ids": [number, 1]} for number in range(600)]
    packs = RowsOfPacks(rows, pp.plan([2] * 600, 8))
    others = RowsOfPacks([*rows[:-1], {"input_ids": [1]}], pp.plan([2] * 600, 8))

    assert packs.inspect(num_workers=2).digest == packs.inspect().digest
    for num_workers in (0, 1):
        with pytest.raises(StaleError, match=r"^sample 599 \(row 599\) has changed since it was planned"):
            others.inspect(num_workers=num_workers)


def test_a_row_that_changes_after_it_was_read_first_is_refused():
    """No checkpoint could tell it from another row."""
    packs = RowsOfPacks(rows := [{"input_ids": [1, 2]}] * 2, pp.plan([2, 2], 4))
    packs.inspect()
    rows[0] = {"input_ids": [1, 3]}

    with pytest.raises(StaleError, match=r"^sample 0 \(row 0\) has changed since it was planned: digest was"):
        packs[0]


class Counted(list):
    """Rows that count how often each is read, and how many are held at once."""

    def __init__(self, rows):
        super().__init__(rows)
        self.reads, self.held, self.most_held = Counter(), WeakSet(), 0

    def __getitem__(self, index):
        self.reads[index] += 1
        self.held.add(row := Row(super().__getitem__(index)))
        self.most_held = max(self.most_held, len(self.held))
        return row


Row = type("Row", (dict,), {"__hash__": object.__hash__})
"""Row that can be counted while it is held."""


@pytest.mark.parametrize("collate", [None, pad_rows])
@pytest.mark.parametrize("world_size", [1, 3, 50])
def test_ranks_read_each_row_once_and_hold_few(world_size, collate):
    """The facts are those of one rank that reads all; an epoch then reads each row once more."""
    rows = Counted([{"input_ids": [number, 1]} for number in range(40)])
    packs = RowsOfPacks(rows, pp.plan([2] * 40, 8), collate=collate)

    parts = [packs.source.read_facts(rank=rank, world_size=world_size).rows for rank in range(world_size)]

    assert (dict.fromkeys(range(40), 1), 8) == (rows.reads, max(8, rows.most_held))
    assert RowFacts(np.concatenate(parts)).digest == packs.inspect().digest
    rows.reads.clear()
    assert 40 == sum(map(len, map(packs.__getitem__, range(len(packs)))))
    assert dict.fromkeys(range(40), 1) == rows.reads


def test_files_are_digested_without_being_decoded(tmp_path):
    """Where the lengths are planned; a file that is another one when it is served is refused."""
    image = pytest.importorskip("PIL.Image")
    datasets = pytest.importorskip("datasets")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, path in enumerate(paths):
        image.new("L", (8, 8), number).save(path)
    rows = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    calls = []
    packs = RowsOfPacks(rows, pp.plan([2] * 3, 6), collate=lambda batch: calls.append(batch) or {"input_ids": [1, 2]})

    facts = packs.source.read_facts(decode=False)
    packs.take_facts(facts)

    assert ([], 3, [-1] * 3) == (calls, len({*facts.rows["digest"].tolist()}), facts.num_supervised.tolist())
    assert [0, 1, 2] == [row["image"].getpixel((0, 0)) for row in packs[0]]
    image.new("L", (8, 8), 7).save(paths[1])
    with pytest.raises(StaleError, match=r"^sample 1 \(row 1\)"):
        packs[0]


def test_samples_that_teach_nothing_are_counted(caplog):
    """Those of one token too, since no token is before it; all of them are an error."""
    rows = [{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": [1, 2]}]
    caplog.set_level(logging.WARNING)

    facts = RowsOfPacks(rows, pp.plan([1, 2, 2], 4)).inspect()

    assert [0, 0, 1] == facts.num_supervised.tolist()
    assert ["2 of 3 samples have no supervised token"] == caplog.messages
    with pytest.raises(ArgumentError, match="none of 2 samples has a supervised token"):
        RowsOfPacks(rows[:2], pp.plan([1, 2], 4)).inspect()


def left_padded(rows):
    """Return a batch with padding before its rows, which it labels."""
    batch = pad_rows(rows)
    turned = [batch["attention_mask"][row].argsort(stable=True) for row in range(len(rows))]
    batch = {name: torch.stack([value[row][turned[row]] for row in range(len(rows))]) for name, value in batch.items()}
    return {**batch, "labels": batch["input_ids"]}


def joined(rows):
    """Return one row without a mask, as collators do that leave padding out."""
    flat = flatten(rows)
    return {**flat, "labels": flat["input_ids"]}


@pytest.mark.parametrize("collate", [pad_rows, left_padded, joined])
def test_a_collator_of_ones_own_makes_the_batch(collate):
    """Its samples learn what they are planned to, whatever it says of padding and first tokens."""
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [4]}]
    packs = RowsOfPacks(rows, pp.plan([3, 2, 1], 6), collate=collate)

    batch = PackInputs(collate)([packs[0]])

    assert [6, 7, 9] == batch["labels"][batch["labels"] != -100].tolist()
    assert [5, 6, 7, 8, 9, 4] == batch["input_ids"][batch["input_ids"] != 0].tolist()
    assert [2, 1, 0] == packs.inspect().num_supervised.tolist()


@pytest.mark.parametrize(
    ("collate", "words"),
    [(lambda rows: {"input_ids": pad_rows(rows)["input_ids"]}, "returns no attention_mask"),
     (lambda rows: pad_rows(rows[:-1]), "returns 3 tokens for pack 0 instead of 5"), (list, "list whose input_ids is"),
     (lambda rows: pad_rows(rows[::-1]), "sample 0 .row 0. .* length was 3, now 2; .*let collators keep order"),
     (lambda rows: pad_rows(rows) | {"labels": torch.ones(1, 9)}, r"dict whose labels is torch.float32 of shape \(1,")],
)  # fmt: skip
def test_a_batch_that_is_not_its_pack_is_refused(collate, words):
    """Rows that were left out or exchanged, padding that nothing tells, and what is no batch."""
    packs = RowsOfPacks([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], pp.plan([3, 2], 6), collate=collate)
    for read in (lambda: PackInputs(collate)([packs[0]]), *[packs.inspect] * words.count("whose")):
        with pytest.raises((ArgumentError, StaleError), match=f"(?s){words}"):
            read()
