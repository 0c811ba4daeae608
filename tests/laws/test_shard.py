"""RL batches: each sequence once, as many microbatches on each worker, and order restored."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from benchmarks.distributions import DISTRIBUTIONS
from benchmarks.rl import imbalances, imbalances_in_turn
from packplan.core.errors import ArgumentError
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.shard import shard_dynamic, shard_packed
from packplan.core.shard.rounds import assign_rounds, spread_over_rounds
from packplan.core.work.model import WorkModel
from tests.references import spread_slowly

MODES = ("packed", "dynamic")


MODEL = WorkModel(per_position=14 * 10**9, per_pair=4 * 28 * 3584)
"""A text model of 7B."""


@st.composite
def batches(draw, *, modes=MODES) -> dict:
    """A batch, its workers and global batches, and a mode."""
    mode = draw(st.sampled_from(modes))
    num = draw(st.integers(1, 70))  # drawn by itself, since lists are mostly short
    lengths = draw(st.lists(st.integers(1, 60), min_size=num, max_size=num))
    multiple = draw(st.sampled_from([1, 4, 7]))
    widest = -(-max(lengths) // multiple) * multiple
    return {
        "mode": mode,
        "lengths": lengths,
        "shards": draw(st.integers(1, 5)),
        "batch_size": draw(st.integers(1, 80)),
        "multiple": multiple,
        "budget": widest + draw(st.integers(0, 120)),
    }


def cut(case, **options):
    """Shard a batch in its mode."""
    lengths, mode = case["lengths"], case["mode"]
    workers = {"shards": case["shards"], "batch_size": case["batch_size"]}
    budget = {"max_tokens_per_microbatch": case["budget"]}
    if mode == "dynamic":
        return shard_dynamic(lengths, **workers, **budget, sequence_length_round=case["multiple"], **options)
    return shard_packed(lengths, **workers, **budget, sequence_length_pad_multiple=case["multiple"], **options)


def padded_lengths(case) -> list[int]:
    return [-(-length // case["multiple"]) * case["multiple"] for length in case["lengths"]]


def require_rules(sharding, case):
    """Require the budget, every sequence once with weight 1, and no empty microbatch."""
    assert sharding.positions.max() <= case["budget"]
    assert sorted(sharding.order[sharding.weights == 1].tolist()) == list(range(len(case["lengths"])))
    assert min(map(len, sharding.slots)) > 0


def works_of_workers(sharding):
    """Yield the works of each global batch; shape (workers, microbatches)."""
    yield from np.split(sharding.by_worker(sharding.works), np.cumsum(sharding.num_microbatches)[:-1], axis=1)


@example({"mode": "packed", "lengths": [31, 17, 42, 32, 47, 54, 58, 41], "shards": 3, "batch_size": 80,
          "multiple": 1, "budget": 112})  # fmt: skip  # room for no balance of items, but for one of packs
# The least loaded worker has no room for an item, and stays the least loaded.
@example(
    {"mode": "packed", "lengths": [53, 13, 27, 44, 20], "shards": 2, "batch_size": 80, "multiple": 1, "budget": 80}
)
@given(batches())
def test_workers_have_equally_many_microbatches_of_their_global_batch(case):
    """The shortest sequences fill up with weight 0; rows are as wide as what they hold."""
    sharding, padded, size = cut(case), padded_lengths(case), case["batch_size"]
    event(f"filler: {not sharding.weights.all()}, global batches: {len(sharding.num_microbatches) > 1}, {case['mode']}")

    assert case["shards"] == len(sharding)
    assert [-(-len(padded) // size)] * case["shards"] == [len(worker) for worker in sharding]
    for number, batch in (pair for worker in sharding for pair in enumerate(worker)):
        assert {number} == set((batch.indices // size).tolist())
        assert sharding.num_microbatches[number] == len(batch.microbatches)
        shortest = min(padded[number * size :][:size])
        assert {shortest} >= {padded[i] for i in batch.indices[batch.weights == 0]}
        for members, width in zip(batch.microbatches, batch.widths.tolist(), strict=True):
            held = [padded[i] for i in members]
            assert 0 == width % case["multiple"]
            if case["mode"] == "dynamic":
                assert max(held) <= width <= case["budget"] // len(members)
            else:
                assert sum(held) == width <= case["budget"]


@given(batches(), st.randoms(use_true_random=False))
def test_results_come_back_in_order(case, random):
    """`restore` brings the workers' results back into the order of the batch."""
    sharding = cut(case)

    batch = [random.random() for _ in case["lengths"]]
    returned = np.concatenate([[batch[i] for i in part.indices] for worker in sharding for part in worker])
    assert batch == returned[sharding.restore].tolist()
    assert np.array_equal(np.arange(len(batch)), sharding.order[sharding.restore])
    if sharding.weights.all():
        assert np.array_equal(np.arange(len(batch)), sharding.restore[sharding.order])


@given(batches(modes=("dynamic",)))
def test_dynamic_microbatches_are_shared_and_as_large_as_they_can_be(case):
    """All workers have the same boundaries and widths; the next row would break the budget."""
    sharding = cut(case)

    for number in range(len(sharding.num_microbatches)):
        global_batches = [worker[number] for worker in sharding]
        assert all(global_batches[0].boundaries == batch.boundaries for batch in global_batches)
        assert all(global_batches[0].widths.tolist() == batch.widths.tolist() for batch in global_batches)
        for (here, following), (start, stop) in zip(
            pairwise(zip(global_batches[0].boundaries, global_batches[0].widths.tolist(), strict=True)),
            global_batches[0].boundaries,
            strict=False,
        ):
            assert [start, stop] == here[0]
            width = max(padded_lengths(case)[batch.indices[following[0][0]]] for batch in global_batches)
            assert (stop + 1 - start) * width > case["budget"]


@given(batches(modes=("packed",)))
def test_a_round_has_the_like_of_every_worker(case):
    """One that is heavier is so on every worker; rounds come by their first sequence."""
    sharding = cut(case)

    for number, num in enumerate(sharding.num_microbatches):
        rounds = [[worker[number].microbatches[place] for worker in sharding] for place in range(num)]
        assert sorted(rounds, key=lambda one: min(map(min, one))) == rounds
    for worker in works_of_workers(sharding):
        heavier = worker[:, :, None] > worker[:, None, :]
        assert not (heavier.any(axis=0) & heavier.any(axis=0).T).any()


@given(batches(modes=("packed",)))
def test_the_worker_that_did_least_has_the_most_of_the_next_global_batch(case):
    """So that their sums stay together."""
    sharding = cut({**case, "batch_size": 1 + case["batch_size"] % 9})

    done = np.zeros(case["shards"])
    for worker in works_of_workers(sharding):
        now = worker.sum(axis=1)
        assert not ((done[:, None] < done) & (now[:, None] < now)).any()
        done += now


@given(batches(modes=("packed",)))
def test_balancing_needs_no_more_packs_than_dealing(case):
    """In any global batch, for any lengths."""
    padded, size = padded_lengths(case), case["batch_size"]
    parts = [padded[at : at + size] for at in range(0, len(padded), size)]
    dealt = [len(pack(one, capacity=case["budget"], algorithm="modified_first_fit_decreasing")) for one in parts]

    for ours, theirs in zip(cut(case).num_microbatches, dealt, strict=True):
        assert ours <= -(-theirs // case["shards"])


@pytest.mark.parametrize(
    ("name", "shards", "budget", "size", "most"),
    [
        ("chat-8192", 8, 8192, 512, 1.001),
        ("chat-8192", 64, 16384, 4096, 1.001),
        ("vlm-8192", 8, 8192, 512, 1.005),
        ("detcap-8192", 8, 8192, 512, 1.004),
    ],
)
@pytest.mark.untraced
def test_microbatches_that_run_together_have_equal_work(name, shards, budget, size, most):
    """Work is even by microbatch or by global batch, unlike that of packs in turn."""
    found = []
    for seed in range(3):
        lengths = DISTRIBUTIONS[name].lengths(size, seed=seed)
        options = {"shards": shards, "batch_size": size, "max_tokens_per_microbatch": budget, "work": MODEL}
        even, step = (imbalances(shard_packed(lengths, **options, **other)) for other in ({}, {"sync_at": "step"}))
        packs = pack(lengths, capacity=budget, algorithm="modified_first_fit_decreasing")
        in_turn = imbalances_in_turn(packs, lengths, shards=shards, work=MODEL)
        found.append([*even, step[0]])
        assert in_turn[1] > 1 + 3 * (most - 1)

    assert np.median(found, axis=0).max() <= most


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1.02, 1.1, 1.5]))
def test_heavy_rounds_are_filled_to_their_level_and_the_others_evenly(seed, shards, rounds, room):
    """As the rule says it, one sequence at a time, over all microbatches; None without room."""
    rng, num = np.random.default_rng(seed), shards * rounds
    for _ in range(8):
        lengths = rng.integers(1, 40, rng.integers(num, num + 60))
        few = rng.choice([1, 5, 10, 2000], lengths.size) * rng.integers(1, 9, lengths.size)
        works = rng.choice(np.stack([lengths**2, rng.integers(1, 200, lengths.size), few]))
        capacity = max(int(lengths.max()), int(lengths.sum() / num * room) + 1)

        found = spread_over_rounds(lengths, works, shards=shards, rounds=rounds, capacity=capacity)

        expected = spread_slowly(lengths.tolist(), works.tolist(), shards=shards, num=num, capacity=capacity)
        event(f"fits: {expected is not None}")
        assert expected == (None if found is None else found.tolist())


@given(batches(modes=("packed",)), st.integers(1, 2**30))
def test_another_unit_of_work_cuts_alike(case, factor):
    """FLOPs or seconds, of a model or of each sequence: the microbatches are the same."""
    model = WorkModel(per_position=3, per_pair=2)
    scaled = WorkModel(3 * factor, 2 * factor)

    for sync_at in ("step", "microbatch"):
        assert cut(case, work=model, sync_at=sync_at).slots == cut(case, work=scaled, sync_at=sync_at).slots
    assert cut(case).slots == cut(case, work=[factor * width**2 for width in padded_lengths(case)]).slots


@pytest.mark.parametrize("shard", [shard_packed, shard_dynamic])
def test_what_cannot_be_sharded_is_refused(shard):
    """No sequence, no worker, options that there are not, and sequences over the budget."""
    multiple = "sequence_length_pad_multiple" if shard is shard_packed else "sequence_length_round"
    options = {"shards": 1, "batch_size": 4, "max_tokens_per_microbatch": 95}
    for width in (1, 32):
        with pytest.raises(ArgumentError) as found:
            shard([3, 90, 98], **options | {"max_tokens_per_microbatch": 89 if width == 1 else 95, multiple: width})
        assert {"index": 1, "num_over": 2, "widest": 98 if width == 1 else 128} == found.value.details
    wrongs = [{"shards": 0}, {"batch_size": 0}, {"when_long": "zzz"}]
    if shard is shard_packed:
        wrongs += [{"work": [-2.0]}, {"sync_at": "zzz"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            shard([1], **options | wrong)
    with pytest.raises(ArgumentError, match="no sequence"):
        shard([], **options)


@given(batches(), st.integers(1, 60))
def test_a_sequence_over_the_budget_may_be_alone(case, budget):
    """The other microbatches keep the budget, and all other rules of a cut hold."""
    sharding = cut({**case, "budget": budget}, when_long="alone")

    padded = padded_lengths(case)
    event(f"sequences over the budget: {min(sum(width > budget for width in padded), 3)}, {case['mode']}")
    require_rules(sharding, {**case, "budget": max(budget, *padded, 0)})
    for members, positions in zip(sharding.slots, sharding.positions.tolist(), strict=True):
        assert positions <= budget or len(members) == 1
    assert max(sharding.positions) <= sharding.capacity


@given(batches())
def test_works_and_positions_count_what_the_microbatches_hold(case):
    """Against counting sequence by sequence."""
    sharding, padded = cut(case), padded_lengths(case)

    for members, width, positions, work in zip(
        sharding.slots, sharding.widths, sharding.positions, sharding.works, strict=True
    ):
        rows = 1 if sharding.mode == "packed" else len(members)
        assert rows * width == positions
        assert work == (sum(padded[i] ** 2 for i in members) if sharding.mode == "packed" else rows * width**2)


OPTIONS = st.fixed_dictionaries({
    "algorithm": st.sampled_from(sorted(set(ALGORITHMS) - {"certified"})),
    "work": st.sampled_from([None, WorkModel(50, 1), WorkModel(0, 1)]),
    "sync_at": st.sampled_from(["step", "microbatch"]),
})  # fmt: skip


@given(batches(modes=("packed",)), OPTIONS)
def test_no_option_breaks_a_rule(case, options):
    """Any algorithm may decide, and where workers meet."""
    options = {name: value for name, value in options.items() if value is not None}

    sharding = cut(case, **options)

    require_rules(sharding, case)
    assert sharding.num_microbatches == cut(case, algorithm=options["algorithm"]).num_microbatches


@pytest.mark.parametrize("num", [9, 100])
def test_levelling_keeps_every_microbatch_and_makes_none_heavier_than_the_heaviest(num):
    """Also where one microbatch has nearly all, so that the exchanges run out."""
    works = np.random.default_rng(num).integers(1, 10**6, num)
    labels = (np.arange(num) == 0).astype(np.int64)

    found = assign_rounds(labels, np.ones(num, dtype=np.int64), works, shards=2, capacity=num)

    assert {0, 1} == {*found.tolist()}
    assert np.bincount(found, works).max() < np.bincount(labels, works).max()
