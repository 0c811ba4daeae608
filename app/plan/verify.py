"""
Check that the stored lengths and plan match the data, the model and the configuration. The exit
status is 0, or 3 if there are findings.

The command compares:

- every artefact with its digest
- the plan with a new plan of the same lengths
- the inputs of the lengths with the current data, model and configuration
- compressed and Parquet files with their copies
- every image with its stored size, dimensions and digest of the first 64 KiB

`--samples K` also encodes K samples again. `--decode` also decodes every image and every frame of a
video.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import attrs
import numpy as np

from packplan.adapters.progress import loading_libraries, progress
from packplan.app.cli.command import add_config_arguments, parse_number
from packplan.app.opening.commands import read_run_or_command
from packplan.app.plan.stored import yield_refusals
from packplan.app.planning.epochs import EpochPlanner, lengths_of_records, plan_first_epoch
from packplan.app.planning.measure import describe_changed_records
from packplan.app.planning.schedule import refuse_stream
from packplan.app.planning.split import Split
from packplan.core.config.remedies import MEASURE_AGAIN
from packplan.core.epochs import EpochRecipe, RecordLengths
from packplan.core.errors import (
    CorruptArtefactError,
    DataSetError,
    Difference,
    MismatchError,
    NotBuiltError,
    RecordError,
    StaleError,
    counted,
)
from packplan.core.lengths import IntArray
from packplan.core.ports import LengthSource, Origin, StoredLengths, StoredPlan
from packplan.core.samples.tables import (
    MeasuredSample,
    MediaTable,
    Table,
    column,
    from_row,
    from_tables,
    num_media,
    sample_indices,
)

log = logging.getLogger(__name__)


T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument(
        "--samples", type=parse_number, default=0, metavar="K", help="samples of a split to encode again (default: 0)"
    )
    parser.add_argument("--decode", action="store_true", help="decode every image and video frame")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def run(options: argparse.Namespace) -> None:
    """Verify the splits, and print all findings; MismatchError if there are any."""
    config = read_run_or_command(options.config, options.overrides)
    refuse_stream(config)

    with loading_libraries():
        from packplan.app.opening.splits import open_splits

    opened = open_splits(config)
    found: dict[str, list[Finding]] = {}
    absent: list[NotBuiltError] = []
    for name, split in opened.items():
        try:
            found[name] = list(verify(split, num_samples=options.samples, decode=options.decode))
        except NotBuiltError as error:
            found[name] = [Finding("artefacts", error.folder, f"{error.reason}: packplan plan build measures them")]
            absent.append(error)
    if len(absent) == len(opened):
        raise absent[0]
    number = sum(map(len, found.values()))
    if options.json:
        rows = [{"split": name, **attrs.asdict(one)} for name, findings in found.items() for one in findings]
        print(json.dumps({"passed": not number, "findings": rows}, indent=2))
    else:
        for name, findings in found.items():
            for one in findings:
                print(config.name_settings(f"{name}: {one}"))
            if not findings:
                print(f"{name}: nothing is wrong with {counted(len(opened[name].source), 'record')} and their plan")
    if number:
        fact = f"{counted(number, 'finding')}: training would not use the stored lengths and plan as they are"
        raise MismatchError("unsound", fact)


@attrs.frozen
class Finding:
    """One fault that the verification found."""

    check: str
    """`artefacts`, `plan`, `inputs`, `copies`, `images` or `samples`."""

    where: str
    """File, sample or input that has the fault."""

    reason: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.reason}"


def verify(split: Split, *, num_samples: int = 0, decode: bool = False) -> Iterator[Finding]:
    """
    Yield every fault of a split's stored lengths and plan.

    Args:
        split: The split under the run's current configuration.
        num_samples: Number of samples to encode again, spread over the data.
        decode: Whether to decode the pixels of every image and video frame.

    Raises:
        NotBuiltError: No lengths are stored.
    """
    name, source, lengths_kept, plans_kept = split.name, split.source, split.stores.lengths, split.stores.plans
    damage = lengths_kept.damage()
    plan_damage = plans_kept.damage()
    yield from (Finding("artefacts", one.path, f"{one.reason}; {one.remedy}") for one in [*damage, *plan_damage])
    origin = _read_or_none(lengths_kept.origin)
    if origin is None and not damage and not plan_damage:
        raise NotBuiltError(str(lengths_kept.folder), "holds no lengths")
    differences: tuple[Difference, ...] = ()
    if origin is not None:
        data_digest = partial(source.data_digest, without=[one.index for one in origin.bad])
        differences = origin.differences(source.fingerprint(), len(source), data_digest)
        yield from _input_faults(split, origin, differences)
    yield from (Finding("copies", *fault) for fault in split.encoder.copy_faults())
    # Damaged files are named above, and not compared.
    lengths, plan = _read_or_none(lengths_kept.inspect), _read_or_none(plans_kept.inspect)
    if lengths is None:
        return
    if plan is not None or not plan_damage:
        log.info("%s: checking the plan, and planning again", name)
        yield from _faults_of_plan(split, lengths, plan)
    # If earlier records were added or removed, the same indices are other samples now.
    if len(source) != len(lengths.rows.table) and _data_differ(differences):
        log.warning("%s: images and samples are not compared, since the data have other records", name)
        return
    yield from _image_faults(name, lengths, source, decode=decode)
    yield from _sample_faults(name, lengths, source, num_samples)


def _read_or_none(read: Callable[[], T | None]) -> T | None:
    """Return the stored artefact, or None if it is missing or damaged."""
    try:
        return read()
    except CorruptArtefactError:
        return None


def _input_faults(split: Split, origin: Origin, differences: tuple[Difference, ...]) -> Iterator[Finding]:
    """
    Yield the differences between the run's current inputs and the stored inputs, and each bad
    record that has changed.
    """
    source, where = split.source, str(split.stores.lengths.folder)
    for change in differences:
        records = describe_changed_records(split) if _data_differ((change,)) else ""
        values = f"{str(change).removeprefix(f'{change.key} was ')}{f': {records}' if records else ''}"
        yield Finding("inputs", change.key, f"measured with {values}; {MEASURE_AGAIN}")
    total = len(source)
    if origin.num_measured < total and not _data_differ(differences):
        reason = f"{origin.num_measured:,} of {counted(total, 'record')} are measured: run packplan plan build again"
        yield Finding("inputs", where, reason)
    for one in origin.bad:
        if one.index < total and source.digest_and_folder(one.index)[0] != one.sha256:
            yield Finding("inputs", one.where, "was bad, and has changed: packplan plan build measures it again")


def _data_differ(differences: tuple[Difference, ...]) -> bool:
    return any(difference.key.startswith("data (") for difference in differences)


def _faults_of_plan(split: Split, lengths: StoredLengths, stored: StoredPlan | None) -> Iterator[Finding]:
    """
    Yield differences of the stored plan from the stored lengths, the run's policy, and a new plan.
    """
    policy, where = split.policy, str(split.stores.plans.folder)
    if stored is None:
        yield Finding("plan", where, "no plan is stored: packplan plan build makes one")
        return
    key = split.plan_key(lengths.digest)
    differences = stored.key.differences(key)
    for difference in differences:
        values = str(difference).removeprefix(f"{difference.key} was ")
        reason = f"planned with {values}: packplan plan build plans again"
        yield Finding("plan", difference.key, reason)
    if stored.key.inputs["lengths"] != lengths.digest:
        return
    supervised = column(lengths.rows.table, "supervised") if split.name == "train" else None
    for reason in yield_refusals(None if differences else stored.plan, lengths.tokens, policy, supervised=supervised):
        yield Finding("plan", where, reason)
    if not differences:
        samples = lengths_of_records(policy, lengths.rows.table, lengths.origin.files)
        again = plan_first_epoch(f"{split.name} again", policy, samples, recipe=split.recipe, quick_bound=True)
        bound = {name: getattr(stored.plan, name) for name in ("lower_bound", "bound_kind")}
        if attrs.evolve(again, **bound) != stored.plan:
            reason = "the stored plan differs from a new plan of the same lengths: packplan plan build makes a new one"
            yield Finding("plan", where, reason)
        if split.recipe is not None:
            yield from _faults_of_epochs(split, samples, stored)


def _faults_of_epochs(split: Split, samples: RecordLengths, stored: StoredPlan) -> Iterator[Finding]:
    """Plan each epoch again, and yield the epochs whose plan differs from the stored record."""
    planner = EpochPlanner(split.policy, split.recipe or EpochRecipe(), samples)
    where = str(split.stores.plans.folder)
    if not stored.epochs:
        yield Finding("plan", where, "the epochs have no plans: packplan plan build plans them")
    for record in progress(stored.epochs, desc=f"planning {split.name} again", unit=" epochs"):
        if planner.make_record(planner.plan(record.epoch)) != record:
            yield Finding("plan", where, f"the plan of epoch {record.epoch} differs when it is made again")


def _image_faults(name: str, lengths: StoredLengths, source: LengthSource, *, decode: bool) -> Iterator[Finding]:
    """Yield each image whose current size, dimensions or content differ from the stored values."""
    table = lengths.rows.table[: len(source)]
    indices = np.flatnonzero(num_media(table))
    verb = "decoding" if decode else "comparing"
    stored = _iterate_measured(table, lengths.rows.media, indices)
    for index, measured in progress(stored, total=indices.size, desc=f"{verb} {name} images", unit=" samples"):
        try:
            found = source.media_facts(index, decode=decode)
        except (RecordError, StaleError) as error:
            yield Finding("images", f"sample {index}", str(error))
            continue
        if len(found) != len(measured.media):
            reason = f"measured with {counted(len(measured.media), 'image')}, now {len(found)}; {MEASURE_AGAIN}"
            yield Finding("images", f"sample {index}", reason)
            continue
        for number, (then, now) in enumerate(zip(measured.media, found, strict=True)):
            if differences := then.differences(now):
                reason = f"has changed since it was measured: {'; '.join(map(str, differences))}; {MEASURE_AGAIN}"
                yield Finding("images", f"image {number} of sample {index}", reason)


def _iterate_measured(table: Table, media: MediaTable, indices: IntArray) -> Iterator[tuple[int, MeasuredSample]]:
    """
    Yield samples with their stored measurements. At most 4,096 samples are read at a time, since
    all samples of a large data set would take a gigabyte of memory.
    """
    for start in range(0, indices.size, 4096):
        part = indices[start : start + 4096].tolist()
        yield from zip(part, from_tables(table, media, part), strict=True)


def _sample_faults(name: str, lengths: StoredLengths, source: LengthSource, count: int) -> Iterator[Finding]:
    """Encode *count* samples again, spread over the data, and yield the samples that differ."""
    samples = sample_indices(lengths.rows.table[: len(source)])
    chosen = np.linspace(0, samples.size - 1, min(count, samples.size)).round().astype(int)
    for index in progress(np.unique(samples[chosen]).tolist(), desc=f"encoding {name} again", unit=" samples"):
        stored = from_row(lengths.rows.table, index)
        try:
            differences = stored.differences(source.measure_in_full(index))
        except (DataSetError, RecordError, StaleError) as error:
            yield Finding("samples", f"sample {index}", str(error))
            continue
        if differences:
            reason = f"has other measurements than the stored ones: {'; '.join(map(str, differences))}; {MEASURE_AGAIN}"
            yield Finding("samples", f"sample {index}", reason)
