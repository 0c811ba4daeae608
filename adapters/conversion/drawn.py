"""
Records that are drawn from data sets -> one file of those that are trained, one of those that are
evaluated.

The files stand in a folder that is named by the content of the data and by what is drawn of them:
other data, another seed or another count is another folder, and one that is there is what it says.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.files import copied_line
from packplan.core.errors import counted
from packplan.core.ports import Records
from packplan.core.samples import DrawnRecords

log = logging.getLogger(__name__)

TRAIN, VAL = "train.jsonl", "val.jsonl"

_WRITTEN = "written"
"""File that is written last into a folder."""


def draw_files(records: Sequence[Records], drawn: Sequence[DrawnRecords], cache: Path) -> tuple[Path, Path | None]:
    """
    Return the files of what is drawn of data sets, written if they are not there.

    Args:
        records: The data sets.
        drawn: Positions that are drawn of each.
        cache: Folder that the files' folder stands in.

    Returns:
        The file of what is trained, and that of what is evaluated; None if nothing is.

    Raises:
        OutputError: They cannot be written.
    """
    digest = hashlib.sha256()
    for one, taken in zip(records, drawn, strict=True):
        digest.update(one.digest(len(one)).encode() + taken.train.tobytes() + b"\0" + taken.val.tobytes())
    folder = cache / f"drawn-{digest.hexdigest()[:32]}"
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    numbers = {"train": sum(len(one.train) for one in drawn), "val": sum(len(one.val) for one in drawn)}
    with files.held(folder / "lock", f"for a copy of {folder.name}"):
        if not (folder / _WRITTEN).is_file():
            files.write_chunks(folder / TRAIN, _lines(records, [one.train.tolist() for one in drawn], folder))
            files.write_chunks(folder / VAL, _lines(records, [one.val.tolist() for one in drawn], folder))
            files.write_bytes(folder / _WRITTEN, json.dumps(numbers).encode())
            log.info(
                "%s: %s to train, %s to evaluate", folder, counted(numbers["train"], "record"), f"{numbers['val']:,}"
            )
    return folder / TRAIN, folder / VAL if numbers["val"] else None


def _lines(records: Sequence[Records], taken: Sequence[Sequence[int]], onto: Path) -> Iterator[bytes]:
    total = sum(map(len, taken))
    places = ((one, index) for one, indices in zip(records, taken, strict=True) for index in indices)
    for one, index in progress(places, total=total, desc="writing", unit=" records", delay=BRIEF_S, leave=False):
        yield copied_line(one, index, onto)
