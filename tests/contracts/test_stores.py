"""Stores give back exactly what was saved, or say what is wrong."""

import json
from pathlib import Path

import attrs
import numpy as np
import pytest

from packplan.adapters import files as artefacts
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.opening.stores import write_new_file
from packplan.core.align import align_plan
from packplan.core.epochs import EpochRecord
from packplan.core.errors import ConfigError, CorruptArtefactError, StaleError
from packplan.core.fingerprint import Fingerprint
from packplan.core.packs import plan_checksum
from packplan.core.plan import build_raw_plan
from packplan.core.ports import Origin, StoredPlan, StoredRows
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, DataFile
from tests.strategies import plain_schedule

KEY, OTHER = Fingerprint({"a": 1, "b": None}), Fingerprint({"a": 2, "b": None})


def DATA(count: int) -> str:  # noqa: N802  # a constant of these tests
    """Digest data that never changes."""
    return f"first {count}"


ROWS = np.arange(10 * len(COLUMNS), dtype=np.int32).reshape(10, -1)

IMAGES = np.arange(10 * len(MEDIA_COLUMNS), dtype=np.int64).reshape(10, -1)

PLAN = build_raw_plan([80, 60, 20, 50, 31, 40, 40, 5], packing_length=80, allow_single_long=False)


def put(store, first: int, end: int, **options) -> None:
    """Append some rows, with an image each."""
    store.append(StoredRows(ROWS[first:end], IMAGES[first:end], **options), DATA(end))


def taken(store, num_samples: int = 10, data=DATA) -> list[list[int]]:
    """Return the rows that a store resumes with; their images have to be theirs."""
    stored = store.open_for_append(KEY, num_samples, data)
    assert stored.media.tolist() == IMAGES[: len(stored.table)].tolist()
    return stored.table.tolist()


def filled(store, end: int, **options):
    """Return a store with the first rows."""
    assert [] == taken(store)
    put(store, 0, end, **options)
    return store


def aligned(plan, world_size: int):
    """Align a plan."""
    return align_plan(plan, world_size=world_size, dataloader_drop_last=False)


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_lengths_come_back_row_by_row(tmp_path):
    """Whatever the flushes, to whoever resumes or inspects; nothing once they are discarded."""
    store = DiskLengthStore(tmp_path)
    assert (None, []) == (store.inspect(), list(store.damage()))
    for first, end in ((0, 4), (4, 7), (7, 10)):
        assert first == len(taken(store))
        put(store, first, end, in_full=True, repeatability={"samples": [end]})

        again, lengths = DiskLengthStore(tmp_path), DiskLengthStore(tmp_path).inspect()

        assert Origin(KEY, 10, end, DATA(end)) == lengths.origin
        assert ROWS[:end].tolist() == taken(again) == again.read(KEY, 10, DATA).table.tolist()
        assert ROWS[:end].tolist() == lengths.rows.table.tolist()
        assert IMAGES[:end].tolist() == lengths.rows.media.tolist()
        assert ROWS[:end, 0].tolist() == lengths.tokens.tolist()
        assert (True, {"samples": [end]}) == (lengths.rows.in_full, lengths.rows.repeatability)
        assert store.digest() == again.digest() == lengths.digest
        assert [] == list(again.damage())
        store = again

    store.discard()
    assert ([], None) == (taken(DiskLengthStore(tmp_path)), DiskLengthStore(tmp_path).inspect())
    store.append(StoredRows(ROWS[2:5], IMAGES[2:5], in_full=True), DATA(3))
    assert ROWS[2:5].tolist() == DiskLengthStore(tmp_path).open_for_append(KEY, 10, DATA).table.tolist()


def test_a_probe_and_files_are_kept_until_rows_follow_them(tmp_path):
    """They speak of the rows they saw; nothing else changes with the files."""

    def kept():
        held = DiskLengthStore(tmp_path).inspect()
        return held.rows.repeatability, held.origin.files, held.digest, held.origin.data_digest

    store = filled(DiskLengthStore(tmp_path), 4, repeatability={"samples": [3, 0]})
    files = (DataFile("a.jsonl", "a", "text", 3), DataFile("b.jsonl", "b", "text", 1))
    before = kept()
    store.save_file_descriptions(files)
    assert ({"samples": [3, 0]}, files, *before[2:]) == kept()

    store = DiskLengthStore(tmp_path)
    taken(store)
    put(store, 4, 10)
    assert (None, ()) == kept()[:2]
    put(store, 10, 10, repeatability={"samples": [9]})
    assert {"samples": [9]} == kept()[0]


def test_lengths_stay_valid_while_the_data_they_were_measured_from_does(tmp_path):
    """Rows may be appended, and changed behind those; none before may change or go."""
    filled(DiskLengthStore(tmp_path), 5)

    assert 5 == len(taken(DiskLengthStore(tmp_path), 12, lambda n: DATA(n) if n <= 5 else "changed"))
    for num_samples, data in ((10, lambda n: f"other {n}"), (4, DATA)):
        with pytest.raises(StaleError, match="data"):
            taken(DiskLengthStore(tmp_path), num_samples, data)


EPOCHS = tuple(
    EpochRecord(
        epoch=epoch, selection=f"{epoch}" * 64, checksum="c" * 64, num_samples=8, num_tokens=326, num_packs=5 + epoch,
        planned_samples=7, planned_tokens=246, fill=0.75, source_samples=(5, 3), source_tokens=[200, 126],
    )
    for epoch in range(3)
)  # fmt: skip


def test_a_plan_and_its_epochs_come_back_whole_under_its_key_only(tmp_path):
    """Inspected, with the world sizes of this plan alone; the records of the most epochs."""
    store = DiskPlanStore(tmp_path)
    assert store.load(KEY) is store.inspect() is None
    for key, world_sizes in ((OTHER, [3, 1]), (KEY, [4, 2])):
        store.save(key, PLAN)
        for world_size in world_sizes:
            store.save_aligned(key, aligned(PLAN, world_size))

        assert StoredPlan(key, PLAN, tuple(sorted(world_sizes))) == store.inspect()
        assert [] == list(store.damage())
    assert (PLAN, None) == (store.load(KEY), store.load(OTHER))

    assert () == store.load_epochs(KEY) == store.inspect().epochs
    for world_size, records in ((2, EPOCHS[:2]), (3, EPOCHS)):
        packs = tuple(one.num_packs for one in records)
        store.save_epochs(KEY, records, plain_schedule(packs, world_size, num_train_epochs=len(records)))
    assert EPOCHS == store.load_epochs(KEY) == store.inspect().epochs
    assert ((), []) == (store.load_epochs(OTHER), list(store.damage()))


@pytest.fixture
def whole(tmp_path):
    """A folder with lengths, a plan, two alignments of it, and epochs that begin with it."""
    filled(DiskLengthStore(tmp_path), 10, repeatability={"samples": [0, 9]}).save_record_heads(lambda: np.arange(10))
    plans = DiskPlanStore(tmp_path)
    plans.save(KEY, PLAN)
    for world_size in (3, 2):
        plans.save_aligned(KEY, aligned(PLAN, world_size))
    plans.save_epochs(KEY, EPOCHS, plain_schedule((5, 6, 7), 2, num_train_epochs=3))
    return tmp_path


def damage(folder) -> list[str]:
    """Return the names of the files that are found damaged."""
    found = [*DiskLengthStore(folder).damage(), *DiskPlanStore(folder).damage()]
    return [Path(error.path).name for error in found]


def test_the_disk_holds_small_readable_manifests_and_nothing_else(whole):
    """Counts and checksums to read; every file is named by a manifest; a look leaves them so."""
    DiskPlanStore(whole).inspect()
    held = {path.stem: json.loads(path.read_text()) for path in whole.glob("*.json")}
    raw, of_two, schedule = (held[name] for name in ("raw_plan", "plan_ws2", "schedule_ws2"))
    named = {
        "lengths.bin", "images.bin", "record_heads.bin", "plan_ws3.json",
        *(entry["file"] for entry in raw["arrays"].values()),
    }  # fmt: skip
    assert {*named, *(f"{name}.json" for name in held)} == set(content(whole))
    assert ([3, 3, 4], 10) == ([one["steps"] for one in schedule["epochs"]], schedule["total_steps"])
    assert (10, plan_checksum(PLAN.packs)) == (held["lengths"]["samples"]["rows"], raw["checksum"])
    told, two = [of_two[name] for name in ("repeated", "checksum", "num_aligned_packs")], aligned(PLAN, 2)
    assert [list(two.repeated), plan_checksum(two.packs), len(two.packs)] == told


def test_packs_that_ranks_share_are_aligned_in_slots(tmp_path):
    """The manifest has the ranks of each long pack, from which its content is derived again."""
    plans = DiskPlanStore(tmp_path)
    plans.save(KEY, PLAN)
    degrees = np.ones(len(PLAN.packs), dtype=np.int64)
    degrees[1] = 8
    shared = align_plan(PLAN, world_size=4, degrees=degrees)

    plans.save_aligned(KEY, shared)

    assert (4, -(len(PLAN.packs) + 3) % 4) == (shared.max_degree, shared.pad_needed)
    assert ([], (4,)) == (list(plans.damage()), plans.inspect().world_sizes)
    for max_degree in (2, 3):
        plans.save_aligned(KEY, attrs.evolve(shared, max_degree=max_degree))
        (error,) = plans.damage()
        assert ("plan_ws4.json", False) == (Path(error.path).name, "training." in str(error))


def damaged_versions(path: Path, whole: bytes):
    """Yield a file with one bit changed all over it, cut short, and written in another layout."""
    for place in range(0, len(whole), 29):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8  # every bit of a byte in turn
        yield bytes(flipped)
    yield from (whole[:cut] for cut in (-2, 0) if whole)
    if path.name.startswith("raw_plan."):  # a crash may leave bytes behind the rows of lengths alone
        yield whole + b"\0"
    if path.suffix == ".json":
        yield json.dumps(json.loads(whole), indent=1).encode()  # its digest is of the values alone


@pytest.mark.slow
def test_any_damage_of_any_artefact_is_found(whole):
    """That file is named, what is whole is not, and no store reads it."""
    assert [] == damage(whole)
    for path in sorted(whole.iterdir()):
        before = path.read_bytes()
        for number, version in enumerate(damaged_versions(path, before)):
            path.write_bytes(version)
            assert path.name in damage(whole), f"{path.name}, version {number}"
            if not path.name.startswith(("plan_ws", "schedule_ws", "record_heads")):
                with pytest.raises(CorruptArtefactError):
                    DiskLengthStore(whole).open_for_append(KEY, 10, DATA)
                    DiskPlanStore(whole).load(KEY)
        path.write_bytes(before)
    assert [] == damage(whole)
    (whole / "record_heads.bin").unlink()
    (error,) = DiskLengthStore(whole).damage()
    assert "it is missing; packplan plan build writes this file again" in str(error)
    DiskLengthStore(whole).save_record_heads(lambda: np.arange(10))
    assert [] == damage(whole)
    assert (ROWS.tolist(), PLAN) == (taken(DiskLengthStore(whole)), DiskPlanStore(whole).load(KEY))


def test_a_run_that_maps_lengths_survives_their_being_measured_anew(whole):
    """Another job discards and writes the same files, which this one has mapped."""
    store = DiskLengthStore(whole)
    mapped = store.open_for_append(KEY, 10, DATA)

    store.discard()
    put(store, 5, 6)

    assert (ROWS.tolist(), IMAGES.tolist()) == (mapped.table.tolist(), mapped.media.tolist())


def test_another_runs_lengths_are_taken_over_once_if_they_fit(tmp_path):
    """Whole or partial, the same bytes; the other run is only read, and later not even that."""
    one, two, three = (tmp_path / name / "train" for name in ("one", "two", "three"))
    for folder in (one, two, three):
        folder.mkdir(parents=True)
    assert [] == taken(DiskLengthStore(two, lengths_from=one)), "which has none yet"
    other = filled(DiskLengthStore(one), 6)
    before = content(one)

    assert ROWS[:6].tolist() == taken(DiskLengthStore(two, lengths_from=one))
    assert before == content(one) == content(two)
    put(other, 6, 10, repeatability={"samples": [1]})
    assert ROWS[:6].tolist() == taken(DiskLengthStore(two, lengths_from=one))

    with pytest.raises(StaleError, match="a was 1, now 2") as raised:
        DiskLengthStore(three, lengths_from=one).open_for_append(OTHER, 10, DATA)
    assert "borrowed_lengths" == raised.value.kind
    with pytest.raises(ConfigError, match=r"training.packing_lengths_from is .*, which does not exist"):
        taken(DiskLengthStore(three, lengths_from=tmp_path / "none" / "train"))


@pytest.mark.parametrize(
    ("name", "changed", "saved_as", "reason"),
    [
        ("lengths.json", {"schema": "packplan lengths 99"}, "lengths.json", "packplan lengths 99"),
        ("raw_plan.json", {"num_tokens": 1}, "raw_plan.json", "contradict its num_tokens"),
        ("plan_ws2.json", {"pad_needed": 7}, "plan_ws2.json", "pad_needed"),
        ("schedule_ws2.json", {"epochs": [{"epoch": 0}]}, "schedule_ws2.json", "its records do not describe epochs"),
        ("plan_ws2.json", {}, "plan_ws4.json", "file name"),
        ("plan_ws2.json", {"world_size": 9, "dataloader_drop_last": True}, "plan_ws9.json", "cannot fill 9 ranks"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_the_rest_is_found(whole, name, changed, saved_as, reason):
    """Though its own digest is right."""
    manifest = json.loads((whole / name).read_text())
    del manifest["manifest_sha256"]
    artefacts.write_manifest(whole / saved_as, manifest | changed)

    (error,) = [*DiskLengthStore(whole).damage(), *DiskPlanStore(whole).damage()]
    assert reason in str(error)


def test_a_new_file_replaces_no_other(tmp_path):
    """The same content may be written again."""
    for _ in range(2):
        write_new_file(path := tmp_path / "a.py", "one")
    (binary := tmp_path / "b.py").write_bytes(b"\xff")
    for there, text in ((path, "two"), (binary, "one"), (tmp_path, "one")):
        with pytest.raises(ConfigError, match="--output"):
            write_new_file(there, text)
    assert "one" == path.read_text()
