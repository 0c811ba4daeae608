"""Runs over the tiny models: how a test writes a YAML and executes it in this process."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.network import free_port

DEADLINE_S = 240

Sections = dict[str, dict[str, Any]]


@pytest.fixture
def write_run(demo: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a quick run's YAML; sections given to it overlay the quick ones."""

    def write(of: str = "qwen2_5_vl", name: str = "run", **overlay: dict[str, Any]) -> Path:
        sections: Sections = {
            "model": {"model": str(demo / "models" / of)},
            "template": {"max_length": 1024, "system": "You look at scenes."},
            "custom": {"train_jsonl": str(demo / "data" / "train.jsonl")},
            "training": {
                "output_dir": str(tmp_path / name),
                "num_train_epochs": 1,
                "learning_rate": "5e-3",
                "logging_steps": 1,
                "report_to": [],
                "save_strategy": "no",
                "gradient_checkpointing": False,
                "dataloader_num_workers": 0,
            },
        }
        for section, keys in overlay.items():
            sections[section] |= keys
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


@pytest.fixture
def execute() -> Callable[[Path], Any]:
    """Return a function that plans and trains in this process, and returns the result."""
    from adapters.torch_group import OneRank
    from app import sft, wiring

    return lambda path: sft.run(wiring.read_config(path), OneRank())


@pytest.fixture
def text_jsonl(tmp_path: Path) -> Path:
    """Write records without images, of several lengths, and return their file."""
    path = tmp_path / "text.jsonl"
    records = [
        {
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": "blue circle " * (1 + n % 7)},
            ]
        }
        for n in range(30)
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture
def fetched(monkeypatch) -> list[int]:
    """Packs, as they are fetched in this process."""
    from adapters import packed_dataset

    positions: list[int] = []
    plain = packed_dataset.PackedDataset.__getitem__

    def noted(dataset, position):
        positions.append(position)
        return plain(dataset, position)

    monkeypatch.setattr(packed_dataset.PackedDataset, "__getitem__", noted)
    return positions


@pytest.fixture(scope="session")
def forkserver():
    """Processes that fork from one that has imported the stack, once, and has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.rank_main"])
    return context


class Ranks:
    """Starts ranks, and waits for them."""

    def __init__(self, context) -> None:
        self._context = context
        self._started = []

    def __call__(self, world_size: int, *arguments: object) -> list:
        """Start the ranks of `rank_main` with these arguments: a YAML, an output folder, perhaps a fault."""
        from tests.e2e import rank_main

        port, words = free_port(), tuple(map(str, arguments))
        Path(words[1]).mkdir(parents=True, exist_ok=True)
        ranks = [
            self._context.Process(target=rank_main.forked, args=(r, world_size, port, words)) for r in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        self._started += ranks
        return ranks

    @staticmethod
    def finished(ranks: list, out: Path) -> list[int]:
        """Wait for ranks; return their exit statuses."""
        for rank in ranks:
            rank.join(DEADLINE_S)
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(out.glob("rank*.log")))
        assert all(rank.exitcode is not None for rank in ranks), logs
        return [rank.exitcode for rank in ranks]

    @staticmethod
    def seen(out: Path, world_size: int) -> list[dict[str, Any]]:
        """Return what each rank wrote down."""
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]

    def kill(self) -> None:
        """Kill what is left."""
        for process in self._started:
            if process.is_alive():
                process.kill()
                process.join()


@pytest.fixture
def start_ranks(forkserver, monkeypatch):
    """Return what starts ranks; those left at the end are killed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = Ranks(forkserver)
    yield ranks
    ranks.kill()
