"""Stores give back exactly what was saved, or say what is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from packplan.adapters import files as artefacts
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.core.align import align_plan
from packplan.core.checksum import plan_checksum
from packplan.core.epochs import EpochRecord
from packplan.core.errors import ConfigError, CorruptArtefactError, StaleError
from packplan.core.fingerprint import Fingerprint
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
    stored = store.resume(KEY, num_samples, data)
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


@pytest.fixture
def reopen_lengths(tmp_path):
    """Return a function that opens the same length store again, as a new process would."""
    return lambda: DiskLengthStore(tmp_path)


def test_lengths_come_back_row_by_row(reopen_lengths):
    """Whatever the flushes, to whoever resumes or inspects; nothing once they are discarded."""
    store = reopen_lengths()
    assert (None, []) == (store.inspect(), list(store.damage()))
    for first, end in ((0, 4), (4, 7), (7, 10)):
        assert first == len(taken(store))
        put(store, first, end, in_full=True, repeatability={"samples": [end]})

        again, lengths = reopen_lengths(), reopen_lengths().inspect()

        assert Origin(KEY, 10, end, DATA(end)) == lengths.origin
        assert ROWS[:end].tolist() == taken(again) == again.read(KEY, 10, DATA).table.tolist()
        assert (ROWS[:end].tolist(), IMAGES[:end].tolist()) == (
            lengths.rows.table.tolist(),
            lengths.rows.media.tolist(),
        )
        assert ROWS[:end, 0].tolist() == lengths.tokens.tolist()
        assert (True, {"samples": [end]}) == (lengths.rows.in_full, lengths.rows.repeatability)
        assert store.digest() == again.digest() == lengths.digest
        assert [] == list(again.damage())
        store = again

    store.discard()
    assert [] == taken(reopen_lengths())
    assert reopen_lengths().inspect() is None
    store.append(StoredRows(ROWS[2:5], IMAGES[2:5], in_full=True), DATA(3))
    assert ROWS[2:5].tolist() == reopen_lengths().resume(KEY, 10, DATA).table.tolist()


def test_a_probe_and_files_are_kept_until_rows_follow_them(reopen_lengths):
    """They speak of the rows they saw; nothing else changes with the files."""
    store = filled(reopen_lengths(), 4, repeatability={"samples": [3, 0]})
    files = (DataFile("a.jsonl", "a", "text", 3), DataFile("b.jsonl", "b", "text", 1))
    before = store.inspect()

    store.save_files(files)

    after = reopen_lengths().inspect()
    assert files == after.origin.files
    assert {"samples": [3, 0]} == after.rows.repeatability
    assert (before.digest, before.origin.data_digest) == (after.digest, after.origin.data_digest)

    store = reopen_lengths()
    taken(store)
    put(store, 4, 10)
    assert (None, ()) == (reopen_lengths().inspect().rows.repeatability, reopen_lengths().inspect().origin.files)
    put(store, 10, 10, repeatability={"samples": [9]})
    assert {"samples": [9]} == reopen_lengths().inspect().rows.repeatability


def test_lengths_stay_valid_while_the_data_they_were_measured_from_does(reopen_lengths):
    """Rows may be appended, and changed behind those; none before may change or go."""
    filled(reopen_lengths(), 5)

    assert 5 == len(taken(reopen_lengths(), 12, lambda n: DATA(n) if n <= 5 else "changed"))
    for num_samples, data in ((10, lambda n: f"other {n}"), (4, DATA)):
        with pytest.raises(StaleError, match="data"):
            taken(reopen_lengths(), num_samples, data)


def test_a_plan_comes_back_whole_under_its_key_only(tmp_path):
    """Equal in every field; inspected, with the world sizes of this plan alone."""
    store = DiskPlanStore(tmp_path)
    assert store.load(KEY) is store.inspect() is None
    for key, world_sizes in ((OTHER, [3, 1]), (KEY, [4, 2])):
        store.save(key, PLAN)
        for world_size in world_sizes:
            store.save_aligned(key, aligned(PLAN, world_size))

        assert StoredPlan(key, PLAN, tuple(sorted(world_sizes))) == store.inspect()
        assert [] == list(store.damage())
    assert PLAN == store.load(KEY)
    assert store.load(OTHER) is None


EPOCHS = tuple(
    EpochRecord(
        epoch=epoch, selection=f"{epoch}" * 64, checksum="c" * 64, num_samples=8, num_tokens=326, num_packs=5 + epoch,
        planned_samples=7, planned_tokens=246, fill=0.75, source_samples=(5, 3), source_tokens=[200, 126],
    )
    for epoch in range(3)
)  # fmt: skip


def test_records_of_epochs_come_back_under_the_key_of_their_plan(tmp_path):
    """Those of the most epochs, whatever the ranks; none under another key."""
    store = DiskPlanStore(tmp_path)
    store.save(KEY, PLAN)
    assert () == store.load_epochs(KEY) == store.inspect().epochs

    for world_size, records in ((2, EPOCHS[:2]), (3, EPOCHS)):
        packs = tuple(one.num_packs for one in records)
        store.save_epochs(KEY, records, plain_schedule(packs, world_size, num_train_epochs=len(records)))

    assert EPOCHS == store.load_epochs(KEY) == store.inspect().epochs
    assert () == store.load_epochs(Fingerprint({"lengths": "others"}))
    assert [] == list(store.damage())


@pytest.fixture
def whole(tmp_path):
    """A folder with lengths, a plan, two alignments of it, and epochs that begin with it."""
    filled(DiskLengthStore(tmp_path), 10, repeatability={"samples": [0, 9]})
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
    manifests = {path.name: json.loads(path.read_text()) for path in whole.glob("*.json")}
    named = {entry["file"] for entry in manifests["raw_plan.json"]["arrays"].values()}
    assert {"lengths.bin", "images.bin", *named, *manifests} == set(content(whole))
    assert {"lengths.json", "raw_plan.json", "plan_ws2.json", "plan_ws3.json", "schedule_ws2.json"} == set(manifests)
    schedule = manifests["schedule_ws2.json"]
    assert ([3, 3, 4], 10) == ([one["steps"] for one in schedule["epochs"]], schedule["total_steps"])
    assert 10 == manifests["lengths.json"]["samples"]["rows"]
    assert plan_checksum(PLAN.packs) == manifests["raw_plan.json"]["checksum"]
    told = {name: manifests["plan_ws2.json"][name] for name in ("repeated", "checksum", "num_aligned_packs")}
    two = aligned(PLAN, 2)
    assert {
        "repeated": list(two.repeated), "checksum": plan_checksum(two.packs), "num_aligned_packs": len(two.packs)
    } == told  # fmt: skip


def damaged_versions(path: Path, whole: bytes):
    """Yield a file with one bit changed all over it, cut short, and written in another layout."""
    for place in range(0, len(whole), 13):
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
            if not path.name.startswith(("plan_ws", "schedule_ws")):
                with pytest.raises(CorruptArtefactError):
                    DiskLengthStore(whole).resume(KEY, 10, DATA)
                    DiskPlanStore(whole).load(KEY)
        path.write_bytes(before)
    assert [] == damage(whole)
    assert (ROWS.tolist(), PLAN) == (taken(DiskLengthStore(whole)), DiskPlanStore(whole).load(KEY))


def test_rows_that_no_manifest_names_are_cut_off(tmp_path: Path):
    """A crash leaves bytes behind: readers leave them, and resuming measures them again."""
    filled(DiskLengthStore(tmp_path), 5)
    for name in ("lengths.bin", "images.bin"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"torn")
    before, store = content(tmp_path), DiskLengthStore(tmp_path)

    for stored in (store.read(KEY, 10, DATA), store.inspect().rows):
        assert ROWS[:5].tolist() == stored.table.tolist()
    assert before == content(tmp_path)
    assert ROWS[:5].tolist() == taken(store)
    put(store, 5, 10)
    assert ROWS.tolist() == taken(DiskLengthStore(tmp_path))


def test_a_run_that_maps_lengths_survives_their_being_measured_anew(whole):
    """Another job discards and writes the same files, which this one has mapped."""
    store = DiskLengthStore(whole)
    mapped = store.resume(KEY, 10, DATA)

    store.discard()
    put(store, 5, 6)

    assert (ROWS.tolist(), IMAGES.tolist()) == (mapped.table.tolist(), mapped.media.tolist())


@pytest.fixture
def two_runs(tmp_path):
    """Folders of two runs; the first one's is filled by its store."""
    folders = tmp_path / "one" / "train", tmp_path / "two" / "train"
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_another_runs_lengths_are_taken_over_once(two_runs):
    """Whole or partial, the same bytes; the other run is only read, and later not even that."""
    one, two = two_runs
    assert [] == taken(DiskLengthStore(two, lengths_from=one)), "which has none yet"
    other = filled(DiskLengthStore(one), 6)
    before = content(one)

    assert ROWS[:6].tolist() == taken(DiskLengthStore(two, lengths_from=one))
    assert before == content(one) == content(two)
    put(other, 6, 10, repeatability={"samples": [1]})
    assert ROWS[:6].tolist() == taken(DiskLengthStore(two, lengths_from=one))


def test_another_runs_lengths_have_to_fit(two_runs):
    """Other inputs are refused with both values, and a folder that is none."""
    one, two = two_runs
    filled(DiskLengthStore(one), 6)

    with pytest.raises(StaleError, match="a: stored 1, now 2") as raised:
        DiskLengthStore(two, lengths_from=one).resume(OTHER, 10, DATA)
    assert "borrowed_lengths" == raised.value.kind
    with pytest.raises(ConfigError, match=r"training.packing_lengths_from: has no folder"):
        taken(DiskLengthStore(two, lengths_from=one.parents[1] / "none" / "train"))


@pytest.mark.parametrize(
    ("name", "changed", "saved_as", "reason"),
    [
        ("lengths.json", {"schema": "packplan lengths 99"}, "lengths.json", "packplan lengths 99"),
        ("raw_plan.json", {"num_tokens": 1}, "raw_plan.json", "another num_tokens"),
        ("plan_ws2.json", {"pad_needed": 7}, "plan_ws2.json", "pad_needed"),
        ("schedule_ws2.json", {"epochs": [{"epoch": 0}]}, "schedule_ws2.json", "its records are no epochs"),
        ("plan_ws2.json", {}, "plan_ws4.json", "file name"),
        ("plan_ws2.json", {"world_size": 9, "dataloader_drop_last": True}, "plan_ws9.json", "cannot feed 9 ranks"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_the_rest_is_found(whole, name, changed, saved_as, reason):
    """Though its own digest is right."""
    manifest = json.loads((whole / name).read_text())
    del manifest["manifest_sha256"]
    artefacts.write_manifest(whole / saved_as, manifest | changed)

    (error,) = [*DiskLengthStore(whole).damage(), *DiskPlanStore(whole).damage()]
    assert reason in str(error)
