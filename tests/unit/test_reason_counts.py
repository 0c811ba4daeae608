"""Failures are counted by reason, whatever their reasons quote, in bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.app.planning.bad import MOST_REASONS, OTHER_REASONS, ReasonCounts

names = st.text("abcXYZ_- .éß", min_size=1, max_size=12).filter(lambda name: name.strip())


def counted(reasons: list[str]) -> dict[str, int]:
    """Return the counts of reasons, each of which is shown."""
    counts = ReasonCounts()
    for reason in reasons:
        counts.add(reason)
    return counts.most_common(MOST_REASONS)


@given(st.lists(st.tuples(st.integers(0, 10**9), names, st.sampled_from("/\\")), min_size=2, max_size=9))
def test_what_one_record_says_makes_no_reason_of_its_own(facts):
    """Numbers, texts in quotes, and names of files, with their folders or without."""
    for template in (
        "has {number:,} images but no tags",
        "has {text!r} twice: remove one",
        "is no valid JSON: Expecting ',' delimiter: line 1 column {number} (char {number})",
        "data{sep}set_{number}{sep}{number}.png cannot be read, it is truncated: {number:#x} left",
        "{number}.jpg does not exist: relative paths start at the folder of the data file",
    ):
        reasons = [template.format(number=number, text=text, sep=sep) for number, text, sep in facts]
        assert [len(facts)] == list(counted(reasons).values()), reasons


@pytest.mark.parametrize("number", [MOST_REASONS - 1, MOST_REASONS, MOST_REASONS + 1, 5_000])
def test_reasons_without_end_take_bounded_memory(number):
    """Those beyond the bound count together; none is lost, and the most frequent come first."""
    counts = ReasonCounts()
    for index in range(number):
        letters = "".join(chr(ord("a") + int(digit)) for digit in str(index))
        counts.add(f"the beach {letters} does not exist" + " very long" * 1000)
        counts.add("is no text")

    shown = counts.most_common(20)

    assert 2 * number == counts.total == sum(shown.values())
    assert ("is no text", number) == next(iter(shown.items()))
    assert (21, OTHER_REASONS) == (len(shown), [*shown][-1])
    assert len(counts.most_common(10**9)) <= MOST_REASONS + 1
    assert max(map(len, counts.most_common(10**9))) <= 500
