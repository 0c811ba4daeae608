"""A plan policy is checked when it is made; all fields that change packs are fingerprinted."""

from decimal import Decimal

import attrs
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.packers import ALGORITHMS
from packplan.core.plan import build_raw_plan
from packplan.core.policy import PlanPolicy
from packplan.core.work.model import WorkModel
from tests.strategies import raw_lengths

POLICY = PlanPolicy(packing_length=80, algorithm="first_fit_shuffle", seed=42)
"""The algorithm draws, so that every field that decides packs does, but for the work."""

WEIGHED = attrs.evolve(POLICY, algorithm="balanced")

OTHERS = {
    "packing_length": 81,
    "packing": False,
    "algorithm": "certified",
    "min_fill_ratio": "0.6",
    "drop_last": False,
    "allow_single_long": False,
    "seed": 7,
    "replanned": True,
    "work": WorkModel(per_position=5, per_pair=3),
}

UNPACKED = {"packing", "packing_length", "allow_single_long"}
"""Fields that decide a plan without packing too."""

ACCEPTANCE = {"max_dropped_share": "0.5", "refuse_longer": True}
"""They decide whether a plan is trained, not which one it is."""


def test_every_field_is_known_to_decide_packs_or_not_to():
    """A new one has to be told here, and in the fingerprint."""
    untold = {field.name for field in attrs.fields(PlanPolicy)} ^ {*OTHERS, *ACCEPTANCE}
    assert not untold, "write it into PlanPolicy.fingerprint, and into OTHERS or ACCEPTANCE here"


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_every_field_that_decides_packs_enters_the_fingerprint(name, value):
    """Changing one changes the digest; so do other lengths."""
    policy = WEIGHED if name == "work" else POLICY
    assert attrs.evolve(policy, **{name: value}).fingerprint("d") != policy.fingerprint("d")
    assert POLICY.fingerprint("e") != POLICY.fingerprint("d")


@pytest.mark.parametrize("name", sorted(UNPACKED - {"packing"}))
def test_without_packing_too_what_decides_a_plan_enters_the_fingerprint(name):
    """Else a stored plan would be taken for one that leaves long samples out."""
    policy = attrs.evolve(POLICY, packing=False)

    assert attrs.evolve(policy, **{name: OTHERS[name]}).fingerprint("d") != policy.fingerprint("d")


@pytest.mark.parametrize(("name", "value"), ACCEPTANCE.items())
def test_what_only_refuses_plans_stays_out_of_the_fingerprint(name, value):
    """A stored plan is used again; neither are there other packs."""
    other = attrs.evolve(POLICY, **{name: value})

    assert POLICY.fingerprint("d") == other.fingerprint("d")
    assert build_raw_plan([80, 40, 7, 3], POLICY).packs == build_raw_plan([80, 40, 7, 3], other).packs


def test_a_field_without_effect_stays_out_of_the_fingerprint():
    """For example, the ratio where nothing is dropped, or the seed where nothing is drawn."""
    for fixed, name in (
        ({"drop_last": False}, "min_fill_ratio"),
        ({"algorithm": "constant_volume"}, "seed"),
        ({"algorithm": "certified"}, "work"),
        *(({"algorithm": "constant_volume", "packing": False}, name) for name in OTHERS if name not in UNPACKED),
    ):
        policy = attrs.evolve(POLICY, **fixed)
        assert attrs.evolve(policy, **{name: OTHERS[name]}).fingerprint("d") == policy.fingerprint("d"), name


def test_every_algorithm_has_its_own_fingerprint():
    """By name and version; that of `certified` says which solver it was planned with."""
    fingerprints = [attrs.evolve(POLICY, algorithm=name).fingerprint("d") for name in ALGORITHMS]

    assert len(ALGORITHMS) == len({fingerprint.digest for fingerprint in fingerprints})
    assert fingerprints[-1].inputs["algorithm"].endswith(f", scipy {scipy.__version__}")


@given(raw_lengths(), st.decimals(0, 1, places=2), st.booleans(), st.sampled_from(list(ALGORITHMS)))
def test_a_policy_plans_what_its_fields_by_keyword_plan(case, ratio, allow, algorithm):
    """A ratio is the same decimal as a number, a text or a Decimal."""
    lengths, packing_length = case
    lengths = [*lengths, packing_length, max(1, packing_length - 1)]
    fields = {"allow_single_long": allow, "algorithm": algorithm, "drop_last": ratio < Decimal("0.5")}
    policy = PlanPolicy(packing_length=packing_length, min_fill_ratio=str(ratio), **fields)
    if packing_length == 1:
        policy = attrs.evolve(policy, allow_single_long=True)
        fields["allow_single_long"] = True
    elif ratio > Decimal(packing_length - 1) / packing_length:
        policy, fields["drop_last"] = attrs.evolve(policy, drop_last=False), False

    whole = build_raw_plan(lengths, policy, quick_bound=True)

    keywords = {"packing_length": packing_length, "min_fill_ratio": float(ratio), "quick_bound": True, **fields}
    assert whole == build_raw_plan(lengths, **keywords)
    assert whole == build_raw_plan(
        lengths, attrs.evolve(policy, packing_length=9), packing_length=packing_length, quick_bound=True
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("packing_length", 0), ("packing_length", 1.5), ("packing_length", True), ("algorithm", "first_fit"), ("seed", -1),
     ("seed", 2**64), ("seed", True), *((name, value) for name in ("min_fill_ratio", "max_dropped_share")
     for value in ("-0.1", 1.1, "NaN", "Infinity", "half", Decimal("1.01")))],
)  # fmt: skip
def test_a_field_without_meaning_is_refused_where_the_policy_is_made(name, value):
    """By its name, also if nothing would come to use it."""
    with pytest.raises(ValueError, match=f"{name} is "):
        PlanPolicy(**{"packing_length": 80, "drop_last": False, "packing": False, name: value})


def test_a_field_that_is_none_is_refused():
    """A misspelt keyword is not passed over; a plan needs its packing length."""
    with pytest.raises(TypeError, match="min_fill"):
        build_raw_plan([1], packing_length=1, min_fill=1)
    with pytest.raises(TypeError, match="packing_length"):
        build_raw_plan([1])
