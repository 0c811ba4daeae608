"""Stores give back exactly what was saved, or say what is wrong; on disk, in memory alike."""

from __future__ import annotations

import errno
import json
import os
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from packplan.adapters.stores import lock
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.lock import FolderLock
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.core.align import align_plan
from packplan.core.checksum import plan_checksum
from packplan.core.errors import ConfigError, CorruptArtefactError, OutputError, StaleError
from packplan.core.fingerprint import Fingerprint
from packplan.core.plan import build_raw_plan
from packplan.core.ports import Origin, StoredPlan
from packplan.core.samples import COLUMNS, MEDIA_COLUMNS, DataFile
from tests.fakes import MemoryLengthStore, MemoryPlanStore

KEY = Fingerprint({"a": 1, "b": None})


def DATA(count: int) -> str:  # noqa: N802  # a constant of these tests
    """Digest data that never changes."""
    return f"first {count}"


ROWS = np.arange(10 * len(COLUMNS), dtype=np.int32).reshape(10, -1)

IMAGES = np.arange(10 * len(MEDIA_COLUMNS), dtype=np.int64).reshape(10, -1)


def put(store, first: int, end: int, **options) -> None:
    """Append some rows, with an image each."""
    store.append(ROWS[first:end], IMAGES[first:end], DATA(end), **{"in_full": False, **options})


def taken(store, num_samples: int = 10, data=DATA) -> list[list[int]]:
    """Return the rows that a store resumes with; their images have to be theirs."""
    stored = store.resume(KEY, num_samples, data)
    assert stored.media.tolist() == IMAGES[: len(stored.table)].tolist()
    return stored.table.tolist()


PLAN = build_raw_plan([80, 60, 20, 50, 31, 40, 40, 5], packing_length=80, allow_single_long=False)


@pytest.fixture(params=["disk", "memory"])
def reopen_lengths(request, tmp_path):
    """Return a function that opens the same length store again, as a new process would."""
    memory = MemoryLengthStore()
    return lambda: DiskLengthStore(tmp_path) if request.param == "disk" else memory


def test_lengths_come_back_row_by_row(reopen_lengths):
    """Whatever the flushes were; the digest depends on the rows alone."""
    store = reopen_lengths()
    assert [] == taken(store)
    put(store, 0, 4)
    put(store, 4, 10)

    again = reopen_lengths()
    assert ROWS.tolist() == taken(again)
    assert store.digest() == again.digest()
    assert ROWS.tolist() == reopen_lengths().read(KEY, 10, DATA).table.tolist()


def test_a_probe_is_kept_until_rows_follow_it(reopen_lengths):
    """It speaks of the rows it saw."""
    store = reopen_lengths()
    taken(store)
    put(store, 0, 4, repeatability={"samples": [3, 0]})
    assert {"samples": [3, 0]} == reopen_lengths().resume(KEY, 10, DATA).repeatability

    store = reopen_lengths()
    taken(store)
    put(store, 4, 10)
    assert reopen_lengths().resume(KEY, 10, DATA).repeatability is None
    put(store, 10, 10, repeatability={"samples": [9]})
    assert {"samples": [9]} == reopen_lengths().resume(KEY, 10, DATA).repeatability


def test_files_are_kept_until_rows_follow_them(reopen_lengths):
    """Rows that are appended may be of other files; nothing else changes with the files."""
    store = reopen_lengths()
    taken(store)
    put(store, 0, 4)
    files = (DataFile("a.jsonl", "a", "text", 3), DataFile("b.jsonl", "b", "text", 1))
    before = store.inspect()

    store.keep_files(files)

    after = reopen_lengths().inspect()
    assert files == after.origin.files == reopen_lengths().origin().files
    assert (before.digest, before.origin.data_digest) == (after.digest, after.origin.data_digest)
    assert taken(reopen_lengths(), 4)
    put(store, 4, 6)
    assert () == reopen_lengths().origin().files


def test_discarded_rows_are_gone(reopen_lengths):
    """For this store and for one opened later; other rows may follow."""
    store = reopen_lengths()
    taken(store)
    put(store, 0, 4)

    store.discard()
    assert [] == taken(reopen_lengths())

    store.append(ROWS[2:5], IMAGES[2:5], DATA(3), in_full=True)
    assert ROWS[2:5].tolist() == reopen_lengths().resume(KEY, 10, DATA).table.tolist()
    assert reopen_lengths().read(KEY, 10, DATA).in_full


def test_measuring_goes_on_where_it_stopped(reopen_lengths):
    """A partial store resumes, and ends as one written at once."""
    store = reopen_lengths()
    taken(store)
    put(store, 0, 3)

    store = reopen_lengths()
    assert 3 == len(taken(store))
    put(store, 3, 10)

    assert ROWS.tolist() == taken(reopen_lengths())


def test_lengths_of_other_inputs_are_refused_key_by_key(reopen_lengths):
    """Each differing key with both values, and what to do."""
    store = reopen_lengths()
    taken(store)
    put(store, 0, 10)

    with pytest.raises(StaleError, match="b: stored None, now 'x'") as raised:
        reopen_lengths().resume(Fingerprint({"a": 1, "b": "x"}), 10, DATA)
    assert "stale_lengths" == raised.value.kind
    assert ["b"] == [difference.key for difference in raised.value.details["differences"]]


def test_lengths_stay_valid_while_the_data_they_were_measured_from_does(reopen_lengths):
    """
    Appended rows, and changes behind what was measured, are fine; a change before, or fewer rows,
    are not.
    """
    store = reopen_lengths()
    taken(store)
    put(store, 0, 5)

    assert 5 == len(taken(reopen_lengths(), 12, lambda n: DATA(n) if n <= 5 else "changed"))
    with pytest.raises(StaleError, match="data"):
        taken(reopen_lengths(), 10, lambda n: f"other {n}")
    with pytest.raises(StaleError, match="data"):
        taken(reopen_lengths(), 4)


def test_lengths_are_inspected_whatever_they_were_measured_from(reopen_lengths):
    """Nothing, then a part, then all, and nothing again after they are discarded."""
    store = reopen_lengths()
    taken(store)
    assert (None, None) == (reopen_lengths().origin(), reopen_lengths().inspect())
    for end in (4, 10):
        put(store, 0 if end == 4 else 4, end, in_full=True, repeatability={"samples": [end]})

        lengths = reopen_lengths().inspect()

        assert Origin(KEY, 10, end, DATA(end)) == reopen_lengths().origin() == lengths.origin
        assert ROWS[:end].tolist() == lengths.rows.table.tolist()
        assert IMAGES[:end].tolist() == lengths.rows.media.tolist()
        assert (True, {"samples": [end]}) == (lengths.rows.in_full, lengths.rows.repeatability)
        assert store.digest() == lengths.digest
        assert [] == list(reopen_lengths().damage())
        assert reopen_lengths().where

    store.discard()
    assert (None, None) == (reopen_lengths().origin(), reopen_lengths().inspect())


OPEN_PLANS = pytest.mark.parametrize("open_plans", [DiskPlanStore, lambda _: MemoryPlanStore()], ids=["disk", "memory"])


@OPEN_PLANS
def test_a_plan_is_inspected_whatever_it_was_planned_from(open_plans, tmp_path):
    """With the world sizes that it was aligned for, and not those of the plan before it."""
    store = open_plans(tmp_path)
    assert store.inspect() is None
    for key, world_sizes in ((Fingerprint({"a": 2}), [3, 1]), (KEY, [4, 2])):
        store.save(key, PLAN)
        for world_size in world_sizes:
            store.save_aligned(key, align_plan(PLAN, world_size=world_size, dataloader_drop_last=False))

        assert StoredPlan(key, PLAN, tuple(sorted(world_sizes))) == store.inspect()
        assert [] == list(store.damage())
    assert store.where


@OPEN_PLANS
def test_a_plan_comes_back_whole_under_its_key_only(open_plans, tmp_path):
    """Equal in every field; nothing under another key."""
    store = open_plans(tmp_path)
    assert store.load(KEY) is None

    store.save(KEY, PLAN)

    assert PLAN == store.load(KEY)
    assert store.load(Fingerprint({"a": 2})) is None


def test_a_place_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path: Path, monkeypatch):
    """A file in the way, a full disk; where it can, the folder is there and empty."""
    FolderLock(tmp_path / "run" / "train").require_writable()
    assert [] == list((tmp_path / "run" / "train").iterdir())

    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=f"{tmp_path}/file/train"):
        FolderLock(tmp_path / "file" / "train").require_writable()

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock, "TemporaryFile", full)
    with pytest.raises(OutputError, match="No space left"):
        FolderLock(tmp_path / "run" / "train").require_writable()


def test_the_disk_holds_small_readable_manifests_and_nothing_else(tmp_path: Path):
    """Counts and checksums to read; every file is named by a manifest; no temporary file stays."""
    lengths, plans = DiskLengthStore(tmp_path), DiskPlanStore(tmp_path)
    taken(lengths)
    put(lengths, 0, 10, repeatability={})
    plans.save(KEY, PLAN)
    aligned = align_plan(PLAN, world_size=4, dataloader_drop_last=False)
    plans.save_aligned(KEY, aligned)

    manifests = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    named = {entry["file"] for entry in manifests["raw_plan.json"]["arrays"].values()}
    assert {"lengths.bin", "images.bin", *named, *manifests} == {path.name for path in tmp_path.iterdir()}
    assert {"lengths.json", "raw_plan.json", "plan_ws4.json"} == set(manifests)
    assert 10 == manifests["lengths.json"]["samples"]["rows"]
    assert plan_checksum(PLAN.packs) == manifests["raw_plan.json"]["checksum"]
    assert (
        list(align_plan(PLAN, world_size=4, dataloader_drop_last=False).repeated)
        == manifests["plan_ws4.json"]["repeated"]
    )
    assert plan_checksum(aligned.packs) == manifests["plan_ws4.json"]["checksum"]
    assert len(aligned.packs) == manifests["plan_ws4.json"]["num_aligned_packs"]


@pytest.mark.slow
def test_one_changed_byte_anywhere_is_found(tmp_path: Path):
    """
    Bytes all over each file of lengths and plan, in turn inverted and with one bit changed, which
    may stay JSON.
    """
    lengths, plans = DiskLengthStore(tmp_path), DiskPlanStore(tmp_path)
    taken(lengths)
    put(lengths, 0, 10, repeatability={})
    plans.save(KEY, PLAN)

    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        step = max(1, len(whole) // 60)
        for position, flip in zip(range(0, len(whole), step), cycle([0xFF, 0x01])):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            with pytest.raises((CorruptArtefactError, StaleError)):
                DiskLengthStore(tmp_path).resume(KEY, 10, DATA)
                if DiskPlanStore(tmp_path).load(KEY) is not None:
                    pytest.fail(f"{path.name} byte {position} went unnoticed")
        path.write_bytes(whole)
    assert PLAN == DiskPlanStore(tmp_path).load(KEY)


def test_torn_files_are_never_read(tmp_path: Path):
    """A manifest cut short, arrays cut short, rows cut short, and an array that is gone."""
    lengths, plans = DiskLengthStore(tmp_path), DiskPlanStore(tmp_path)
    taken(lengths)
    put(lengths, 0, 10, repeatability={})
    plans.save(KEY, PLAN)

    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        if not whole:
            continue
        path.write_bytes(whole[:-2])
        with pytest.raises(CorruptArtefactError):
            DiskLengthStore(tmp_path).resume(KEY, 10, DATA)
            DiskPlanStore(tmp_path).load(KEY)
        path.write_bytes(whole)
    (tmp_path / "raw_plan.indices.bin").unlink()
    with pytest.raises(CorruptArtefactError, match="is missing"):
        DiskPlanStore(tmp_path).load(KEY)


def test_rows_that_no_manifest_names_are_cut_off(tmp_path: Path):
    """A crash between rows and manifest leaves bytes behind; resuming measures these again."""
    store = DiskLengthStore(tmp_path)
    taken(store)
    put(store, 0, 5)
    for name in ("lengths.bin", "images.bin"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"torn")

    store = DiskLengthStore(tmp_path)
    assert ROWS[:5].tolist() == taken(store)
    put(store, 5, 10)

    assert ROWS.tolist() == taken(DiskLengthStore(tmp_path))


def test_a_store_that_is_only_read_writes_nothing(tmp_path: Path):
    """Not even what a crash left is cut off."""
    store = DiskLengthStore(tmp_path)
    taken(store)
    put(store, 0, 5)
    with (tmp_path / "lengths.bin").open("ab") as file:
        file.write(b"torn")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert ROWS[:5].tolist() == DiskLengthStore(tmp_path).read(KEY, 10, DATA).table.tolist()
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_run_that_maps_lengths_survives_their_being_measured_anew(tmp_path: Path):
    """
    Another job discards and writes the same files; a mapped file whose end moves would kill its
    reader.
    """
    store = DiskLengthStore(tmp_path)
    taken(store)
    put(store, 0, 10)
    mapped = DiskLengthStore(tmp_path).resume(KEY, 10, DATA)

    store.discard()
    store.append(ROWS[5:6], IMAGES[5:6], DATA(1), in_full=True)

    assert ROWS.tolist() == mapped.table.tolist()
    assert IMAGES.tolist() == mapped.media.tolist()


def test_another_runs_lengths_are_taken_over_once(tmp_path: Path):
    """Whole or partial, the same bytes; the other run is only read, and later not even that."""
    one, two = tmp_path / "one" / "train", tmp_path / "two" / "train"
    other = DiskLengthStore(one)
    one.mkdir(parents=True)
    two.mkdir(parents=True)
    taken(other)
    put(other, 0, 6)
    before = {path.name: path.read_bytes() for path in one.iterdir()}

    assert ROWS[:6].tolist() == taken(DiskLengthStore(two, lengths_from=one))
    assert before == {path.name: path.read_bytes() for path in one.iterdir()}
    assert before == {path.name: path.read_bytes() for path in two.iterdir()}
    put(other, 6, 10, repeatability={"samples": [1]})
    assert ROWS[:6].tolist() == taken(DiskLengthStore(two, lengths_from=one))


def test_another_runs_lengths_have_to_fit(tmp_path: Path):
    """
    Other inputs are refused with both values, and a folder where no run was; one that has no
    lengths yet is not.
    """
    one, two = tmp_path / "one" / "train", tmp_path / "two" / "train"
    one.mkdir(parents=True)
    two.mkdir(parents=True)
    store = DiskLengthStore(two, lengths_from=one)
    assert [] == taken(store)
    other = DiskLengthStore(one)
    taken(other)
    put(other, 0, 6)

    with pytest.raises(StaleError, match="a: stored 1, now 2") as raised:
        DiskLengthStore(two, lengths_from=one).resume(Fingerprint({"a": 2, "b": None}), 10, DATA)
    assert "borrowed_lengths" == raised.value.kind
    with pytest.raises(ConfigError, match=r"training.packing_lengths_from: has no folder"):
        taken(DiskLengthStore(two, lengths_from=tmp_path / "none" / "train"))
    with pytest.raises(ConfigError, match=r"training.packing_lengths_from: is this run's own"):
        taken(DiskLengthStore(one, lengths_from=tmp_path / "two" / ".." / "one" / "train"))


def test_a_damaged_plan_may_be_planned_anew_without_measuring(tmp_path: Path):
    """The remedy names the plan's manifest alone, and helps."""
    plans = DiskPlanStore(tmp_path)
    plans.save(KEY, PLAN)
    (tmp_path / "raw_plan.indices.bin").write_bytes(b"")

    with pytest.raises(CorruptArtefactError, match=r"delete .*raw_plan.json to plan again; the lengths stay"):
        plans.load(KEY)
    (tmp_path / "raw_plan.json").unlink()
    assert plans.load(KEY) is None


def test_a_manifest_of_another_schema_is_refused(tmp_path: Path):
    """Even with a right digest of its own."""
    from packplan.adapters import files as artefacts

    artefacts.write_manifest(tmp_path / "lengths.json", {"schema": "packplan lengths 99"})

    with pytest.raises(CorruptArtefactError, match="packplan lengths 99"):
        DiskLengthStore(tmp_path).resume(KEY, 10, DATA)


@pytest.fixture
def whole(tmp_path):
    """A folder with lengths, a plan, and two alignments of it."""
    lengths = DiskLengthStore(tmp_path)
    lengths.resume(KEY, 10, DATA)
    put(lengths, 0, 10, repeatability={"samples": [0, 9]})
    plans = DiskPlanStore(tmp_path)
    plans.save(KEY, PLAN)
    for world_size in (3, 2):
        aligned = align_plan(PLAN, world_size=world_size, dataloader_drop_last=False)
        plans.save_aligned(KEY, aligned)
    return tmp_path


def damage(folder) -> list[str]:
    """Return the names of the files that are found damaged."""
    found = [*DiskLengthStore(folder).damage(), *DiskPlanStore(folder).damage()]
    return [Path(error.path).name for error in found]


def test_a_look_needs_no_key(whole):
    """What is stored comes back with what it was made from, whoever asks; nothing is written."""
    before = {path.name: path.read_bytes() for path in whole.iterdir()}

    lengths, plan = DiskLengthStore(whole).inspect(), DiskPlanStore(whole).inspect()

    assert (KEY, 10, 10, DATA(10)) == (
        lengths.origin.key, lengths.origin.num_records, lengths.origin.num_measured, lengths.origin.data_digest
    )  # fmt: skip
    assert ROWS.tolist() == lengths.rows.table.tolist()
    assert ROWS[:, 0].tolist() == lengths.tokens.tolist()
    assert IMAGES.tolist() == lengths.rows.media.tolist()
    assert (KEY, PLAN, (2, 3)) == (plan.key, plan.plan, plan.world_sizes)
    assert DiskLengthStore(whole).origin() == lengths.origin
    assert before == {path.name: path.read_bytes() for path in whole.iterdir()}


def test_nothing_is_stored_in_an_empty_folder(tmp_path):
    """And nothing is damaged."""
    assert (
        DiskLengthStore(tmp_path).inspect()
        is DiskLengthStore(tmp_path).origin()
        is DiskPlanStore(tmp_path).inspect()
        is None
    )
    assert [] == damage(tmp_path)


@pytest.mark.slow
def test_any_flipped_bit_of_any_artefact_is_found(whole):
    """In every seventh byte of every file; that file is named, and what is whole is not."""
    assert [] == damage(whole)
    files = [path for path in whole.iterdir() if path.suffix in {".json", ".bin"}]
    assert {"lengths.json", "images.bin", "raw_plan.json", "raw_plan.indices.bin", "plan_ws2.json"} < {
        f.name for f in files
    }
    for path in files:
        content = path.read_bytes()
        for place in range(0, len(content), 7):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8  # every bit of a byte in turn
            path.write_bytes(flipped)
            assert path.name in damage(whole), f"{path.name}, byte {place}"
        path.write_bytes(content)
    assert [] == damage(whole)


def test_a_manifest_that_was_written_anew_is_found(whole):
    """With the same values in another layout; its digest is of the values alone."""
    path = whole / "lengths.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))

    assert ["lengths.json"] == damage(whole)


def test_all_that_is_damaged_is_named_at_once(whole):
    """One file does not hide another."""
    for name in ("lengths.bin", "images.bin", "raw_plan.offsets.bin", "raw_plan.indices.bin", "plan_ws3.json"):
        path = whole / name
        path.write_bytes(path.read_bytes()[:-1])
    (whole / "raw_plan.single_long.bin").unlink()

    expected = ["lengths.bin", "images.bin", "raw_plan.offsets.bin", "raw_plan.indices.bin"]
    assert [*expected, "raw_plan.single_long.bin", "plan_ws3.json"] == damage(whole)


def test_an_alignment_that_says_something_else_than_its_plan_gives_is_found(whole):
    """
    Though its digest is right: of another count, for a world size that leaves nothing, or under
    another name.
    """
    from packplan.adapters import files as artefacts

    content = artefacts.read_manifest(whole / "plan_ws2.json", "packplan aligned plan 1")
    artefacts.write_manifest(whole / "plan_ws2.json", content | {"pad_needed": 7})
    artefacts.write_manifest(whole / "plan_ws4.json", content)
    artefacts.write_manifest(whole / "plan_ws9.json", content | {"world_size": 9, "dataloader_drop_last": True})

    found = [str(error) for error in DiskPlanStore(whole).damage()]

    assert 3 == len(found)
    assert "pad_needed" in found[0]
    assert "file name" in found[1]
    assert "cannot feed 9 ranks" in found[2]


def test_the_alignment_of_an_earlier_plan_is_no_damage(whole):
    """It stays when a changed knob plans again, and is never taken for the new plan's."""
    DiskPlanStore(whole).save(Fingerprint({"a": 2}), PLAN)

    assert [] == damage(whole)
    assert () == DiskPlanStore(whole).inspect().world_sizes


def test_a_manifest_whose_counts_are_not_its_plans_is_found(whole):
    """Though its digest is right."""
    from packplan.adapters import files as artefacts

    content = artefacts.read_manifest(whole / "raw_plan.json", "packplan raw plan 2")
    artefacts.write_manifest(whole / "raw_plan.json", content | {"num_tokens": 1})

    assert ["another num_tokens" in str(error) for error in DiskPlanStore(whole).damage()] == [True]
