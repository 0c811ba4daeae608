"""Verifying over doubles and stores: everything planted is found, all at once, and nothing else."""

import attrs
import pytest

from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.plan.verify import verify
from packplan.core.config.remedies import MEASURE_AGAIN
from packplan.core.errors import ArgumentError, Difference, NotBuiltError, StaleError
from packplan.core.packs import Packs
from packplan.core.plan import build_raw_plan
from tests.fakes import UNSTEADY, ListSource, OddSource
from tests.flows.desk import LENGTHS, Desk, masked, policy


@pytest.fixture
def built(tmp_path):
    """Return the folder of a split that was built from `LENGTHS`."""
    desk_in(tmp_path, ListSource(LENGTHS)).plan()
    return tmp_path


def desk_in(folder, source) -> Desk:
    return Desk(source, lengths=DiskLengthStore(folder), plans=DiskPlanStore(folder))


def found(folder, source, *, num_samples=8, decode=False, **changes) -> list[str]:
    split = desk_in(folder, source).split(**changes)
    return [str(one) for one in verify(split, num_samples=num_samples, decode=decode)]


copied = ListSource(LENGTHS)
copied.faulty_copies = [("a.gz", "line 3 of its copy is another one"), ("b.parquet", "x")]


def test_what_is_whole_has_no_findings(built):
    """Nothing is measured, unless asked for; then so many, the first and the last among them."""
    source = ListSource(LENGTHS)

    assert [] == found(built, source, num_samples=0)
    assert [] == source.measured
    assert [] == found(built, source, num_samples=3)
    assert [0, 4, 7] == source.measured
    assert [] == found(built, source, num_samples=99, decode=True)
    desk_in(built, source).plan(packing=False)
    assert [] == found(built, source, packing=False)


@pytest.mark.parametrize(
    ("source", "changes", "expected"),
    [
        (copied, {}, ["copies: a.gz: line 3 of its copy is another one", "copies: b.parquet: x"]),
        (ListSource(LENGTHS), {"min_fill_ratio": "0.9"},
         ["plan: min_fill_ratio: planned with '0.65', now '0.9': packplan plan build plans again"]),
        (ListSource([*LENGTHS, 9]), {}, ["8 of 9 records are measured"]),
        (ListSource(LENGTHS[:5]), {}, ["data (number of records): measured with 8, now 5; restore it, or"]),
        (ListSource([*LENGTHS[:2], 51, 31, *LENGTHS[4:]]), {},
         ["51,': 2 of 8 records are new or changed, the first is data, line 3; restore it, or",
          *[f"images: image 0 of sample {index}: has changed" for index in (2, 3)],
          *[f"samples: sample {index}: has other measurements" for index in (2, 3)]]),
        (ListSource([999, *LENGTHS]), {}, [": 1 of 8 records is new or changed, the first is data, line 1"]),
        (ListSource(LENGTHS[2:]), {}, ["measured with 8, now 6: records were moved or removed; restore it, or"]),
        (ListSource(LENGTHS), {"packing_length": 50, "refuse_longer": True},
         ["plan: packing_length: ", "training refuses the data: sample"]),
    ],
    ids=["copies", "policy", "grown", "shrunk", "edited", "inserted", "first removed", "too long"],
)  # fmt: skip
def test_what_changed_since_is_found(built, source, changes, expected):
    """Each copy and input by name; a record that came in before others is one finding."""
    findings = found(built, source, **changes)

    assert len(expected) == len(findings)
    assert all(words in one for words, one in zip(expected, findings, strict=True)), findings


def test_samples_and_images_that_changed_or_cannot_be_read_hide_no_other_fault(built):
    """With the own reason, where images are compared and where samples are encoded again."""
    source = ListSource(LENGTHS)
    edited = StaleError.for_sample(3, "data, line 4", (Difference("content", "ad", "8b"),))
    source.errors = {2: source.error(2, "cannot be measured"), 3: edited}
    source.media_errors = {3: edited, 5: source.error(5, "the image is gone")}
    source.widths = {6: 99}
    facts = source.media_facts
    source.media_facts = lambda index, **_: facts(index) * (2 if index == 7 else 1)

    changed, gone, image, two, unread, again = found(built, source)

    for finding, kind in ((changed, "images"), (again, "samples")):
        assert finding.startswith(f"{kind}: sample 3")
        assert "content was 'ad', now '8b'" in finding
    assert image.startswith("images: image 0 of sample 6")
    assert [
        "images: sample 5: data, line 6: the image is gone",
        f"images: sample 7: measured with 1 image, now 2; {MEASURE_AGAIN}",
        "samples: sample 2: data, line 3: cannot be measured",
    ] == [gone, two, unread]


def test_nothing_to_verify_is_no_success(tmp_path):
    """The user has to build first."""
    with pytest.raises(NotBuiltError, match="holds no lengths"):
        found(tmp_path, ListSource(LENGTHS))


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("lengths.bin", b"\1", ["artefacts", "inputs"]),  # the manifest says what they were measured from
        ("lengths.json", b"{}", ["artefacts"]),
        ("plan_ws1.json", b"{}", ["artefacts", "inputs"]),  # and no word of a plan that were missing
        ("raw_plan.json", None, ["inputs", "plan"]),
    ],
)
def test_damage_hides_no_other_input(built, file, content, expected):
    """What is damaged is named once, and compared with nothing."""
    if content is None:
        (built / file).unlink()
    else:
        (built / file).write_bytes(content)

    assert expected == [one.split(":")[0] for one in found(built, ListSource(LENGTHS, name="other"))]


def test_another_plan_under_the_same_name_is_found(tmp_path):
    """Though every digest is right, or copied from a run of other samples."""
    one, other = (tmp_path / name for name in ("one", "other"))
    for folder, lengths in ((one, [40] * 8), (other, [40] * 7 + [9])):
        folder.mkdir()
        desk_in(folder, ListSource(lengths)).plan()
    plans = DiskPlanStore(one)
    key, plan = policy().fingerprint(DiskLengthStore(one).inspect().digest), plans.inspect().plan
    counts = build_raw_plan([40] * 7 + [39], packing_length=80)
    for wrong in (counts, attrs.evolve(plan, packs=Packs.from_lists([[0, 3], [1, 2], [4, 5], [6, 7]]))):
        assert wrong != plan
        plans.save(key, wrong)
        findings = found(one, ListSource([40] * 8))
        assert any("the stored plan differs from a new plan" in finding for finding in findings)

    for path in other.glob("raw_plan*"):
        (one / path.name).write_bytes(path.read_bytes())
    assert any(finding.startswith("plan: lengths: planned with ") for finding in found(one, ListSource([40] * 8)))


def test_samples_that_measure_otherwise_each_time_are_findings(built):
    findings = found(built, OddSource(LENGTHS, UNSTEADY["each call"]))
    assert ["samples"] * 8 == [one.split(":")[0] for one in findings]


def test_a_plan_that_training_refuses_is_a_finding(tmp_path):
    """It was built under another share, or has nothing to learn."""
    source = ListSource([60] * 6 + [40, 40, 80])
    desk_in(tmp_path, source).plan(min_fill_ratio="0.8", max_dropped_share="1")

    assert [] == found(tmp_path, source, min_fill_ratio="0.8", max_dropped_share="1")
    (finding,) = found(tmp_path, source, min_fill_ratio="0.8")
    assert "training refuses the plan: 6 of 9 samples" in finding

    (folder := tmp_path / "masked").mkdir()
    with pytest.raises(ArgumentError, match="supervised"):
        desk_in(folder, masked(range(8))).plan(drop_last=False)
    (finding,) = found(folder, masked(range(8)), drop_last=False)
    assert "training refuses the plan: none of 8 planned samples has a supervised token" in finding
