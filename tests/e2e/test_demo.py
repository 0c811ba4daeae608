"""The demo's data and models: the same bytes from the same seed, of the kinds that it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from app.demo.__main__ import make, make_videos

pytestmark = pytest.mark.slow


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(demo, tmp_path):
    """Data, tokenizers and weights."""
    make(tmp_path / "again", seed=0, num_train=40, num_val=9)
    make(tmp_path / "other", seed=1, num_train=40, num_val=9)

    first, again, other = files(demo), files(tmp_path / "again"), files(tmp_path / "other")
    assert first == {name: again[name] for name in first}
    assert first["data/train.jsonl"] != other["data/train.jsonl"]
    assert first["models/qwen3_vl/model.safetensors"] != other["models/qwen3_vl/model.safetensors"]


def test_records_have_no_image_one_and_several_and_many_sizes(demo):
    """As a real data set does; held-out scenes are other scenes."""
    records = [json.loads(line) for line in (demo / "data" / "train.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (demo / "data" / "val.jsonl").read_text().splitlines()]

    assert {0, 1, 2, 3} == {len(record.get("images", [])) for record in records}
    assert len({(record["width"], record["height"]) for record in records}) > 20
    assert max(len(record["objects"]) for record in records) == 60
    assert not {json.dumps(r["objects"]) for r in records} & {json.dumps(r["objects"]) for r in held_out}
    for record in records:
        for name in record.get("images", []):
            with Image.open(demo / "data" / name) as image:
                assert (record["width"], record["height"]) == image.size


def test_videos_come_alone_and_beside_images_and_text(tmp_path):
    """Every file that a record names is there, and the same bytes come again."""
    for name in ("first", "again"):
        make_videos(tmp_path / name)
    made, again = files(tmp_path / "first"), files(tmp_path / "again")
    records = [json.loads(line) for line in made["videos/videos.jsonl"].decode().splitlines()]

    assert again == made
    kinds = {(len(record.get("videos", [])), len(record.get("images", []))) for record in records}
    assert {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)} == kinds
    named = {name for record in records for key in ("videos", "images") for name in record.get(key, [])}
    assert {f"videos/{name}" for name in named} == made.keys() - {"videos/videos.jsonl"}
