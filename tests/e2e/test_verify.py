"""Verify finds, in a real run, every fault that is planted, and none where nothing is."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from packplan.app import sft
from packplan.app.plan import __main__ as plan
from tests.made.pictures import record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(demo, tmp_path_factory):
    """A folder with data, images and a run that was built from them; it stays as it is."""
    folder = tmp_path_factory.mktemp("built")
    records = []
    for number in range(12):
        Image.fromarray(np.full((60, 80, 3), number, dtype=np.uint8)).save(folder / f"{number}.png")
        records.append(json.dumps(record("what?", [f"{number}.png"], answer="red dot " * (1 + number % 4))))
    (folder / "train.jsonl").write_text("\n".join(records))
    (folder / "val.jsonl").write_text("\n".join(records[:3]))
    write_config(folder, demo)
    assert 0 == plan.main(["build", str(folder / "run.yaml"), "--quiet"])
    return folder


def write_config(folder: Path, demo: Path, system: str = "You look.") -> None:
    sections = {
        "model": {"model": str(demo / "models" / "qwen2_5_vl")},
        "template": {"max_length": 256, "system": system},
        "custom": {"train_jsonl": str(folder / "train.jsonl"), "val_jsonl": str(folder / "val.jsonl")},
        "training": {"output_dir": str(folder / "run"), "packing_drop_last": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))


@pytest.fixture
def run(built, tmp_path):
    """The built folder, in its place, put back after the test."""
    shutil.copytree(built, tmp_path / "kept")
    yield built
    shutil.rmtree(built)
    shutil.copytree(tmp_path / "kept", built)


@pytest.fixture
def verified(capfd):
    """Return a function that verifies a run, and returns the status and the findings as text."""

    def call(folder: Path, *arguments: str) -> tuple[int, list[str]]:
        capfd.readouterr()
        status = plan.main(["verify", str(folder / "run.yaml"), "--json", *arguments])
        document = json.loads(capfd.readouterr().out)
        assert document["passed"] == (status == 0) == (not document["findings"])
        return status, [" ".join(row.values()) for row in document["findings"]]

    return call


def test_what_was_built_is_verified(run, verified, capfd):
    """Samples encoded again, images decoded; nothing of it is written to."""
    before = {path: path.read_bytes() for path in (run / "run").rglob("*") if path.is_file()}

    assert (0, []) == verified(run, "--samples", "5", "--decode")
    assert before == {path: path.read_bytes() for path in (run / "run").rglob("*") if path.is_file()}
    assert 0 == plan.main(["verify", str(run / "run.yaml")])
    assert "train: nothing is wrong with 12 records and their plan\n" in capfd.readouterr().out


def test_every_planted_fault_is_found_at_once(run, demo, verified, capfd):
    """A flipped bit in an array and a manifest, a swapped image, an edited line, a prompt."""
    folder = run / "run" / "static_packing" / "train"
    for name, place in (("raw_plan.indices.bin", 3), ("plan_ws1.json", 40)):
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 4
        (folder / name).write_bytes(content)
    (run / "3.png").write_bytes((run / "4.png").read_bytes())
    lines = (run / "train.jsonl").read_text().splitlines()
    lines[7] = lines[7].replace("red", "red red", 1)
    (run / "train.jsonl").write_text("\n".join(lines))
    write_config(run, demo, "You look again.")

    status, findings = verified(run, "--samples", "12")

    assert 3 == status
    train = [finding for finding in findings if finding.startswith("train ")]
    for words in ("raw_plan.indices.bin", "plan_ws1.json", "image 0 of sample 3 is not the one",
     "data.sha256 of the first 12",
                  "template.system measured with 'You look.', now 'You look again.'",
                  "sample 7 does not measure"):  # fmt: skip
        assert any(words in finding for finding in train), (words, train)
    assert [f for f in findings if f.startswith("eval inputs")] == [
        "eval inputs template.system measured with 'You look.', now 'You look again.'"
    ]
    assert 3 == plan.main(["verify", str(run / "run.yaml")])
    said = capfd.readouterr()
    assert f"error: {len(said.out.splitlines())} findings" in said.err


def test_damage_behind_the_header_is_found_by_decoding(run, verified):
    """Beyond the first 64 KiB, so that only its pixels tell; training would stop there."""
    noise = np.random.default_rng(0).integers(0, 256, (250, 250, 3), dtype=np.uint8)
    Image.fromarray(noise).save(run / "0.png")
    shutil.rmtree(run / "run")
    assert 0 == plan.main(["build", str(run / "run.yaml"), "--quiet"])
    content = bytearray((run / "0.png").read_bytes())
    assert len(content) > 100_000
    content[90_000:90_100] = bytes(100)
    (run / "0.png").write_bytes(content)

    assert (0, []) == verified(run)
    status, findings = verified(run, "--decode")
    assert 3 == status
    assert any("0.png cannot be read" in finding for finding in findings)


def test_a_split_that_is_missing_hides_no_fault_of_the_other(run, verified, capfd):
    """A verification that failed; where nothing is built, status 2 and the command that builds."""
    stored = run / "run" / "static_packing"
    shutil.rmtree(stored / "eval")
    rows = stored / "train" / "lengths.bin"
    rows.write_bytes(bytes([rows.read_bytes()[0] ^ 1]) + rows.read_bytes()[1:])

    status, findings = verified(run)

    assert 3 == status
    for words in ("holds no lengths: build", "lengths.bin"):
        assert any(words in finding for finding in findings), words
    shutil.rmtree(run / "run")
    assert 2 == plan.main(["verify", str(run / "run.yaml")])
    assert "packplan plan build" in capfd.readouterr().err


def test_quiet_commands_say_nothing_but_results(run, write_run, capfd):
    """No note, no progress on standard error; warnings remain. Training prints its numbers."""
    shutil.rmtree(run / "run")
    capfd.readouterr()

    assert 0 == plan.main(["build", str(run / "run.yaml"), "--quiet"])
    assert ("", "") == capfd.readouterr()
    assert 0 == plan.main(["verify", str(run / "run.yaml"), "--quiet", "--json"])
    said = capfd.readouterr()
    assert ({"passed": True, "findings": []}, "") == (json.loads(said.out), said.err)
    assert 0 == sft.main([str(write_run(training={"max_steps": 1})), "--quiet"])
    said = capfd.readouterr()
    assert "loss" in said.out
    assert said.err
    assert all(line.startswith("packplan: warning: ") for line in said.err.splitlines())
