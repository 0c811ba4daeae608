"""A batch as tensors: nothing is lost or mixed on the way into microbatches and back."""

import re
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from packplan.adapters.losses import FusedLoss, PackedLoss
from packplan.adapters.microbatches import WEIGHTS, BatchedData, concatenate, pack_row, pad_rows
from packplan.core.context_parallel import PackedLayout
from packplan.core.errors import ArgumentError
from packplan.core.shard import shard_dynamic, shard_packed

pytestmark = pytest.mark.covers


def batch_of(lengths):
    """Return a batch whose token t of sequence s is 1000 * s + t + 1, with fields of each kind."""
    width = max(lengths) + 2
    ids = torch.zeros((len(lengths), width), dtype=torch.int64)
    for number, length in enumerate(lengths):
        ids[number, :length] = 1000 * number + torch.arange(1, length + 1)
    return BatchedData.from_fields(
        {
            "input_ids": ids,
            "values": ids.double() / 2,
            "features": ids[..., None].expand(-1, -1, 3) * torch.tensor([1, 2, 3]),
            "rewards": torch.arange(len(lengths), dtype=torch.float32),
            "pixel_values": [torch.full((number, 2), number) for number in range(len(lengths))],
        },
        lengths=lengths,
        sequence_dims={"features": 1},
    )


def cut(mode, lengths, shards, global_batch, multiple):
    """Shard lengths in a mode."""
    workers = {"shards": shards, "batch_size": global_batch}
    budget = {"max_tokens_per_microbatch": 3 * (max(lengths) + multiple)}
    if mode == "packed":
        return shard_packed(lengths, **workers, **budget, sequence_length_pad_multiple=multiple)
    return shard_dynamic(lengths, **workers, **budget, sequence_length_round=multiple)


cases = {
    "mode": st.sampled_from(["packed", "dynamic"]),
    "lengths": st.lists(st.integers(1, 20), min_size=1, max_size=20),
    "shards": st.integers(1, 3),
    "global_batch": st.integers(1, 24),
    "multiple": st.sampled_from([1, 4]),
}


@given(**cases)
def test_microbatches_hold_every_token_where_it_belongs(mode, lengths, shards, global_batch, multiple):
    """In place and position; per-token results come back sequence by sequence, in order."""
    batch = batch_of(lengths)
    sharding = cut(mode, lengths, shards, global_batch, multiple)

    returned = []
    for worker in batch.shard(sharding):
        for number in range(len(worker.global_batches)):
            widths = worker.global_batches[number].widths.tolist()
            for microbatch, width in zip(worker.microbatches(number), widths, strict=True):
                assert (1 if mode == "packed" else len(microbatch.data), width) == tuple(microbatch.input_ids.shape)
                flat, positions = microbatch.input_ids.reshape(-1), microbatch.position_ids.reshape(-1)
                token = torch.as_tensor(microbatch.layout.is_token)
                assert torch.equal(positions[token], flat[token] % 1000 - 1)
                assert not flat[~token].any()
                assert microbatch.data.lengths.tolist() == microbatch.cu_seqlens.diff().tolist()
                starts = microbatch.cu_seqlens_padded[:-1].tolist()
                assert flat[starts].tolist() == microbatch.data.tensor("input_ids")[:, 0].tolist()
                computed = microbatch.unpacked(flat.double() / 2)
                expected = microbatch.data.tensor("values")
                assert torch.equal(expected[:, : computed.shape[1]], computed)
                for place, own in enumerate(microbatch.data["pixel_values"]):
                    assert (own == int(microbatch.data.tensor("rewards")[place])).all()
                returned.append(microbatch.data)
    together = concatenate(returned).select(torch.tensor(sharding.restore)).truncate(batch.width)
    for name in ("input_ids", "values", "features", "rewards"):
        assert torch.equal(batch.tensor(name), together.tensor(name))
    assert sharding.weights.tolist() == torch.cat([part.tensor(WEIGHTS) for part in returned]).tolist()


def entries_of(data, *, loss, logits, layout=None):
    """Return the fields of each sequence as a loss gets them."""
    found = []

    def noted(logits, entry, **_):
        found.append(
            {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        )
        return logits.sum(), {}

    loss(noted)(logits, data, layout=layout, num_sequences=1, num_tokens=1)
    return found


def test_a_field_runs_along_the_sequence_where_it_is_declared():
    """In rows, padded batches and losses: vectors stay whole, the third dimension is cut."""
    lengths = [3, 5, 8]
    fields = {
        "tokens": torch.arange(24).view(3, 8),
        "vector": torch.arange(24).view(3, 8) / 2,
        "position_ids": torch.arange(96).view(3, 4, 8),
        "spans": torch.arange(48).view(3, 2, 8),
        "sizes": torch.tensor(lengths),
    }
    names = {"input_key": "tokens", "input_lengths_key": "sizes"}
    batch = BatchedData.from_fields(fields, sequence_dims={"vector": None, "spans": 2}, **names)
    expected = [
        {name: field.tolist() for name, field in batch.select([number]).truncate(length).fields.items()}
        for number, length in enumerate(lengths)
    ]
    assert [(1, length, 8) for length in lengths] == [
        (len(one["tokens"]), len(one["spans"][0][1]), len(one["vector"][0])) for one in expected
    ]

    found = []
    for cut in (
        shard_packed(lengths, shards=1, batch_size=3, max_tokens_per_microbatch=16),
        shard_dynamic(lengths, shards=1, batch_size=3, max_tokens_per_microbatch=16),
    ):
        (worker,) = batch.shard(cut)
        for row in worker:
            data = {name: row.data[name] for name in fields}
            loss = partial(PackedLoss, sequence_dims=row.data.sequence_dims, **names)
            found += entries_of(data, loss=loss, logits=torch.ones(1, row.layout.num_positions, 2), layout=row.layout)

    for one in expected:
        assert 2 == found.count(one)


@given(case=st.fixed_dictionaries(cases), more=st.integers(1, 5))
@example(case={"mode": "packed", "lengths": [5, 2, 3], "shards": 1, "global_batch": 3, "multiple": 4}, more=2)
def test_fields_are_padded_with_their_own_value(case, more):
    """Wherever padding is added: in rows, in wider batches and in batches that become one."""
    own = {"tokens": 7, "labels": -100, "values": 0.3}
    lengths = case["lengths"]
    ids, values = (batch_of(lengths).tensor(name) for name in ("input_ids", "values"))
    narrow = BatchedData.from_fields(
        {"tokens": ids, "labels": ids, "values": values, "marks": values},
        lengths=lengths, input_key="tokens", pad_values=own, sequence_dims={"marks": 1},
    ).truncate(max(lengths))  # fmt: skip

    wide = narrow.truncate(max(lengths) + more)
    for name in narrow.fields:
        assert torch.equal(narrow.tensor(name), wide.tensor(name)[:, : narrow.width])
        assert (wide.tensor(name)[:, narrow.width :] == own.get(name, 0)).all()
        assert torch.equal(wide.tensor(name), concatenate([narrow, wide]).tensor(name)[: len(narrow)])
    for worker in narrow.shard(cut(**case)):
        for microbatch in worker:
            flat, labels = microbatch.input_ids.reshape(-1), microbatch.labels.reshape(-1)
            token = torch.as_tensor(microbatch.layout.is_token)
            starts = torch.as_tensor(microbatch.layout.position_ids) == 0
            if case["mode"] == "packed":
                assert (flat[~token] == 7).all()
            assert 7 == microbatch.pad_id
            assert torch.equal(flat[token & ~starts], labels[token & ~starts])
            assert (labels[starts | ~token] == -100).all()
            assert int(microbatch.cu_seqlens_padded.diff().max()) == microbatch.max_seqlen
            back = microbatch.unpacked(labels, pad_value=-100)
            assert (back[:, 0] == -100).all()
            assert [int((row != -100).sum()) for row in back] == (microbatch.data.lengths - 1).tolist()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), more=st.integers(0, 9))
def test_rows_of_one_length_are_padded_behind_the_last_sequence(lengths, more):
    """As stages of a pipeline exchange them; what does not fit is refused."""
    batch = batch_of(lengths)
    needed = sum(-(-length // 2) * 2 for length in lengths)

    row = pack_row(batch, multiple=2, row_length=needed + more)

    assert needed + more == row.input_ids.shape[1] == int(row.cu_seqlens_padded[-1])
    plain = pack_row(batch, multiple=2)
    assert plain.cu_seqlens_padded[:-1].tolist() == row.cu_seqlens_padded[:-1].tolist()
    assert torch.equal(plain.input_ids, row.input_ids[:, :needed])
    assert not row.input_ids[:, needed:].any()
    with pytest.raises(ArgumentError, match="do not fit a row of"):
        pack_row(batch, multiple=2, row_length=needed - 1)


IDS = torch.ones((2, 4), dtype=torch.int64)


FIELDS = {
    "input_ids": IDS, "texts": ["a", "b"], "scores": torch.ones(2, 3), "x": torch.ones(2), "mrope": torch.ones(2, 3, 5),
}  # fmt: skip

NO_LENGTHS = ([1.0, 2], [0, 2], [[1], [2]], [True, True], ["a", "b"], [1, [2]], torch.tensor([1j, 2]))


@pytest.mark.parametrize(
    ("fields", "options", "says"),
    [
        ({**FIELDS, "rewards": torch.ones(3)}, {}, "rewards has 3 entries"),
        *(({**FIELDS, "x": x}, {}, "x has no entries") for x in (None, torch.tensor(3))),
        *((fields, {}, "a batch has input_ids") for fields in ({}, {"input_ids": [1, 2]}, {"input_ids": IDS[0]})),
        *((FIELDS, {"lengths": lengths}, "whole numbers of at least 1 token") for lengths in NO_LENGTHS),
        (FIELDS, {"lengths": [1, 5]}, "5 tokens, but the batch is 4 wide"),
        (FIELDS, {"lengths": []}, "has 2 entries, but the batch has 0 sequences"),
        (FIELDS, {"lengths": None}, "give them as lengths, or as the field input_lengths"),
        ({**FIELDS, "input_lengths": [1, 2]}, {"lengths": [2, 2]}, "lengths differ from the field input_lengths"),
        *((FIELDS, {"pad_values": {name: 1}}, f"pad_values names {name}") for name in ("gone", "texts")),
        *((FIELDS, {"pad_values": {"input_ids": pad}}, "which int64 cannot hold") for pad in (0.5, "x")),
        *((FIELDS, {"sequence_dims": {name: dim}}, f"dimension {dim} of {name} is not as long")
          for name, dim in (("x", 1), ("gone", 1), ("texts", 1), ("scores", 1), ("input_ids", 0), ("input_ids", None),
                            ("mrope", 3))),
    ],
)  # fmt: skip
def test_a_batch_that_is_none_is_refused(fields, options, says):
    """Fields, lengths, pad values and dimensions that do not go together."""
    with pytest.raises(ArgumentError, match=says):
        BatchedData.from_fields(fields, **{"lengths": [1, 2], **options})


def test_what_a_batch_cannot_be_asked_for_is_refused():
    """A list as a tensor; microbatches of other sequences; what it does not have."""
    batch = BatchedData.from_fields({"input_ids": IDS, "texts": ["a", "b"]}, lengths=np.array([1, 2]))
    with pytest.raises(ArgumentError, match="field texts is a list"):
        batch.tensor("texts")
    with pytest.raises(ArgumentError, match="made for sequences of other lengths"):
        batch.shard(shard_packed([1, 2, 2], shards=1, batch_size=3, max_tokens_per_microbatch=4))
    for ask in (batch.tensor, lambda name: batch[name]):
        with pytest.raises(ArgumentError, match="the batch has no field gone, but input_ids, texts"):
            ask("gone")
    for indices in ([2], [-1], [0.7], [[0, 1]], torch.tensor([True, False]), ["a"]):
        with pytest.raises(ArgumentError, match="are selected by whole numbers from 0 to 1"):
            batch.select(indices)
    with pytest.raises(ValueError, match="width is -1, but has to be"):
        batch.truncate(-1)
    for num_values in (7, 9):
        with pytest.raises(ArgumentError, match=rf"the shape \({num_values},\), but the microbatch has 8 positions"):
            pad_rows(batch).unpacked(torch.ones(num_values))


@pytest.mark.parametrize(
    ("name", "shape", "dim"), [("vector", (2, 4), 1), ("spans", (2, 3, 4), 2), ("position_ids", (2, 4, 4), 2)]
)
def test_a_field_that_only_may_run_along_the_sequence_is_named(name, shape, dim):
    """In batches and in losses: it is as wide as the tokens, and nothing says whether by chance."""
    says = rf"dimension {dim} of {name} is as long as input_ids are wide, 4, .* sequence_dims={{'{name}': {dim}}}, or"
    fields = {"input_ids": IDS, "token_mask": torch.ones(2, 4), name: torch.ones(shape)}

    with pytest.raises(ArgumentError, match=says):
        BatchedData.from_fields(fields, lengths=[1, 2])
    batch = BatchedData.from_fields({"input_ids": IDS}, lengths=[1, 2])
    with pytest.raises(ArgumentError, match=says):
        batch.with_fields(**{name: torch.ones(shape)})
    assert 2 == batch.with_fields({name: dim}, **{name: torch.ones(shape)}).truncate(2).tensor(name).shape[dim]
    with pytest.raises(ArgumentError, match=says):
        entries_of(fields, loss=PackedLoss, logits=torch.ones(1, 8, 2), layout=PackedLayout.from_lengths([4, 4]))
    with pytest.raises(ArgumentError, match=says):
        FusedLoss(OfTokens((name,)))(torch.ones(2, 4, 5), fields, num_sequences=2, num_tokens=6)


@attrs.frozen
class OfTokens:
    """Loss of tokens that multiplies the fields that it reads."""

    fields: tuple[str, ...]
    normalisation = "token"
    divisor = 1.0

    def __call__(self, log_probabilities, fields):
        for name in self.fields:
            log_probabilities = log_probabilities * fields[name].reshape(len(log_probabilities), -1).sum(1)
        return log_probabilities, {}


def test_a_fused_loss_reads_fields_by_name_and_dimension():
    """Of any name and dimension; lengths tell the padding, and have to be the layout's."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (2, 4), generator=generator)
    spans, logits = torch.rand((2, 3, 4), generator=generator), torch.randn((2, 4, 5), generator=generator)
    fields = {"tokens": tokens, "sizes": torch.tensor([2, 4]), "token_mask": torch.ones(2, 4), "spans": spans}
    loss = FusedLoss(OfTokens(("spans",)), input_key="tokens", input_lengths_key="sizes", sequence_dims={"spans": 2})
    given = {"num_sequences": 2, "num_tokens": 4}
    each = logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0] * spans.sum(1)[:, 1:]
    expected = float(each[0, :1].sum() + each[1].sum()) / 4

    padded, _ = loss(logits, fields, **given)
    row = torch.cat([logits[0, :2], logits[1]])[None]
    packed, _ = loss(row, fields, layout=PackedLayout.from_lengths([2, 4]), **given)

    assert pytest.approx(expected, rel=1e-5) == float(padded)
    assert pytest.approx(expected, rel=1e-5) == float(packed)
    for wrapper in (loss, PackedLoss(lambda *_, **__: None, input_key="tokens", input_lengths_key="sizes")):
        with pytest.raises(ValueError, match="the field sizes has other lengths than the layout"):
            wrapper(row, fields, layout=PackedLayout.from_lengths([3, 3]), **given)


def test_no_field_is_lost_where_batches_become_one():
    """One absent, added, or of another kind, type or shape is named, in any order."""
    wide = torch.ones((2, 6), dtype=torch.int64)
    absent, scores = {"input_ids": IDS}, {"input_ids": IDS, "x": torch.ones(2)}
    for one, other, kinds in (
        (absent, scores, ("absent", "a tensor of float32, shape (batch)")),
        ({"input_ids": IDS, "x": ["a", "b"]}, scores, ("a list", "a tensor of float32, shape (batch)")),
        ({"input_ids": IDS, "labels": IDS}, {"input_ids": wide, "labels": IDS},
         ("a tensor of int64, shape (batch, width)", "a tensor of int64, shape (batch, 4)")),
    ):  # fmt: skip
        name = [*one, *other][-1]
        first, last = (BatchedData.from_fields(fields, lengths=[1, 2]) for fields in (one, other))
        for batches, (here, there) in (([first, first, last], kinds), ([last, last, first], kinds[::-1])):
            says = (
                f"batch 2 has other fields than batch 0: {name} is {there}, in batch 0 {here}: give all the same fields"
            )
            with pytest.raises(ArgumentError, match=re.escape(says)):
                concatenate(batches)


def test_a_batch_may_be_empty_but_a_row_may_not():
    """It adds nothing to others, and has no row; no batches at all are refused."""
    batch = batch_of([3, 1])
    empty = batch.select([])

    assert 0 == len(empty) == len(concatenate([empty, empty])) == len(empty.truncate(2).slice(0, 1))
    assert torch.equal(batch.tensor("features"), concatenate([empty, batch, empty]).tensor("features"))
    for row_length in (None, 8):
        with pytest.raises(ArgumentError, match="no sequence, so there is no row to pack"):
            pack_row(empty, multiple=2, row_length=row_length)
    with pytest.raises(ArgumentError, match="no batch to concatenate"):
        concatenate([])
