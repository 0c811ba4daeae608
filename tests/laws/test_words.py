"""Indices in a message: all of them, and short where they follow each other."""

from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.errors import format_ranges

indices = st.lists(st.integers(0, 9), max_size=30) | st.integers(1, 9).flatmap(
    lambda num: st.integers(0, 40).map(lambda size: [place % num for place in range(size)])
)


def expanded(text: str) -> list[int]:
    """The indices that a text of ranges stands for."""
    found: list[int] = []
    for part in text.split(", ") if text else []:
        bounds, _, times = part.partition(" x ")
        first, _, last = bounds.partition("..")
        found += [*range(int(first), int(last or first) + 1)] * int(times or 1)
    return found


@given(indices)
def test_ranges_stand_for_all_indices_in_their_order(indices):
    """Scattered, following each other, or over and over again."""
    text = format_ranges(indices)
    event(f"{'repeated' if ' x ' in text else 'once'}, {'ranges' if '..' in text else 'alone'}")

    assert indices == expanded(text)


@given(indices, st.integers(1, 5))
def test_of_many_ranges_the_first_are_written(indices, most):
    """An ellipsis stands for the others, and for nothing else."""
    whole = format_ranges(indices).split(", ")

    expected = whole if len(whole) <= most else [*whole[:most], "…"]
    assert ", ".join(expected) == format_ranges(indices, most=most)


@given(st.integers(1, 40), st.integers(0, 5000))
def test_packs_that_fill_the_ranks_take_a_short_line(num_packs, num_filler):
    """However many ranks there are: they come from the front, again and again."""
    repeated = [place % num_packs for place in range(num_filler)]

    assert repeated == expanded(format_ranges(repeated))
    assert len(format_ranges(repeated)) < 30
