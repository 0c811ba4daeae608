"""verl cuts by ours: the hook keeps what the engine expects of its function."""

import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from packplan.adapters.engines import verl
from packplan.core.errors import ArgumentError

HAS_VERL = bool(find_spec("verl") and find_spec("tensordict"))
"""Whether verl is here. It pins an older transformers, so it has an environment of its own."""

masked_rows = st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any)
"""Tokens of rows, some of which are masked throughout."""


class RecordedGroup:
    """Ranks that run in turn, twice: they record their numbers, then each gets the largest."""

    def __init__(self) -> None:
        self.passes = []

    def run(self, ranks):
        """Return what each rank returns, or the error of each."""
        for _ in range(2):
            largest = [max(numbers) for numbers in zip(*self.passes, strict=True)]
            self.passes, found = [], []
            for rank in ranks:
                self.numbers, self.largest = [], iter(largest)
                try:
                    found.append(rank())
                except ArgumentError as error:
                    found.append(error)
                self.passes.append(self.numbers + [0] * (3 - len(self.numbers)))
        return found

    def all_reduce(self, tensor, *, op, group):
        """Take the largest of the earlier pass, if there was one."""
        assert op == dist.ReduceOp.MAX
        assert group is self
        self.numbers.append(int(tensor))
        tensor.fill_(next(self.largest, int(tensor)))


@pytest.fixture
def engine(monkeypatch):
    """A function that makes batches of verl, or of modules with what the hook takes of verl."""
    if HAS_VERL:
        from tensordict import TensorDict

        # Without an accelerator, verl takes one of NVIDIA for granted.
        monkeypatch.setattr(import_module("verl.utils.device"), "get_device_name", lambda: "cpu")
        return lambda fields: TensorDict(fields, batch_size=len(fields["attention_mask"]))
    parts = {
        "verl": {}, "verl.utils": {},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
        "verl.utils.seqlen_balancing": {
            "calculate_workload": lambda lengths: 24576 * lengths + lengths**2,
            "rearrange_micro_batches": lambda: None,
        },
        "verl.utils.tensordict_utils": {
            "index_select_tensor_dict": lambda batch, rows: {name: field[rows] for name, field in batch.items()}
        },
    }  # fmt: skip
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return dict


def rows_of(lengths, engine):
    """Return a batch of verl's, padded, whose tokens are the numbers of the rows."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.arange(len(lengths))[:, None].expand(mask.shape).contiguous()
    return engine({"input_ids": ids, "attention_mask": mask.long()})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(masked_rows, st.integers(0, 60), st.sampled_from([None, 2]), st.sampled_from([None, 3]), st.booleans())
def test_verl_gets_each_row_once_within_its_limit(engine, lengths, more, divisor, least, balance):  # noqa: PLR0917
    """In as many microbatches as asked for, each with the rows that it says; or an error."""
    limit, batch = max(lengths) + more, rows_of(lengths, engine)
    options = {"num_batches_divided_by": divisor, "min_num_micro_batch": least, "use_dynamic_bsz_balance": balance}
    try:
        microbatches, rows = verl.rearrange_micro_batches(batch, limit, **options)
    except ArgumentError as error:
        event("too few rows")
        assert "give more rows to a step" in str(error)  # noqa: PT017  # only for some inputs
        return

    assert list(range(len(lengths))) == sorted(chain(*rows))
    assert all(sum(lengths[row] for row in held) <= limit for held in rows)
    assert [row for held in rows for row in held] == [
        int(ids[0]) for microbatch in microbatches for ids in microbatch["input_ids"]
    ]
    assert 0 == len(rows) % (divisor or 1)
    assert len(rows) >= (least or 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(masked_rows, min_size=2, max_size=4), st.integers(0, 60))
def test_ranks_of_verl_have_as_many_microbatches(engine, ranks, more):
    """All of them, or all raise: none waits for another in a collective."""
    group, limit = RecordedGroup(), max(map(max, ranks)) + more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "all_reduce", group.all_reduce)
        cut = [
            lambda lengths=lengths: verl.rearrange_micro_batches(rows_of(lengths, engine), limit, dp_group=group)
            for lengths in ranks
        ]
        found = group.run(cut)

    failed = [isinstance(each, ArgumentError) for each in found]
    event(f"raise: {failed[0]}")
    assert 1 == len(set(failed))
    if not failed[0]:
        assert 1 == len({len(rows) for _, rows in found})


def test_rows_that_verl_keeps_together_stay_together(engine):
    """Neighbours in fours, as a reward model trains on pairs; also in nested tensors."""
    lengths = [9, 1, 2, 3, 8, 8, 1, 1, 4, 4, 4, 4]
    batch = rows_of(lengths, engine)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    nested = SimpleNamespace(is_nested=True, offsets=lambda: ends)
    for given_ids in (batch["input_ids"], nested):
        asked = {"input_ids": given_ids, "attention_mask": batch["attention_mask"]}
        with pytest.MonkeyPatch.context() as patch:
            tensordicts = import_module("verl.utils.tensordict_utils")
            patch.setattr(tensordicts, "index_select_tensor_dict", lambda _, rows: rows)
            _, rows = verl.rearrange_micro_batches(asked, 20, force_group_size=4)
        assert [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] == sorted(rows)
    for limit, size, says in (
        (17, 4, r"rows 4 to 7 together have 18 tokens, but a microbatch holds 17 \(max_token_len\)"),
        (8, 1, "row 0 has 9 tokens, but a microbatch holds 8"),
        (20, 5, "12 rows cannot be cut into units of 5"),
    ):
        with pytest.raises(ArgumentError, match=says):
            verl.rearrange_micro_batches(batch, limit, force_group_size=size)


@pytest.mark.parametrize("least", [None, 3])
def test_a_row_that_is_masked_throughout_goes_with_the_others(engine, least):
    """It takes no room, as for verl: rows that fill a microbatch are not parted from it."""
    batch = rows_of([8, 0, 0], engine)

    _, rows = verl.rearrange_micro_batches(batch, 8, min_num_micro_batch=least)

    assert (least or 1) == len(rows)
    assert [0, 1, 2] == sorted(chain(*rows))


def test_the_rank_whose_rows_do_not_fit_names_them(engine):
    """The others say that another does; all raise."""
    group = RecordedGroup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "all_reduce", group.all_reduce)
        cut = [
            lambda lengths=lengths: verl.rearrange_micro_batches(rows_of(lengths, engine), 8, dp_group=group)
            for lengths in ([3, 4], [3, 9])
        ]
        found = group.run(cut)

    assert str(found[0]).startswith("another rank has rows that do not fit")
    assert str(found[1]).startswith("row 1 has 9 tokens, but a microbatch holds 8")


@pytest.mark.usefixtures("engine")
def test_a_hook_takes_the_place_of_the_engines_function(monkeypatch):
    """In its module, and where another module of the engine took it by name."""
    module = import_module("verl.utils.seqlen_balancing")
    original = module.rearrange_micro_batches
    taker = ModuleType("verl.taker")
    taker.rearrange_micro_batches = original
    monkeypatch.setitem(sys.modules, "verl.taker", taker)
    monkeypatch.setattr(module, "rearrange_micro_batches", original)

    verl.install()

    assert verl.rearrange_micro_batches is module.rearrange_micro_batches is taker.rearrange_micro_batches


@pytest.mark.skipif(not HAS_VERL, reason="verl pins an older transformers: docs/rl.md has the commands that run this")
def test_no_more_microbatches_than_verl_makes(engine):
    """On answers of 1 to 400 tokens; verl counts up until its balanced parts keep the limit."""
    from verl.utils.seqlen_balancing import rearrange_micro_batches, restore_dynamic_batch

    ours, theirs = [], []
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 401, 96).tolist()
        batch = rows_of(lengths, engine)
        for found, cut in ((ours, verl.rearrange_micro_batches), (theirs, rearrange_micro_batches)):
            microbatches, rows = cut(batch, 1024)
            together = torch.cat([microbatch["input_ids"] for microbatch in microbatches])
            assert torch.equal(batch["input_ids"], restore_dynamic_batch(together, rows))
            works = [sum(24576 * lengths[row] + lengths[row] ** 2 for row in held) for held in rows]
            found.append((len(rows), max(works) / np.mean(works)))
    assert all(own[0] <= other[0] for own, other in zip(ours, theirs, strict=True))
    assert np.mean([own[1] for own in ours]) < 1.05
