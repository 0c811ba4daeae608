"""Checksums and fingerprints change when, and only when, what they stand for changes."""

import hashlib
import json

import attrs
import numpy as np
from hypothesis import event, example, given
from hypothesis import strategies as st

from packplan.core.config.identity import config_length_inputs
from packplan.core.config.run import TemplateConfig
from packplan.core.errors import counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.packs import Packs, plan_checksum
from packplan.core.plan import build_raw_plan
from packplan.core.ports import Origin
from tests.laws.test_same_run import RUN
from tests.strategies import pack_lists

values = st.text(max_size=5) | st.integers(-9, 9) | st.booleans() | st.none()
inputs = st.dictionaries(st.sampled_from(["", "a", "b", "ä", '"']), values)


@given(pack_lists(), pack_lists())
def test_checksums_are_equal_exactly_for_equal_packs(one, other):
    assert plan_checksum(one) == plan_checksum(Packs.from_lists(one))
    assert (one == other) == (plan_checksum(one) == plan_checksum(other))


def test_the_checksum_is_the_digest_of_documented_bytes():
    """Built here by hand, as the docstring says."""
    by_hand = b"packplan packs 1\n"
    for array in ([0, 2, 3], [0, 4, 1]):
        by_hand += len(array).to_bytes(8, "little") + b"".join(n.to_bytes(8, "little") for n in array)

    assert hashlib.sha256(by_hand).hexdigest() == plan_checksum([[0, 4], [1]])


@example({"a": 1}, {"a": True})
@given(inputs, inputs)
def test_fingerprints_are_equal_exactly_for_equal_inputs(one, other):
    """True is not 1, the order of keys does not matter, and differences name keys and values."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    a, b = Fingerprint(one), Fingerprint(dict(reversed(other.items())))

    assert same == (a.digest == b.digest)
    changed = {d.key: [d.stored, d.current] for d in a.differences(b)}
    shared = {key: [one[key], other[key]] for key in one if key in other and repr(one[key]) != repr(other[key])}
    event(f"keys with two values: {len(shared)}")
    assert same == (not changed)
    assert shared.items() <= changed.items()
    assert changed.keys() - shared.keys() == one.keys() ^ other.keys()


def test_the_golden_plan():
    """A change of the packs must be meant (see ADR 0004); no process or hash seed changes them."""
    lengths = (np.arange(1, 1001) * 7919 % 1009 + 1).tolist()

    plan = build_raw_plan(lengths, packing_length=1000)

    assert "325c536d43a855584e3bcac86ea1ebab0f02ad281ddc4999d3460311bbf4469b" == plan_checksum(plan.packs)
    assert (507, 0) == (len(plan.packs), len(plan.dropped_packs))


@given(st.sampled_from([None, "left", "right", "raise"]), st.integers(1, 99), st.integers(1, 99))
def test_the_limit_decides_lengths_only_where_the_template_cuts(strategy, one, other):
    """`raise` truncates nothing, so the limit is no input of lengths then."""
    template = TemplateConfig(truncation_strategy=strategy, system="Look.")
    runs = [attrs.evolve(RUN, template=attrs.evolve(template, max_length=length)) for length in (one, other)]
    inputs, cuts = [config_length_inputs(run) for run in runs], strategy in {"left", "right"}

    assert (inputs[0] == inputs[1]) == (one == other or not cuts)
    assert "Look." == inputs[0]["template.system"]
    assert (strategy if cuts else None) == inputs[0]["template.truncation_strategy"]


@given(st.integers(0, 5), st.integers(0, 8), st.booleans(), st.booleans())
def test_an_origin_differs_in_its_key_its_rows_or_their_data(measured, now, same_key, same_data):
    """Fewer rows than were measured, or other ones; rows behind them are no difference."""
    origin = Origin(Fingerprint({"a": 1}), 5, measured, f"{measured} rows")
    found = origin.differences(
        Fingerprint({"a": 1 if same_key else 2}), now, lambda count: f"{count} rows" if same_data else "others"
    )

    keys = [] if same_key else ["a"]
    if now < measured:
        keys.append("data (number of records)")
    elif not same_data:
        keys.append(f"data (digest of the first {counted(measured, 'record')})")
    assert keys == [difference.key for difference in found]
