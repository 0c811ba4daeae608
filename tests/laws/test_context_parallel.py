"""Context parallelism: each position is on one rank, work is equal, and no target is lost."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.context_parallel import PackedLayout, chunk_positions, cu_seqlens, padded_length


@st.composite
def layouts(draw) -> PackedLayout:
    """Rows of up to eight sequences on up to five ranks, some with more padding than needed."""
    lengths = draw(st.lists(st.integers(1, 40), max_size=8))
    cp_size, tp_size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    layout = PackedLayout.from_lengths(lengths, cp_size=cp_size, tp_size=tp_size)
    if lengths and draw(st.booleans()):
        # A row of a fixed length: its last sequence has the rest for padding.
        ends = layout.cu_seqlens_padded.tolist()
        ends[-1] += 2 * cp_size * draw(st.integers(0, 9))
        layout = PackedLayout(layout.cu_seqlens, ends, cp_size)
    return layout


def ranks_rows(layout, row) -> list[list]:
    return [[row[p] for p in layout.positions(rank).tolist()] for rank in range(layout.cp_size)]


@given(layouts())
def test_every_position_is_computed_by_exactly_one_rank(layout):
    """And by every rank equally many, in ascending order."""
    parts = [layout.positions(rank).tolist() for rank in range(layout.cp_size)]

    assert list(range(layout.num_positions)) == sorted(chain(*parts))
    assert {layout.num_positions // layout.cp_size} == {len(part) for part in parts}
    assert all(sorted(part) == part for part in parts)


@given(layouts())
def test_a_rank_has_its_chunks_of_each_sequence_one_sequence_after_the_other(layout):
    """Cut alone by `chunk_positions`, then packed."""
    starts = layout.cu_seqlens_padded.tolist()
    for rank in range(layout.cp_size):
        alone = [
            start + position
            for start, end in pairwise(starts)
            for position in chunk_positions(end - start, cp_size=layout.cp_size, cp_rank=rank)
        ]
        assert alone == layout.positions(rank).tolist()


@given(layouts())
def test_the_ranks_rows_give_the_row_back(layout):
    """One after the other, gathered by `restore`; and without the padding, the sequences."""
    sequences = [[(number, at) for at in range(n)] for number, n in enumerate(layout.lengths.tolist())]
    room = np.diff(layout.cu_seqlens_padded).tolist()
    row = [token for own, n in zip(sequences, room, strict=True) for token in own + ["pad"] * (n - len(own))]
    concatenated = list(chain(*ranks_rows(layout, row)))

    assert row == [concatenated[i] for i in layout.restore.tolist()]
    assert list(chain(*sequences)) == [concatenated[i] for i in layout.restore[layout.is_token].tolist()]


@given(layouts())
def test_targets_are_those_of_each_sequence_rolled_alone(layout):
    """Targets cross the ends of chunks; last tokens and padding have none."""
    tokens = list(range(100, 100 + layout.cu_seqlens[-1]))
    row, expected = [], []
    for start, end, room in zip(
        layout.cu_seqlens[:-1], layout.cu_seqlens[1:], np.diff(layout.cu_seqlens_padded), strict=True
    ):
        sequence, pad = tokens[start:end], int(room - (end - start))
        row += sequence + [0] * pad
        expected += sequence[1:] + [None] * (pad + 1)
    found = [None if target < 0 else row[target] for target in layout.targets.tolist()]

    assert expected == found
    assert ranks_rows(layout, expected) == ranks_rows(layout, found)


@given(layouts())
def test_all_ranks_have_the_same_causal_work(layout):
    """Counted pair by pair: a query sees the positions of its sequence up to itself."""
    work = layout.causal_work()
    counted = [sum(layout.position_ids[p] + 1 for p in layout.positions(rank)) for rank in range(layout.cp_size)]

    assert counted == list(work)
    assert 1 == len(set(work))


@given(st.integers(1, 500), st.integers(1, 8), st.integers(1, 8))
def test_padding_is_the_least_that_the_ranks_can_share(length, cp_size, tp_size):
    """A multiple of cp * 2 * tp, of tp where the row is not shared."""
    padded = padded_length(length, cp_size=cp_size, tp_size=tp_size)

    unit = tp_size * (2 * cp_size if cp_size > 1 else 1)
    assert 0 == padded % unit
    assert length <= padded < length + unit
    assert [0, padded] == cu_seqlens([length], pad_to_multiple_of=unit)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: chunk_positions(6, cp_size=2, cp_rank=0), "6 positions, but 2 ranks .* multiple of 4"),
        (lambda: chunk_positions(8, cp_size=2, cp_rank=2), "cp_rank is 2, but 2 ranks"),
        (lambda: chunk_positions(8, cp_size=2, cp_rank=-1), "cp_rank is -1"),
        (lambda: chunk_positions(0, cp_size=2, cp_rank=0), "sequence 0 has 0 tokens"),
        (lambda: padded_length(8, cp_size=0), "cp_size is 0"),
        (lambda: padded_length(8, cp_size=2, tp_size=0), "tp_size is 0"),
        (lambda: cu_seqlens([8], pad_to_multiple_of=0), "pad_to_multiple_of is 0"),
        (lambda: PackedLayout([0, 5], [0, 4]), "5 tokens in 4 positions"),
        (lambda: PackedLayout([0, 5], [0, 4, 8]), "do not describe one row"),
        (lambda: PackedLayout([1, 5], [0, 4]), "do not describe one row"),
        (lambda: PackedLayout([0, 5], [1, 9]), "do not describe one row"),
        (lambda: PackedLayout([], []), "do not describe one row"),
        (lambda: PackedLayout([[0]], [[0]]), "do not describe one row"),
        (lambda: PackedLayout([0, 5], [0, 5], 0), "cp_size is 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(call, says):
    """With the numbers, and what to pad to."""
    with pytest.raises(ValueError, match=says):
        call()
