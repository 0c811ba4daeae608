"""`Packs` reads like a list of lists, and cannot be changed."""

from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.packs import Packs, concatenate, plan_checksum
from tests.strategies import pack_lists


@given(pack_lists())
def test_it_reads_like_the_list_of_lists_it_was_made_from(lists):
    """len, index from both ends, slice, iterate, tolist, equality."""
    packs = Packs.from_lists(lists)

    assert len(lists) == len(packs)
    assert lists == list(packs) == packs.tolist()
    assert packs == lists
    assert lists[-1] == packs[-1]
    assert lists[1:] == packs[1:].tolist()
    assert lists[::-1] == packs[::-1].tolist()
    assert packs != lists[1:]
    assert Packs.from_lists(lists) == packs
    assert sum(map(len, lists)) == packs.num_samples
    with pytest.raises(IndexError):
        packs[len(lists)]


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 9))
def test_packs_from_labels_are_in_canonical_order(labels, block):
    """Neither the order of labels nor the size of sorted blocks matters."""
    numbered, groups = {label: number for number, label in enumerate(sorted(set(labels)))}, {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)

    with patch("packplan.core.packs.BLOCK", block):
        packs = Packs.from_labels(np.array([numbered[label] for label in labels], dtype=np.int32))

    assert sorted(groups.values()) == packs.tolist()


@given(pack_lists(), st.data())
def test_sums_are_exact_and_rounded_once(lists, data):
    """Whatever the magnitudes: beyond 64 bits, and beside values that vanish in a float's sum."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    drawn = [int.from_bytes(rng.bytes(16)) >> int(rng.integers(0, 128)) for _ in range(30)]
    whole = np.array(drawn, dtype=np.float64)
    packs = Packs.from_lists(lists)
    event(f"beyond 64 bits: {any(sum(drawn[i] for i in pack) >= 2**63 for pack in lists)}")

    assert [float(sum(int(whole[i]) for i in pack)) for pack in lists] == packs.sums(whole).tolist()


@given(pack_lists())
def test_packs_over_memory_mapped_files_are_the_same_packs(lists):
    """Without a copy: equality and checksum read the files."""
    packs = Packs.from_lists(lists)
    with TemporaryDirectory() as folder:
        mapped = []
        for name, array in (("offsets", packs.offsets), ("indices", packs.indices)):
            np.save(f"{folder}/{name}.npy", array)
            mapped.append(np.load(f"{folder}/{name}.npy", mmap_mode="r"))

        again = Packs(*mapped)

        assert packs == again
        assert plan_checksum(packs) == plan_checksum(again) == plan_checksum(lists)
        assert all(
            np.shares_memory(ours, file) for ours, file in zip((again.offsets, again.indices), mapped, strict=True)
        )


def test_no_packs_at_all():
    """Are fine: no load, equal to an empty list."""
    empty = Packs.from_lists([])

    assert (0, [], []) == (len(empty), empty.loads(np.zeros(0, np.int64)).tolist(), empty.sums(np.zeros(0)).tolist())
    assert empty == [] == Packs.from_labels(np.zeros(0, dtype=np.int32)).tolist()
    assert concatenate([empty, Packs.from_lists([[0]]), empty]) == [[0]]


def test_it_is_read_only_and_cannot_be_hashed():
    """Arrays given to it stay the caller's to write, but not through it."""
    packs = Packs.from_lists([[0, 1]])

    with pytest.raises(ValueError, match="read-only"):
        packs.indices[0] = 3
    with pytest.raises(TypeError):
        hash(packs)
    assert packs != 3
    assert "1 packs, 2 samples" in repr(packs)


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 1], [0, 0, 2], [0, 3, 2], [[0, 2]]])
def test_offsets_that_name_no_packs_are_refused(offsets):
    """They start at 0, rise strictly and end at the number of indices."""
    with pytest.raises(ValueError, match=r"offsets|empty"):
        Packs(offsets, [4, 5])


@pytest.mark.parametrize("wrong", [[[0, -1]], [[0.7]], ["01"], [[True]]])
def test_packs_hold_whole_numbers(wrong):
    with pytest.raises(ValueError, match="whole numbers from 0"):
        Packs.from_lists(wrong)
