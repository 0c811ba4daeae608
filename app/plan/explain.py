"""
Explains one pack or sample of a plan: its content, its location in the data, and the steps that
train it.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from packplan.app.opening.stores import open_split_records
from packplan.app.plan.stored import StoredSplit
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, DataSetError, counted
from packplan.core.inspection import find_sample, scheduled_steps
from packplan.core.samples.tables import from_tables

Locate = Callable[[int], str]
"""Function that returns the file and line of a sample's record, from the sample's index."""

_PLACES = {
    "packed": "in a pack with other samples, or in a pack by itself, since no other sample fits",
    "long": "a long sample, in a pack by itself",
    "dropped": "in no pack: its pack would be filled below training.packing_min_fill_ratio",
    "absent": "in no pack: this epoch does not draw it, or the other split has it (custom.val_share)",
    "skipped": "in no pack: it is long (training.packing_allow_single_long: true puts it into a pack by itself)",
}


def explain_sample(config: RunConfig, opened: StoredSplit, sample: int) -> dict[str, Any]:
    """
    Return a sample, its pack and the steps that train it, as values of a JSON document.

    Args:
        config: The run.
        opened: Split of the sample.
        sample: Index of the sample's record.

    Raises:
        DataSetError: There is no sample with this index.
    """
    for bad in opened.lengths.origin.bad:
        if bad.index == sample:
            raise DataSetError(f"record {sample} cannot become a sample: {bad.where}: {bad.reason}")
    if sample >= (num_records := opened.lengths.origin.num_measured):
        reason = f"the data have no record {sample}: {counted(num_records, 'record')} were measured, counted from 0"
        raise DataSetError(reason)
    place = find_sample(opened.split.raw, sample)
    locate = _record_locator(config, opened)
    document = {"split": opened.split.name, **_describe_sample(opened, locate, sample), "place": place.kind}
    if place.kind == "dropped":
        document["dropped_with"] = [member for member in place.pack_members if member != sample]
    elif place.pack is not None:
        document["pack"] = _describe_pack(opened, locate, place.pack)
    return document


def explain_pack(config: RunConfig, opened: StoredSplit, pack: int) -> dict[str, Any]:
    """
    Return a pack, its samples and the steps that train it, as values of a JSON document.

    Args:
        config: The run.
        opened: Split of the pack.
        pack: Index of the pack.

    Raises:
        DataSetError: There is no pack with this index.
    """
    number = len(opened.split.raw.packs)
    if pack >= number:
        raise DataSetError(f"the plan has no pack {pack}: it has {counted(number, 'pack')}, counted from 0")
    return {"split": opened.split.name, **_describe_pack(opened, _record_locator(config, opened), pack)}


def _record_locator(config: RunConfig, opened: StoredSplit) -> Locate | None:
    """
    Return the function that locates a sample's record. None if files are missing, or have another
    number of records than was measured.
    """
    parts = 1
    try:
        if config.command is None:
            records = open_split_records(config, opened.split.name)
        else:  # ms-swift, which orders the rows of a command, has parsed it before
            from packplan.app.opening.splits import open_encoders

            encoder = open_encoders(config)[opened.split.name]
            records, parts = encoder.records, encoder.records_per_sample
    except (ConfigError, DataSetError):
        return None
    fits = len(records) == opened.lengths.origin.num_records * parts
    return (lambda sample: str(records.location(sample * parts))) if fits else None


def _describe_pack(opened: StoredSplit, locate: Locate | None, pack: int) -> dict[str, Any]:
    plan, schedule = opened.split.raw, opened.schedule
    samples = [_describe_sample(opened, locate, sample) for sample in plan.packs[pack]]
    tokens = sum(sample["length"] for sample in samples)
    return {
        "pack": pack, "tokens": tokens, "packing_length": plan.packing_length,
        "fill": min(tokens / plan.packing_length, 1.0), "world_size": schedule.world_size, "epoch": opened.epoch,
        "steps": [attrs.asdict(step) for step in scheduled_steps(schedule, pack, epoch=opened.epoch)],
        "samples": samples,
    }  # fmt: skip


def _describe_sample(opened: StoredSplit, locate: Locate | None, sample: int) -> dict[str, Any]:
    rows = opened.lengths.rows
    (measured,) = from_tables(rows.table, rows.media, [sample])
    return {
        "sample": sample,
        "record": None if locate is None else locate(sample),
        **attrs.asdict(measured.measurement),
        "image_sizes": [[image.width, image.height] for image in measured.media],
    }


def explanation_lines(explanation: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text that explain a pack or a sample."""
    if "sample" in explanation:
        yield _sample_line(explanation)
        yield f"  {_PLACES[explanation['place']]}"
        if "dropped_with" in explanation:
            yield f"  with samples {', '.join(map(str, explanation['dropped_with']))}"
        for run in explanation.get("text", ()):
            # Written as JSON, so that texts of the data neither break lines nor control a terminal.
            text = json.dumps(run["text"], ensure_ascii=False)
            yield f"  {'trained' if run['trained'] else '       '} {text}"
    pack = explanation.get("pack") if "sample" in explanation else explanation
    if not pack:
        return
    yield (
        f"pack {pack['pack']} of {explanation['split']}: {pack['tokens']:,} of {pack['packing_length']:,} tokens, fill "
        f"{pack['fill']:.4f}, {counted(len(pack['samples']), 'sample')}"
    )
    trained = ", ".join(f"step {step['step']} on rank {step['rank']}" for step in pack["steps"]) or "not trained"
    yield f"  in epoch {pack['epoch']}, counted from 0: {trained} (of {counted(pack['world_size'], 'rank')})"
    yield from (f"  {_sample_line(sample)}" for sample in pack["samples"])


def _sample_line(sample: dict[str, Any]) -> str:
    images = ", ".join(f"{width} x {height}" for width, height in sample["image_sizes"])
    return (
        f"sample {sample['sample']}: {counted(sample['length'], 'token')}, {sample['supervised']:,} of them supervised"
        + (f", images {images} ({sample['patches']:,} patches)" if images else "")
        + (", truncated" if sample["cut"] else "")
        + (f"; {sample['record']}" if sample["record"] else "")
    )
