"""The code of docs/use-it-in/ runs as it stands, `path/to/…` being a tiny model's files."""

import json
import re
from functools import partial

import pytest

from tests.hosts.pages import HOSTED, Reader, hosted, plan_of
from tests.processes import is_whole
from tests.records import write_lines

pytestmark = pytest.mark.slow


@hosted
@pytest.mark.parametrize("script", ["train.py", "sft.py"])
def test_the_trainers_of_the_page_go_on_after_a_kill(script, reader, made):
    """On two ranks, from the newest checkpoint to the last of the steps that the page prints."""
    at = reader("transformers")
    *first, last = [words for words in at.commands if script in words]
    for words in first:
        at.run(words, partial(is_whole, at.folder / "out" / "checkpoint-3" / "trainer_state.json"))
    printed = at.run(last)

    total = int(re.search(r"^(\d+) steps$", printed, re.MULTILINE).group(1))
    assert plan_of(made).schedule(world_size=2, packs_per_step=4, epochs=2).total_steps == total
    state = json.loads((at.folder / "out" / f"checkpoint-{total}" / "trainer_state.json").read_text())
    assert list(range(1, total + 1)) == [entry["step"] for entry in state["log_history"] if "loss" in entry]


@hosted
def test_the_page_of_trl_leaves_padding_out(reader):
    """By its first file: pairs, and a reference model."""
    at = reader("transformers")

    real, padded = map(int, re.search(r"real=(\d+), padded=(\d+)", at.run(at.commands[0])).groups())

    assert 24 * 10 < real < padded  # 24 pairs of words


@hosted
def test_the_page_of_trl_plans_pairs(reader):
    """By its own file, on two ranks, to the last of the steps that it prints."""
    at = reader("transformers")

    printed = at.run(next(words for words in at.commands if "pairs.py" in words))

    total = int(re.search(r"^(\d+) steps$", printed, re.MULTILINE).group(1))
    assert total == len(re.findall(r"'rewards/margins'", printed)) > 0


@hosted
def test_the_page_of_proofs_proves(reader):
    """A model by its name, a trainer's own batch and step, on ranks too, and the page's tests."""
    at = reader("prove")
    probed, alone, together, tested = (at.run(command) for command in at.commands)

    assert re.search(r"^auto +yes +0 ", probed, re.MULTILINE)
    assert re.search(r"Comparison\(logits=\([\d.e-]+, ", alone)
    assert 1 == len(re.findall(r"StepLoss\(loss=[\d.]+, due=", alone))
    assert 2 == len(re.findall(r"StepLoss\(loss=[\d.]+, due=", together))
    assert re.search(r"2 passed, 1 skipped|3 passed", tested)


@pytest.mark.skipif(HOSTED, reason="the demo, which makes the processor, needs ms-swift")
def test_the_trainer_of_transformers_sees_images(demo, server, tmp_path):
    """By the page's second file, with the processor of a tiny model."""
    (picture, *_) = sorted((demo / "data").rglob("*.png")) or sorted((demo / "data").rglob("*.jpg"))
    text = "<|vision_start|><|image_pad|><|vision_end|>" + "a red dot " * 3
    records = tmp_path / "records.jsonl"
    write_lines(records, [{"text": text + "and blue " * n, "image": str(picture)} for n in range(6)])
    given = {"path/to/vision-model": demo / "models" / "qwen2_5_vl", "path/to/records.jsonl": records}
    at = Reader(server, "transformers", tmp_path, given)

    printed = at.run(at.commands[-1])

    assert re.search(r"'loss': '?\d", printed), printed
