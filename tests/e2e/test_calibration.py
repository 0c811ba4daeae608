"""Steps are measured by their own trainer, and a run says how wrong its forecast was."""

import json
import logging

import pytest

from packplan.app.plan import __main__ as plan
from packplan.app.wiring.forecasts import find_timing, open_calibrations
from packplan.app.wiring.runs import read_config
from tests.processes import _packplan, finished

pytestmark = pytest.mark.slow


@pytest.fixture
def uneven(tmp_path):
    """Write records of many lengths, and return their file."""
    path = tmp_path / "uneven.jsonl"
    turns = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "blue " * (1 + n * n % 61)}]
        for n in range(40)
    ]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    return str(path)


def test_a_run_that_was_calibrated_foretells_itself(  # noqa: PLR0917  # fixtures
    write_run, execute, uneven, capfd, caplog, monkeypatch
):
    """Its packs are timed; then the log counts down, and the last line but one has the error."""
    keys = {"effective_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch"}
    path = write_run("qwen2", training=keys, custom={"train_jsonl": uneven, "val_jsonl": uneven})
    monkeypatch.setattr("packplan.app.wiring.measuring.REPEATS", 1)

    assert 0 == plan.main(["time", str(path), "--calibrate", "--json", "--quiet"])
    assert json.loads(capfd.readouterr().out)["seconds"] > 0
    config = read_config(path)
    assert find_timing(config, world_size=1, attention="varlen")[0] is not None
    ((_, measured),) = open_calibrations(config).entries()
    assert measured["evaluation"]["seconds"] > 0 < measured["checkpoint"]  # a busy machine's fit may see no term
    kept = {file.name for file in (path.parent / "run").iterdir()}
    assert not [name for name in kept if name.startswith(("checkpoint", "calibrating"))]

    monkeypatch.setattr(logging.getLogger("packplan"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="packplan"):
        execute(path)

    lines = [record.getMessage() for record in caplog.records]
    assert "steps measured on" in next(line for line in lines if line.startswith("predicted: "))
    assert " were predicted, " in lines[-2], "before the line of the last checkpoint"


def test_two_ranks_measure_together(write_run, server, uneven, tmp_path):
    """Rank 0 keeps what was measured, and prints."""
    keys, data = {"effective_batch_size": 8, "packing_drop_last": False}, {"train_jsonl": uneven}
    path = write_run("qwen2", training=keys, custom=data)
    words = ("plan", "time", str(path), "training.save_strategy=steps", "--calibrate", "--quiet")

    assert [0, 0] == finished(server.ranks(2, _packplan, *words, folder=tmp_path / "measured"))

    printed = [(tmp_path / "measured" / f"rank{rank}.log").read_text() for rank in range(2)]
    assert ["predicted time" in text for text in printed] == [True, False]
    config = read_config(path)
    assert find_timing(config, world_size=2, attention="varlen")[0].checkpoint > 0
    assert "ranks" in find_timing(config, world_size=1, attention="varlen")[1]
