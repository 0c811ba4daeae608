"""Benchmarks measure what they name, and print it as a table or as one document."""

import json
import os
import subprocess
import sys
import time
from unittest.mock import patch

import numpy as np
import pytest
from attrs import evolve

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.child import NotMeasuredError, measure
from benchmarks.distributions import DISTRIBUTIONS
from benchmarks.peers import PEERS
from packplan.adapters.trainer.loader import PackedDataset
from packplan.core.packers import ALGORITHMS, pack
from tests.processes import lives, wait_for


@pytest.fixture
def document(capsys):
    """Return a function that runs a benchmark, and returns its document."""

    def run(*words: str) -> dict:
        assert 0 == main([*words, "--json"])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.slow
def test_all_planners_are_compared(document):
    """Every planner and installed peer has figures."""
    rows = document("planner", "--samples", "300", "--distributions", "sft-2048", "--repeat", "1")["rows"]

    peers = [name for name, peer in PEERS.items() if peer.is_installed]
    assert [(300, name) for name in [*ALGORITHMS, *peers]] == [(row["samples"], row["planner"]) for row in rows]
    for row in rows:
        assert row["problem"] is None
        assert row["packs"] >= row["lower_bound"] > 0
        assert row["gap"] == (row["packs"] - row["lower_bound"]) / row["lower_bound"]
        assert row["seconds"] > 0
    lengths = DISTRIBUTIONS["sft-2048"].lengths(300, seed=0)
    packed = {row["planner"]: row["packs"] for row in rows}
    assert packed["certified"] == len(pack(lengths, capacity=2048, algorithm="certified"))
    assert packed["binpacking"] == packed["constant_volume"]


def test_a_peer_that_is_absent_is_named(capsys):
    """In one line; the others have figures."""
    absent = evolve(PEERS["binpacking"], module="absent.planner")
    with patch.dict(PEERS, {"binpacking": absent}):
        words = "planner --samples 50 --distributions sft-2048 --repeat 1 --planners concatenative binpacking"
        assert 0 == main(words.split())

    out = capsys.readouterr().out
    assert "not installed, and left out: binpacking\n" in out
    assert 1 == out.count("sft-2048")


@pytest.mark.parametrize(("accumulation", "above"), [(4, 0.08), (2, 0.085)])
def test_packs_of_their_own_degree_take_hardly_longer_than_the_ideal(accumulation, above, document):
    """1 % of the chats are longer than a pack; no rank computes more than a packing length."""
    rows = document("degrees", "--tails", "0.01", "--accumulation", str(accumulation))["rows"]

    assert ["whole", "fixed 16", "own", "whole", "fixed 8", "own"] == [row["way"] for row in rows]
    for whole, fixed, own in (rows[:3], rows[3:]):
        assert own["seconds"] < (1 + above) * own["ideal"]
        assert own["seconds"] < fixed["seconds"] < whole["seconds"]
        assert own["packing_length"] >= own["tokens"] == fixed["tokens"] < whole["tokens"]


@pytest.mark.slow
def test_a_call_over_the_limit_is_ended_with_what_it_started(tmp_path):
    """Its process and that process's child are gone."""

    def prepare():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
        return lambda: time.sleep(600)

    with pytest.raises(NotMeasuredError, match=r"^over 2 s$"):
        measure(prepare, lambda _: None, repeat=1, limit_s=2)

    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(map(lives, pids)), "a process is left")


@pytest.mark.slow
def test_a_call_is_measured_in_seconds_and_bytes(capfd):
    """Bytes of an array are seen, nothing that the call prints; a process that dies is named."""

    def made():
        os.write(1, b"of a library")
        os.write(2, b"a warning of it")
        return np.ones(8_000_000)

    cost = measure(lambda: made, lambda array: array.size, repeat=3, limit_s=60)

    assert (3, 8_000_000) == (cost.num_runs, cost.result)
    assert 0.9 < cost.peak_bytes / np.ones(8_000_000).nbytes < 1.6
    assert 0 < cost.seconds
    assert ("", "") == capfd.readouterr()
    with pytest.raises(NotMeasuredError, match="its process died"):
        measure(lambda: lambda: os._exit(3), str, repeat=1, limit_s=60)


TINY = [
    ("redraw --samples 500 --distributions chat-4096 --repeat 1", ("own_seconds",)),
    ("epochs --samples 300 --repeat 1", ("pack_seconds", "times_pack")),
    ("loader --packs 2 --samples 3 --tokens 9 --rounds 1", ("seconds", "over_flattening")),
    ("train --width 128 --layers 1 --samples 5 --rounds 2 --kinds images --packs 300 --ways packed padded",
     ("peak_bytes", "tokens_per_sample", "flops")),
]  # fmt: skip
"""Words of a benchmark -> fields of its rows that are above 0."""

LARGER = [
    ("forecast --settings text --samples 60 --unseen 1 --width 128 --layers 1 --pack 256", ("step_s",)),
    ("memory --settings text-full-1 --width 128 --layers 1 --max-length 256 --samples 6", ()),
    ("rows --ranks 1 2 --tokens 64 --width 32 --vocabulary 64", ("peak", "seconds", "loss")),
    ("degrees --measure --measured-ranks 2 --tokens 64 --width 32 --vocabulary 64 --tails 0.01", ("seconds",)),
    ("lengths --parts kinds chats --samples 80 --rows 80 --workers 1", ("samples_per_s", "cpu_ms")),
    ("lengths --parts videos --videos 2", ("cpu_ms",)),
]
"""Those that start interpreters, or train for longer: in `make test-hosts`."""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "figures"), LARGER if "EVERY_CELL" in os.environ else TINY)
def test_a_benchmark_has_figures_of_every_row(document, words, figures):
    """All above 0, and nothing went wrong."""
    rows = document(*words.split())["rows"]

    assert rows
    assert all(row[name] > 0 for row in rows for name in figures)
    assert not any(row.get("problem") for row in rows)


def test_every_benchmark_is_run_with_tiny_sizes():
    """Here, in a test beside, or in those of hosts: one that reads what is gone fails."""
    run = {words.split()[0] for words, _ in TINY + LARGER} | {"planner", "rl", "work", "unpad"}
    assert {*BENCHMARKS} == run


@pytest.mark.slow
def test_a_patch_that_does_not_bite_ends_the_benchmark(monkeypatch, capsys):
    """Samples that are encoded within the timed epochs would be part of the time of every way."""
    keep_first = property(lambda self: self.own, lambda self, value: vars(self).setdefault("own", value))
    monkeypatch.setattr(PackedDataset, "encoder", keep_first, raising=False)

    words = "train --width 128 --layers 1 --samples 2 --rounds 1 --kinds text --ways packed"
    assert 0 != main(words.split())

    assert "only 0 of 2 samples were read from the encoded ones" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "num_rows"),
    [
        ("planner --samples 200 --distributions detcap-8192 --planners best_fit_decreasing", 1),
        ("rl --sequences=256 --global-batch=128 --workers=4 --budget=12000 --batches=3", 3),
        ("work --samples 2000 --data chat --ranks 2 --accumulation 1", 5),
    ],
)
def test_a_table_is_aligned_and_names_the_machine(capsys, words, num_rows):
    """A line for each row, below those of the head."""
    assert 0 == main(words.split())

    *table, _, machine = capsys.readouterr().out.splitlines()
    assert 2 + num_rows == len(table)
    assert 1 == len({len(line) for line in table})
    assert f"cores {os.cpu_count()}; " in machine
    assert f"numpy {np.__version__}" in machine
