"""A mix of data sets for one epoch -> one data file, which a static plan takes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from packplan.adapters import files
from packplan.adapters.config.run import load_mix
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.files import open_records, rebased
from packplan.app.wiring.stores import writing_for
from packplan.core.errors import ConfigError, counted
from packplan.core.ports import Records
from packplan.core.stream import Mix, Schedule, mix_faults, schedule, share_faults

log = logging.getLogger(__name__)


def open_mix(path: str, overrides: Sequence[str] = (), *, cache: Path) -> tuple[Mix, list[Records]]:
    """
    Read a mix, and its sources.

    Args:
        path: The mix, a YAML.
        overrides: Values for single keys of the mix, as `samples_per_epoch=100`.
        cache: Folder of the copies of packed sources.

    Raises:
        ConfigError: All that is wrong with them.
    """
    mix = load_mix(path, overrides)
    records = [open_records((source.jsonl,), cache=cache) for source in mix.sources]
    sizes = [len(one) for one in records]
    faults = list(mix_faults(mix, sizes)) or list(share_faults(mix, sizes))
    if faults:
        raise ConfigError(path, tuple(faults))
    return mix, records


def materialise(path: str, output: Path, *, overrides: Sequence[str] = (), seed: int, epoch: int) -> None:
    """
    Write the samples of an epoch of a mix to one JSONL, images and all as they are.

    Args:
        path: The mix, a YAML.
        output: The file; readers see it whole or not at all.
        overrides: Values for single keys of the mix, as `samples_per_epoch=100`.
        seed: Seed of draw and order.
        epoch: From 0.

    Raises:
        PackplanError: Something is wrong with the mix or its records, or the file cannot be
            written.
    """
    mix, records = open_mix(path, overrides, cache=output.parent / "records")
    _require_other("--output", output, [source.jsonl for source in mix.sources])
    drawn = schedule(mix, [len(one) for one in records], seed=seed, epoch=epoch)
    with writing_for("--output", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        files.write_chunks(output, _lines(records, drawn, output.parent))
    for source, count in zip(mix.sources, np.bincount(drawn.source, minlength=len(records)).tolist(), strict=True):
        log.info("%s: %s of %s from %s", output, f"{count:,}", counted(len(drawn), "sample"), source.jsonl)


def write_records(records: Records, output: Path, sources: Sequence[str], indices: Sequence[int]) -> None:
    """
    Write some records to one JSON Lines file, with the same images.

    Args:
        records: The data.
        output: The file; readers see it whole or not at all.
        sources: Names of the data files, which are not written over.
        indices: Which records, in this order.

    Raises:
        ConfigError: The file cannot be written, or is one of the sources.
    """
    _require_other("--write-good", output, sources)
    with writing_for("--write-good", output):
        files.write_chunks(output, (_line(records, index, output.parent) for index in indices))
    log.info("%s: %s", output, counted(len(indices), "record"))


@contextmanager
def writing_failures(output: Path, sources: Sequence[str]) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """
    Yield a function that writes one failure as a line of a JSON Lines file, which readers see whole
    at the end, or not at all.

    Args:
        output: The file, or a link to it.
        sources: Names of files that are not written over.

    Raises:
        ConfigError: The file cannot be written, or is one of the sources.
    """
    _require_other("--write-failures", output, sources)
    with ExitStack() as opened:
        with writing_for("--write-failures", output):
            file = opened.enter_context(files.publishing(output.resolve()))

        def write(failure: Mapping[str, str]) -> None:
            with writing_for("--write-failures", output):
                file.write(json.dumps(failure, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")

        yield write
        with writing_for("--write-failures", output):
            opened.pop_all().close()
    log.info("%s: all failures", output)


def _require_other(option: str, output: Path, sources: Sequence[str]) -> None:
    """Refuse to write over a folder or one of the sources."""
    if output.is_dir() or any(output.resolve() == Path(source).resolve() for source in sources):
        reason = "is a folder" if output.is_dir() else "is one of the sources, which would be lost"
        raise ConfigError.at(option, f"{output} {reason}: name another file")


def _lines(records: list[Records], drawn: Schedule, onto: Path) -> Iterator[bytes]:
    places = zip(drawn.source.tolist(), drawn.index.tolist(), strict=True)
    for source, index in progress(places, total=len(drawn), desc="writing", unit=" samples", delay=BRIEF_S):
        yield _line(records[source], index, onto)


def _line(records: Records, index: int, onto: Path) -> bytes:
    """Return a record as a line of a file in another folder."""
    record = rebased(records[index], Path(records.folder(index)), onto)
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
