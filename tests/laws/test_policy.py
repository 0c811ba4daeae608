"""A plan policy is checked when it is made; all fields that change packs are fingerprinted."""

import math
from decimal import Decimal

import attrs
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.errors import ArgumentError
from packplan.core.packers import ALGORITHMS
from packplan.core.plan import build_raw_plan
from packplan.core.policy import Part, PlanPolicy
from packplan.core.work.model import WorkModel
from tests.strategies import raw_lengths

FIXED = PlanPolicy(packing_length=80, seed=42)

POLICIES = {
    "fixed": FIXED, "kept": attrs.evolve(FIXED, drop_last=False), "redrawn": attrs.evolve(FIXED, replanned=True),
    "drawn": attrs.evolve(FIXED, algorithm="first_fit_shuffle"),
    "weighed": attrs.evolve(FIXED, algorithm="balanced"), "alone": attrs.evolve(FIXED, packing=False),
}  # fmt: skip

PACKED = {*POLICIES} - {"alone"}

DECIDES = {
    "packing_length": (81, {*POLICIES}), "packing": (None, {*POLICIES}), "allow_single_long": (None, {*POLICIES}),
    "algorithm": ("certified", PACKED), "drop_last": (None, PACKED), "replanned": (None, PACKED),
    "min_fill_ratio": ("0.6", PACKED - {"kept"}), "seed": (7, {"drawn", "redrawn"}),
    "work": (WorkModel(per_position=5, per_pair=3), {"weighed"}),
    "max_images": (9, PACKED), "part": (Part(val_share="0.1", seed=3, held_out=True), {*POLICIES}),
    "max_dropped_share": ("0.5", set()), "refuse_longer": (None, set()),
}  # fmt: skip
"""Field -> another value of it (None: the opposite), and the policies whose packs it decides."""


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(PlanPolicy)])
def test_a_field_enters_the_fingerprint_exactly_where_it_decides_packs(name):
    """Where it does not, packs are the same."""
    assert name in DECIDES, "write it into PlanPolicy.fingerprint, and into DECIDES here"
    value, deciding = DECIDES[name]
    lengths = [82, 40, 7, 3, 39, 41, 60, 20, *[45] * 60, *(one % 37 + 2 for one in range(11, 4000, 97))]

    def packs(policy):
        ratio = policy.min_fill_ratio if name == "min_fill_ratio" else "0.6"
        return build_raw_plan(lengths, policy, epoch=1, min_fill_ratio=ratio, images=[1] * len(lengths)).packs

    changed = set()
    for kind, policy in POLICIES.items():
        other = attrs.evolve(policy, **{name: not getattr(policy, name) if value is None else value})
        assert (kind in deciding) == (other.fingerprint("d") != policy.fingerprint("d")), kind
        assert policy.fingerprint("e") != policy.fingerprint("d")
        changed |= {kind} if packs(policy) != packs(other) else set()
    assert changed <= deciding
    assert bool(changed) == bool(deciding) or name in {"work", "part"}, "build_raw_plan does not obey the field"


def test_stored_plans_are_found_again():
    """A changed fingerprint plans all data again: raise an algorithm's version, or keep it."""
    fewer = {"alone, none long": attrs.evolve(FIXED, packing=False, allow_single_long=False)}

    found = {kind: policy.fingerprint("d").digest[:8] for kind, policy in (POLICIES | fewer).items()}

    assert found == {
        "fixed": "fa534e61", "kept": "d602e9e4", "redrawn": "1b026678", "drawn": "948f8428",
        "weighed": "ae51d2e3", "alone": "d5b8f7cc", "alone, none long": "78a5e987",
    }  # fmt: skip


@given(st.integers(1, 200), st.decimals("0.01", "0.99", places=2), st.integers(0, 99))
def test_a_share_of_the_records_is_held_out_and_the_others_are_trained(num, share, seed):
    """Rounded down, but at least one; another seed draws others; every record is in one part."""
    held_out, trained = (Part(val_share=str(share), seed=seed, held_out=part).selects(num) for part in (True, False))

    assert max(math.floor(share * num), 1) == held_out.sum()
    assert (held_out != trained).all()
    seeds = {tuple(Part(val_share="0.5", seed=one, held_out=True).selects(40)) for one in range(9)}
    assert 9 == len(seeds)


def test_every_algorithm_has_its_own_fingerprint():
    """By name and version; that of `certified` says which solver it was planned with."""
    fingerprints = [attrs.evolve(FIXED, algorithm=name).fingerprint("d") for name in ALGORITHMS]

    assert len(ALGORITHMS) == len({fingerprint.digest for fingerprint in fingerprints})
    assert fingerprints[-1].inputs["algorithm"].endswith(f", scipy {scipy.__version__}")


@given(raw_lengths(), st.decimals(0, 1, places=2), st.booleans(), st.sampled_from(list(ALGORITHMS)))
def test_a_policy_plans_what_its_fields_by_keyword_plan(case, ratio, allow, algorithm):
    """A ratio is the same decimal as a number, a text or a Decimal."""
    lengths, packing_length = case
    lengths = [*lengths, packing_length, packing_length - 1]  # which fills at least half of a pack
    fields = {"allow_single_long": allow, "algorithm": algorithm, "drop_last": ratio < Decimal("0.5")}
    policy = PlanPolicy(packing_length=packing_length, min_fill_ratio=str(ratio), **fields)

    whole = build_raw_plan(lengths, policy, quick_bound=True)

    fields |= {"packing_length": packing_length, "quick_bound": True}
    assert whole == build_raw_plan(lengths, min_fill_ratio=float(ratio), **fields)
    assert whole == build_raw_plan(lengths, attrs.evolve(policy, packing_length=9), **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [("packing_length", 0), ("packing_length", 1.5), ("packing_length", True), ("algorithm", "first_fit"), ("seed", -1),
     ("seed", 2**64), ("seed", True),
     ("max_images", 0), ("max_images", 1.5), *((name, value) for name in ("min_fill_ratio", "max_dropped_share")
     for value in ("-0.1", 1.1, "NaN", "Infinity", "half", Decimal("1.01")))],
)  # fmt: skip
def test_a_field_without_meaning_is_refused_where_the_policy_is_made(name, value):
    """By its name, also if nothing would come to use it."""
    with pytest.raises(ValueError, match=f"{name} is "):
        PlanPolicy(**{"packing_length": 80, "drop_last": False, "packing": False, name: value})


@pytest.mark.parametrize(
    ("fields", "named"), [({"packing_length": 1, "min_fill": 1}, "min_fill"), ({}, "packing_length")]
)
def test_a_misspelt_or_missing_field_is_refused(fields, named):
    with pytest.raises((TypeError, ArgumentError), match=named):
        build_raw_plan([1], **fields)
