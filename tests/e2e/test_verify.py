"""Verify finds, in a real run, faults of every kind that are planted, and none where nothing is."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from packplan.app import sft
from packplan.app.plan import __main__ as plan
from tests.made.pictures import showing
from tests.records import write_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def run(demo, tmp_path, capfd):
    """Return the YAML of a run, which is built, without a word on standard output and error."""
    for number in range(12):
        Image.fromarray(np.full((60, 80, 3), number, dtype=np.uint8)).save(tmp_path / f"{number}.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (250, 250, 3), np.uint8)).save(tmp_path / "0.png")
    records = [showing(images=[f"{n}.png"], answer="red dot " * (1 + n % 4)) for n in range(12)]
    for name, count in (("train", 12), ("val", 3)):
        write_lines(tmp_path / f"{name}.jsonl", records[:count])
    sections = {
        "model": {"model": str(demo / "models" / "qwen2_5_vl")},
        "template": {"max_length": 256, "system": "You look."},
        "custom": {"train_jsonl": str(tmp_path / "train.jsonl"), "val_jsonl": str(tmp_path / "val.jsonl")},
        "training": {"output_dir": str(tmp_path / "run"), "packing_drop_last": False},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    capfd.readouterr()
    assert 0 == plan.main(["build", str(path), "--quiet"])
    assert ("", "") == capfd.readouterr()
    return path


def change(path: Path, place: int, content: bytes) -> None:
    path.write_bytes(path.read_bytes()[:place] + content + path.read_bytes()[place + len(content) :])


def test_what_was_built_is_verified_and_each_planted_fault_is_found_at_once(run, capfd):
    """Flipped bits, swapped and damaged images, an edited line, a prompt, a missing split."""

    def verify(*words: str) -> tuple[int, str]:
        status = plan.main(["verify", str(run), "--quiet", "--json", *words])
        said = capfd.readouterr()
        document = json.loads(said.out)
        assert document["passed"] == (status == 0) == (not document["findings"]) == ("findings" not in said.err)
        return status, "\n".join(" ".join(row.values()) for row in document["findings"])

    folder, stored = run.parent, run.parent / "run" / "static_packing"
    before = {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()}
    assert (0, "") == verify("--samples", "5", "--decode")
    assert before == {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()}
    assert 0 == plan.main(["verify", str(run)])
    assert "train: nothing is wrong with 12 records and their plan\n" in capfd.readouterr().out

    # Behind the first 64 KiB, so that only its pixels tell; training would stop there.
    change(folder / "0.png", 90_000, bytes(100))
    assert (0, "") == verify()
    for name, place in (("raw_plan.indices.bin", 3), ("plan_ws1.json", 40)):
        change(stored / "train" / name, place, bytes([(stored / "train" / name).read_bytes()[place] ^ 4]))
    shutil.copy(folder / "4.png", folder / "3.png")
    lines = (folder / "train.jsonl").read_text().splitlines()
    lines[7] = lines[7].replace("red", "red red", 1)
    (folder / "train.jsonl").write_text("\n".join(lines))
    run.write_text(run.read_text().replace("You look.", "You look again."))
    shutil.rmtree(stored / "eval")

    status, findings = verify("--samples", "12", "--decode")

    assert 3 == status
    for words in (
        "train .*raw_plan.indices.bin", "train .*plan_ws1.json", "train .*image 0 of sample 3 has changed since",
        "train images .*0.png cannot be read", "train .*: 1 of 12 records is new or changed, .*jsonl, line 8",
        "train .*sample 7 has other measurements",
        "train .*template.system measured with 'You look.', now 'You look again.'", "eval .*holds no lengths: packplan",
    ):  # fmt: skip
        assert re.search(words, findings), (words, findings)
    assert 3 == plan.main(["verify", str(run)])
    said = capfd.readouterr()
    assert f"error: {len(said.out.splitlines())} findings" in said.err
    shutil.rmtree(run.parent / "run")
    assert 2 == plan.main(["verify", str(run)])
    assert "packplan plan build" in capfd.readouterr().err


def test_quiet_training_says_its_warnings_alone(write_run, capfd):
    """No note, no progress and no numbers, which are in the run's log."""
    assert 0 == sft.main([str(write_run(training={"max_steps": 1})), "--quiet"])
    said = capfd.readouterr()
    assert not said.out
    assert said.err
    assert all(line.startswith(("packplan: warning: ", "  ")) for line in said.err.splitlines())
