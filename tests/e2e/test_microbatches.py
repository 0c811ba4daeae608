"""A batch as tensors: nothing is lost or mixed on the way into microbatches and back."""

import re
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from packplan.adapters.losses import FusedLoss, PackedLoss
from packplan.adapters.microbatches import WEIGHTS, BatchedData, concatenate, pack_row, padded_microbatch
from packplan.adapters.ranks.torch_group import OneRank, RankWorkers
from packplan.core.context_parallel import PackedLayout
from packplan.core.errors import ArgumentError
from packplan.core.shard import shard_dynamic, shard_packed
from tests.fakes import ScriptedGroup

pytestmark = pytest.mark.covers


PADS = {"tokens": 7, "labels": -100, "values": 0.3}


def batch_of(lengths):
    """Return a batch whose token t of sequence s is 1000 * s + t + 1, with fields of each kind."""
    columns = torch.arange(max(lengths))
    ids = 1000 * torch.arange(len(lengths))[:, None] + columns + 1
    own = columns < torch.tensor(lengths)[:, None]
    return BatchedData.from_fields(
        {
            "tokens": ids.where(own, 7), "labels": ids.where(own, -100), "values": (ids.double() / 2).where(own, 0.3),
            "features": (ids * own)[..., None] * torch.tensor([1, 2, 3]),
            "rewards": torch.arange(len(lengths), dtype=torch.float32),
            "pixel_values": [torch.full((number, 2), number) for number in range(len(lengths))],
        },
        lengths=lengths, input_key="tokens", pad_values=PADS, sequence_dims={"features": 1},
    )  # fmt: skip


def cut(mode, lengths, shards, global_batch, multiple):
    """Shard lengths in a mode."""
    workers = {"shards": shards, "batch_size": global_batch}
    budget = {"max_tokens_per_microbatch": 3 * (max(lengths) + multiple)}
    if mode == "packed":
        return shard_packed(lengths, **workers, **budget, sequence_length_pad_multiple=multiple)
    return shard_dynamic(lengths, **workers, **budget, sequence_length_round=multiple)


@given(
    mode=st.sampled_from(["packed", "dynamic"]), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    shards=st.integers(1, 3), global_batch=st.integers(1, 24), multiple=st.sampled_from([1, 4]),
)  # fmt: skip
@example(mode="packed", lengths=[5, 2, 3], shards=1, global_batch=3, multiple=4)
def test_microbatches_hold_every_token_where_it_belongs(mode, lengths, shards, global_batch, multiple):
    """In place and position, padded as its field; results come back in the order of sequences."""
    batch = batch_of(lengths)
    sharding = cut(mode, lengths, shards, global_batch, multiple)

    returned = []
    for worker in batch.shard(sharding):
        widths = [width for one in worker.global_batches for width in one.widths.tolist()]
        for microbatch, width in zip(worker, widths, strict=True):
            data, flat = microbatch.data, microbatch.input_ids.reshape(-1)
            assert (1 if mode == "packed" else len(data), width) == tuple(microbatch.input_ids.shape)
            token, positions = torch.as_tensor(microbatch.layout.is_token), microbatch.position_ids.reshape(-1)
            assert torch.equal(positions[token], flat[token] % 1000 - 1)
            assert {7} >= {microbatch.pad_id, *flat[~token].tolist()}
            assert torch.equal(flat.where(token & (positions > 0), -100), microbatch.labels.reshape(-1))
            assert data.lengths.tolist() == microbatch.cu_seqlens.diff().tolist()
            assert int(microbatch.cu_seqlens_padded.diff().max()) == microbatch.max_seqlen
            assert torch.equal(flat[microbatch.cu_seqlens_padded[:-1]], data.tensor("tokens")[:, 0])
            assert torch.equal(data.tensor("values"), microbatch.unpacked(flat.double() / 2, pad_value=0.3))
            for place, own in enumerate(data["pixel_values"]):
                assert (own == int(data.tensor("rewards")[place])).all()
            returned.append(data)
    together = concatenate(returned).select(torch.tensor(sharding.restore)).truncate(batch.width)
    for name in ("tokens", "labels", "values", "features", "rewards"):
        assert torch.equal(batch.tensor(name), together.tensor(name))
    assert sharding.weights.tolist() == torch.cat([part.tensor(WEIGHTS) for part in returned]).tolist()


def entries_of(data, *, logits, layout, **names):
    """Return the fields of each sequence as a packed loss gives them."""
    found = []

    def noted(logits, entry, **_):
        found.append({name: torch.as_tensor(value).tolist() for name, value in entry.items()})
        return logits.sum(), {}

    PackedLoss(noted, **names)(logits, data, layout=layout, num_sequences=1, num_tokens=1)
    return found


def test_a_field_runs_along_the_sequence_where_it_is_declared():
    """In rows, padded batches and losses: vectors stay whole, the third dimension is cut."""
    lengths = [3, 5, 8]
    fields = {
        "tokens": torch.arange(24).view(3, 8), "vector": torch.arange(24).view(3, 8) / 2,
        "position_ids": torch.arange(96).view(3, 4, 8), "spans": torch.arange(48).view(3, 2, 8),
        "sizes": torch.tensor(lengths),
    }  # fmt: skip
    names = {"input_key": "tokens", "input_lengths_key": "sizes"}
    batch = BatchedData.from_fields(fields, sequence_dims={"vector": None, "spans": 2}, **names)
    assert [3, 4, 4] == batch.truncate(4)["sizes"].tolist()
    ends = {"tokens": 1, "position_ids": 2, "spans": 2}
    expected = [
        {name: (field[n : n + 1].narrow(ends[name], 0, length) if name in ends else field[n : n + 1]).tolist()
         for name, field in fields.items()}
        for n, length in enumerate(lengths)
    ]  # fmt: skip

    for shard in (shard_packed, shard_dynamic):
        (worker,) = batch.shard(shard(lengths, shards=1, batch_size=3, max_tokens_per_microbatch=16))
        found = []
        for row in worker:
            data, logits = {name: row.data[name] for name in fields}, torch.ones(1, row.layout.num_positions, 2)
            found += entries_of(data, logits=logits, layout=row.layout, sequence_dims=row.data.sequence_dims, **names)
        assert sorted(expected, key=str) == sorted(found, key=str)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), more=st.integers(0, 9))
def test_wider_rows_and_batches_are_padded_at_their_end(lengths, more):
    """With each field's own value; as stages of a pipeline exchange rows; too narrow is refused."""
    batch = batch_of(lengths)
    needed = sum(-(-length // 2) * 2 for length in lengths)

    row, plain = pack_row(batch, multiple=2, row_length=needed + more), pack_row(batch, multiple=2)
    assert needed + more == row.input_ids.shape[1] == int(row.cu_seqlens_padded[-1])
    assert plain.cu_seqlens_padded[:-1].tolist() == row.cu_seqlens_padded[:-1].tolist()
    assert torch.equal(plain.input_ids, row.input_ids[:, :needed])
    assert (row.input_ids[:, needed:] == 7).all()
    with pytest.raises(ArgumentError, match=f"have {needed:,} positions in total .* row has {needed - 1:,}: raise"):
        pack_row(batch, multiple=2, row_length=needed - 1)

    wide = batch.truncate(batch.width + more)
    for name in ("tokens", "labels", "values", "features"):
        assert torch.equal(batch.tensor(name), wide.tensor(name)[:, : batch.width])
        assert (wide.tensor(name)[:, batch.width :] == PADS.get(name, 0)).all()
        assert torch.equal(wide.tensor(name), concatenate([batch, wide]).tensor(name)[: len(batch)])


IDS = torch.ones((2, 4), dtype=torch.int64)

FIELDS = {
    "input_ids": IDS, "texts": ["a", "b"], "scores": torch.ones(2, 3), "x": torch.ones(2), "mrope": torch.ones(2, 3, 5),
    "attention_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]),
}  # fmt: skip

NO_LENGTHS = ([1.0, 2], [0, 2], [[1], [2]], [True, True], ["a", "b"], [1, [2]], torch.tensor([1j, 2]))

NO_DIMS = (("x", 1), ("gone", 1), ("texts", 1), ("scores", 1), ("input_ids", 0), ("input_ids", None), ("mrope", 3))


@pytest.mark.parametrize(
    ("fields", "options", "says"),
    [
        ({**FIELDS, "rewards": torch.ones(3)}, {}, "rewards has 3 entries"),
        *(({**FIELDS, "x": x}, {}, "x has no entries") for x in (None, torch.tensor(3))),
        *((fields, {}, "needs the field input_ids") for fields in ({}, {"input_ids": [1, 2]}, {"input_ids": IDS[0]})),
        *((FIELDS, {"lengths": lengths}, "whole numbers of at least 1, one") for lengths in NO_LENGTHS),
        (FIELDS, {"lengths": [1, 5]}, "5 tokens, but the batch is 4 wide: correct"),
        (FIELDS, {"lengths": []}, "has 2 entries, but the batch has 0 sequences"),
        (FIELDS, {"lengths": None}, "give lengths=…, or the field input_lengths"),
        ({**FIELDS, "input_lengths": [1, 2]}, {"lengths": [2, 2]}, "lengths differ from the field input_lengths"),
        *(({**FIELDS, "attention_mask": torch.tensor([[1, 0, 0, 0], row])}, {}, says) for row, says in (
            *((row, "row 1 of attention_mask is not 1 for its 2 .*argsort") for row in ([0, 0, 1, 1], [1, 0, 1, 0])),
            *(([1] * num + [0] * (4 - num), rf"2 tokens by lengths, but {num} by attention_mask: give lengths=attent")
              for num in (1, 4)), ([0, 0, 0, 0], "but 0 by attention_mask: remove the sequence"))),
        *((FIELDS, {"pad_values": {name: 1}}, f"pad_values has {name}") for name in ("gone", "texts")),
        *((FIELDS, {"pad_values": {"input_ids": pad}}, "which int64 cannot represent") for pad in (0.5, "x")),
        *((FIELDS, {"sequence_dims": {name: dim}}, f"sequence_dims has {dim} for {name}, but needs a dim")
          for name, dim in NO_DIMS),
    ],
)  # fmt: skip
def test_an_invalid_batch_is_refused(fields, options, says):
    """Fields, lengths, pad values and dimensions that do not go together."""
    with pytest.raises(ArgumentError, match=says):
        BatchedData.from_fields(fields, **{"lengths": [1, 2], **options})
    BatchedData.from_fields(FIELDS, lengths=[1, 2])


def test_a_mask_is_checked_once():
    """Where it is given: one that is then padded with 1 is kept, and a later one is refused."""
    fields, pads = {"input_ids": IDS, "attention_mask": FIELDS["attention_mask"]}, {"attention_mask": 1}
    batch = BatchedData.from_fields(fields, lengths=[1, 2], pad_values=pads).truncate(6)
    assert [1, 1] == batch.with_fields(z=torch.ones(2))["attention_mask"][0, 4:].tolist()
    batch.shard(shard_packed([1, 2], shards=1, batch_size=2, max_tokens_per_microbatch=4))
    with pytest.raises(ArgumentError, match="row 0 has 1 token by lengths, but 6 by attention_mask"):
        batch.with_fields(attention_mask=torch.ones(2, 6))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32])
def test_ranks_compare_only_lengths_and_tokens(dtype):
    """Type, padding and width of tokens do not count; without ranks, nothing is computed."""
    worker, said, ids = SimpleNamespace(train=lambda _: {}), [], torch.tensor([[5, 0, 0, 0], [6, 7, 0, 0]])
    plain = BatchedData.from_fields({"input_ids": ids}, lengths=[1, 2])
    same = plain.with_fields(input_ids=(ids + 3 * (ids == 0)).to(dtype).requires_grad_(dtype != torch.int32))
    others = plain.with_fields(input_ids=ids + 1), attrs.evolve(plain, lengths=torch.tensor([2, 2]))
    for batch in (plain, same.truncate(7), *others):
        shards = batch.shard(shard_packed(batch.lengths, shards=2, batch_size=2, max_tokens_per_microbatch=4))
        ranks = ScriptedGroup(world_size=2, others=lambda value: said.append(value) or value)
        RankWorkers(worker, ranks).run_all_workers_sharded_data("train", shards)
    assert (said[0], 3) == (said[1], len({*said}))
    RankWorkers(worker, OneRank()).run_all_workers_sharded_data("train", [attrs.evolve(shards[0], data=None)])


BATCH = BatchedData.from_fields({"input_ids": IDS, "texts": ["a", "b"]}, lengths=np.array([1, 2]))

EMPTY = BATCH.select([])


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: BATCH.tensor("texts"), "field texts is a list"),
        (lambda: BATCH.shard(shard_packed([1, 2, 2], shards=1, batch_size=3, max_tokens_per_microbatch=4)),
         "made from other lengths: "),
        *((lambda ask=ask: ask("gone"), "no field gone: its fields are input_ids, texts")
          for ask in (BATCH.tensor, BATCH.__getitem__)),
        *((lambda indices=indices: BATCH.select(indices), "numbers from 0 to below 2, the number of")
          for indices in ([2], [-1], [0.7], [[0, 1]], torch.tensor([True, False]), ["a"])),
        (lambda: BATCH.truncate(-1), "width is -1, but has to be"),
        *((lambda num=num: padded_microbatch(BATCH).unpacked(torch.ones(num)), rf"\({num},\), but the microbatch has 8")
          for num in (7, 9)),
        *((lambda length=length: pack_row(EMPTY, multiple=2, row_length=length), "no sequences, so no row")
          for length in (None, 8)),
        (lambda: concatenate([]), "batches is empty"),
    ],
)  # fmt: skip
def test_what_a_batch_cannot_be_asked_for_is_refused(ask, says):
    """A list as a tensor; microbatches of other sequences; what it does not have; an empty row."""
    with pytest.raises((ArgumentError, ValueError), match=says):
        ask()


@pytest.mark.parametrize(
    ("name", "shape", "dim"), [("vector", (2, 4), 1), ("spans", (2, 3, 4), 2), ("position_ids", (2, 4, 4), 2)]
)
def test_a_field_that_only_may_run_along_the_sequence_is_named(name, shape, dim):
    """In batches and in losses: it is as wide as the tokens, and nothing says whether by chance."""
    says = rf"dimension {dim} of {name} is 4, like the width of input_ids, .* sequence_dims={{'{name}': {dim}}}, or"
    fields = {"input_ids": IDS, "token_mask": torch.ones(2, 4), name: torch.ones(shape)}

    with pytest.raises(ArgumentError, match=says):
        BatchedData.from_fields(fields, lengths=[1, 2])
    batch = BatchedData.from_fields({"input_ids": IDS}, lengths=[1, 2])
    with pytest.raises(ArgumentError, match=says):
        batch.with_fields(**{name: torch.ones(shape)})
    assert 2 == batch.with_fields({name: dim}, **{name: torch.ones(shape)}).truncate(2).tensor(name).shape[dim]
    with pytest.raises(ArgumentError, match=says):
        entries_of(fields, logits=torch.ones(1, 8, 2), layout=PackedLayout.from_lengths([4, 4]))
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
        with pytest.raises(ValueError, match="field sizes has other lengths than the row"):
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
                f"batch 2 has other fields than batch 0: {name} is {there}, but in batch 0 it is {here}: "
                "give all batches the same fields"
            )
            with pytest.raises(ArgumentError, match=re.escape(says)):
                concatenate(batches)


def test_a_batch_may_be_empty():
    """It adds nothing to others."""
    assert 0 == len(EMPTY) == len(concatenate([EMPTY, EMPTY])) == len(EMPTY.truncate(2).slice(0, 1))
    assert BATCH["texts"] == concatenate([EMPTY, BATCH, EMPTY])["texts"]
