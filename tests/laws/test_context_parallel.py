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


@given(layouts())
def test_each_rank_computes_its_chunks_of_each_sequence_and_all_have_equal_work(layout):
    """As `chunk_positions` cuts each; `restore` gathers the row; queries see up to themselves."""
    parts = [layout.positions(rank).tolist() for rank in range(layout.cp_size)]
    for rank, part in enumerate(parts):
        alone = [
            start + position
            for start, end in pairwise(layout.cu_seqlens_padded.tolist())
            for position in chunk_positions(end - start, cp_size=layout.cp_size, cp_rank=rank)
        ]
        assert alone == part == sorted(part)
    gathered = list(chain(*parts))
    assert list(range(layout.num_positions)) == [gathered[i] for i in layout.restore.tolist()]

    work = [sum(layout.position_ids[p] + 1 for p in part) for part in parts]
    assert work == list(layout.causal_work())
    assert 1 == len(set(work))


@given(layouts())
def test_tokens_and_targets_are_those_of_each_sequence_rolled_alone(layout):
    """Targets cross the ends of chunks; last tokens and padding have none."""
    room, row, expected = np.diff(layout.cu_seqlens_padded).tolist(), [], []
    for number, (length, width) in enumerate(zip(layout.lengths.tolist(), room, strict=True)):
        sequence = [(number, at) for at in range(length)]
        row += sequence + [None] * (width - length)
        expected += sequence[1:] + [None] * (width - length + 1)

    assert [entry is not None for entry in row] == layout.is_token.tolist()
    assert expected == [None if target < 0 else row[target] for target in layout.targets.tolist()]


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
        (lambda: chunk_positions(8, cp_size=2, cp_rank=2), "cp_rank is 2, but has to be below cp_size"),
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
