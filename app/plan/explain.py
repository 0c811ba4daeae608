"""
Explains one pack or sample of a plan: its content, its location in the data, and the steps that
train it.
"""

import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import attrs

from packplan.app.opening.stores import open_split_records, open_stores
from packplan.app.plan.stored import StoredSplit
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, DataSetError, counted
from packplan.core.inspection import find_sample, scheduled_steps
from packplan.core.samples.tables import from_tables

Locate = Callable[[int], str | None]
"""
Function that returns the file and line of a sample's record, from the sample's index. None if the
record or its file has changed, moved or gone since measuring, or if its digest is not stored.
"""

_PLACES = {
    "packed": "in a pack with other samples, or in a pack by itself, since no other sample fits",
    "long": "a long sample, in a pack by itself",
    "dropped": "in no pack: its pack would be filled below training.packing_min_fill_ratio",
    "absent": "in no pack: this epoch does not draw it, or the other split has it (custom.val_share)",
    "skipped": "in no pack: it is long (training.packing_allow_single_long: true puts it into a pack by itself)",
}


def explain_sample(config: RunConfig, opened: StoredSplit, sample: int, *, text: bool = False) -> dict[str, Any]:
    """
    Return a sample, its pack and the steps that train it, as values of a JSON document.

    Args:
        config: The run.
        opened: Split of the sample.
        sample: Index of the sample's record.
        text: Whether to add the decoded text of the sample in supervised and other spans.

    Raises:
        DataSetError: There is no sample with this index, or no text of the record as measured.
    """
    for bad in opened.lengths.origin.bad:
        if bad.index == sample:
            raise DataSetError(f"record {sample} cannot become a sample: {bad.where}: {bad.reason}")
    if sample >= (num_records := opened.lengths.origin.num_measured):
        reason = f"the data have no record {sample}: {counted(num_records, 'record')} were measured, counted from 0"
        raise DataSetError(reason)
    place = find_sample(opened.split.raw, sample)
    encoder = _open_encoder(config, opened) if text else None
    locate = _record_locator(config, opened, encoder)
    document = {"split": opened.split.name, **_describe_sample(opened, locate, sample), "place": place.kind}
    if place.kind == "dropped":
        document["dropped_with"] = [member for member in place.pack_members if member != sample]
    elif place.pack is not None:
        document["pack"] = _describe_pack(opened, locate, place.pack)
    if encoder is not None:
        if document["record"] is None:
            reason = "has changed or moved since it was measured, or its digest is not stored"
            raise DataSetError(f"record {sample} {reason}: run packplan plan build again")
        first, parts = sample * encoder.records_per_sample, encoder.records_per_sample
        runs = chain.from_iterable(map(encoder.decode_text, range(first, first + parts)))
        document["text"] = [{"trained": trained, "text": words} for trained, words in runs]
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


def _open_encoder(config: RunConfig, opened: StoredSplit) -> Any:
    # ms-swift takes seconds to import, and only texts and the order of a command's rows need it.
    from packplan.app.opening.splits import open_encoders

    return open_encoders(config)[opened.split.name]


def _record_locator(config: RunConfig, opened: StoredSplit, encoder: Any = None) -> Locate:
    """Return the function that locates records, in an open encoder or in files that it opens."""
    try:
        if encoder is None and config.command is not None:
            encoder = _open_encoder(config, opened)
        records = open_split_records(config, opened.split.name) if encoder is None else encoder.records
    except (ConfigError, DataSetError):
        return lambda _: None
    heads = open_stores(config, opened.split.name).lengths.record_heads()
    parts = 1 if encoder is None else encoder.records_per_sample

    def locate(sample: int) -> str | None:
        if sample >= min(len(heads), len(records) // parts):
            return None
        index = sample * parts
        same = bytes.fromhex(records.record_digest(index)).startswith(heads[sample].tobytes())
        return str(records.location(index)) if same else None

    return locate


def _describe_pack(opened: StoredSplit, locate: Locate, pack: int) -> dict[str, Any]:
    plan, schedule = opened.split.raw, opened.schedule
    samples = [_describe_sample(opened, locate, sample) for sample in plan.packs[pack]]
    tokens = sum(sample["length"] for sample in samples)
    return {
        "pack": pack, "tokens": tokens, "packing_length": plan.packing_length,
        "fill": min(tokens / plan.packing_length, 1.0), "world_size": schedule.world_size, "epoch": opened.epoch,
        "steps": [attrs.asdict(step) for step in scheduled_steps(schedule, pack, epoch=opened.epoch)],
        "samples": samples,
    }  # fmt: skip


def _describe_sample(opened: StoredSplit, locate: Locate, sample: int) -> dict[str, Any]:
    rows = opened.lengths.rows
    (measured,) = from_tables(rows.table, rows.media, [sample])
    return {
        "sample": sample,
        "record": locate(sample),
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
        + f"; {sample['record'] or 'line unknown (the data differ, or have no stored digests)'}"
    )
