"""A record that is written into another file is read as the same record, or refused."""

import base64
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packplan.adapters.samples.files import copied_line, open_records
from packplan.core.errors import RecordError
from packplan.core.samples import to_messages
from tests.records import asked

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 120


@pytest.mark.parametrize(
    "record",
    [
        asked("<image>", images=["0.png"]),
        asked("<image>", image={"path": "0.png", "source": "a.txt"}),
        asked([{"type": "image_url", "image_url": {"url": "0.png"}}, {"type": "text", "text": "?"}]),
        {"q": "?", "r": "so.", "bild": "0.png"},
        asked("?", videos=[["0.png", {"path": "0.png"}]]),
    ],
)
def test_a_record_that_names_media_is_copied_within_their_folder(tmp_path, record):
    """By whatever link leads there; elsewhere, the names would be those of other files."""
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "a.jsonl").write_text(json.dumps(record))
    records, columns = (
        open_records((str(tmp_path / "data" / "a.jsonl"),)),
        {"q": "query", "r": "response", "bild": "image"},
    )

    assert record == json.loads(copied_line(records, 0, tmp_path / "link", columns=columns))
    with pytest.raises(RecordError, match=rf"a.jsonl, line 1: a copy in .* name a file in {tmp_path}/data"):
        copied_line(records, 0, tmp_path, columns=columns)


def test_images_that_stand_in_a_row_are_written_in_base64(tmp_path):
    """And are the same bytes in whatever folder."""
    rows = [asked("<image>", images=[image]) for image in (PNG, {"bytes": PNG, "path": None})]
    for number, row in enumerate(rows):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
        records = open_records((str(tmp_path / f"{number}.parquet"),), cache=tmp_path / "cache")

        copied = json.loads(copied_line(records, 0, tmp_path / "to"))

        assert [PNG] == to_messages(copied)["images"]
        assert base64.b64encode(PNG).decode() in json.dumps(copied)


def test_a_path_that_no_text_holds_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xe9")
    folder.mkdir()
    (tmp_path / "a.jsonl").write_text(json.dumps(asked("<image>", images=["0.png"])))

    with pytest.raises(RecordError, match=r"a\.jsonl, line 1: a copy"):
        copied_line(open_records((str(tmp_path / "a.jsonl"),)), 0, folder)
