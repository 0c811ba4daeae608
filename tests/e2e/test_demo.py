"""The demo's data and models: the same bytes from the same seed, of the kinds that it promises."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from packplan.app.opening.runs import read_config
from tests.processes import finished
from tools.demo.__main__ import main, make, make_videos

pytestmark = pytest.mark.slow


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(demo, tmp_path):
    """Data, tokenizers and weights; other tests may have written files of their own beside them."""
    make(tmp_path / "again", seed=0, num_train=40, num_val=9)
    make(tmp_path / "other", seed=1, num_train=40, num_val=9)

    first, again, other = files(demo), files(tmp_path / "again"), files(tmp_path / "other")
    assert again == {name: first[name] for name in again}
    assert first["data/train.jsonl"] != other["data/train.jsonl"]
    assert first["models/qwen3_vl/model.safetensors"] != other["models/qwen3_vl/model.safetensors"]


@pytest.mark.parametrize("name", ["plain", "my demo's, [b] #c"])
def test_what_was_made_is_said_with_the_command_that_trains_on_it(tmp_path, capsys, name):
    """Folders, models, files and their records; the command names what is there, as YAML."""
    tmp_path /= name
    assert 0 == main(["make", "--folder", str(tmp_path), "--train", "4", "--val", "1"])
    models, data, train = capsys.readouterr().out.splitlines()

    assert models.startswith(f"{tmp_path / 'models'}: qwen2_5_vl, qwen3_vl, qwen2, qwen3; ")
    wanted = ", ".join(f"{name}.jsonl (4 records)" for name in ("colours", "messages", "repeat", "train"))
    assert f"{tmp_path / 'data'}: {wanted}, val.jsonl (1 record), and their media" == data
    said, _, command = train.partition(": ")
    assert "train on them" == said
    program, _, path, *overrides = shlex.split(command)
    assert Path(sys.executable).with_name("packplan") == Path.cwd() / shutil.which(program)
    config = read_config(path, overrides)
    for held in (f"{config.model.model}/config.json", *config.custom.train_jsonl, *config.custom.val_jsonl):
        assert tmp_path in Path(held).parents
        assert Path(held).is_file()
    assert str(tmp_path / "run") == config.training.output_dir


def test_the_tutorial_shows_what_its_commands_print(server, tmp_path, monkeypatch, capsys):
    """What is made, where the plan is, and its table, word by word; from another folder."""
    root = Path(__file__).parents[2]
    sections = (root / "docs" / "tutorial.md").read_text().split("\n## ")
    shown = "".join(re.findall(r"```text\n(.*?)```", "".join(sections[2:4]), re.DOTALL)).splitlines()
    (tmp_path / "app").symlink_to(root / "app")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)

    assert 0 == main(["make"])
    built = server.packplan("plan", "build", "app/demo.yaml")
    table = server.packplan("plan", "show", "app/demo.yaml")

    assert [0, 0] == finished([built, table])
    said = f"{capsys.readouterr().out}\n{built.said}\n{table.printed}".replace(f"{root}/", "").splitlines()
    assert len(shown) > 12
    assert [] == [line for line in shown if line not in said]


def test_records_have_no_image_one_and_several_and_many_sizes(demo):
    """As a real data set does; held-out scenes are other scenes."""
    texts = ((demo / "data" / f"{name}.jsonl").read_text() for name in ("train", "val"))
    records, held_out = ([*map(json.loads, text.splitlines())] for text in texts)

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
    make_videos(tmp_path / "first")
    make_videos(tmp_path / "again")
    made = files(tmp_path / "first")
    records = [json.loads(line) for line in made["videos/videos.jsonl"].decode().splitlines()]
    media = [(record.get("videos", []), record.get("images", [])) for record in records]

    assert files(tmp_path / "again") == made
    assert {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)} == {(len(videos), len(images)) for videos, images in media}
    assert {f"videos/{name}" for both in media for one in both for name in one} == made.keys() - {"videos/videos.jsonl"}
