"""Runs over the tiny models: how a test writes a YAML and executes it in this process."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from packplan.core.errors import PackplanError
from tests.processes import Started
from tests.records import chat, write_lines
from tests.stored import asked, remember_verdict


@pytest.fixture(scope="session", autouse=True)
def _stack():
    """Import the libraries before the first test, and hide them from the garbage collector."""
    import tests.stack  # noqa: F401


@pytest.fixture
def encodes_again() -> None:
    """Let a test that asks for this encode samples again, as commands do."""


@pytest.fixture(autouse=True)
def _light(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs neither encode samples again, nor wait for a disk, nor patch torch for others."""
    from torch.utils import checkpoint
    from transformers import modeling_utils

    from tests.e2e.rank_main import encode_once, measure

    # A run of another test, in a fixture of its module, may have left ms-swift's functions there.
    plain = getattr(checkpoint, "_old_checkpoint", checkpoint.checkpoint)
    for module in (checkpoint, modeling_utils):
        monkeypatch.setattr(module, "checkpoint", plain)
    monkeypatch.delattr(checkpoint, "_old_checkpoint", raising=False)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    if "encodes_again" not in request.fixturenames:
        monkeypatch.setattr(measure, "check_repeatability", encode_once)


@pytest.fixture(scope="session")
def few_scenes(demo: Path) -> Path:
    """Return a file of the demo's last dozen records, some with images, beside them."""
    path = demo / "data" / "few.jsonl"
    path.write_text("".join((demo / "data" / "train.jsonl").read_text().splitlines(keepends=True)[-12:]))
    return path


@pytest.fixture
def write_run(demo: Path, text_jsonl: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a quick run's YAML, of a text model over short records."""

    def write(of: str = "qwen2_5_vl", name: str = "run", **overlay: dict[str, Any]) -> Path:
        has_images = of.endswith("vl")
        sections: dict[str, Any] = {
            "model": {"model": str(demo / "models" / of)},
            "template": {"max_length": 1024 if has_images else 256, "system": "You look at scenes."},
            "custom": {"train_jsonl": str(demo / "data" / "train.jsonl" if has_images else text_jsonl)},
            "training": {
                "output_dir": str(tmp_path / name), "num_train_epochs": 1, "learning_rate": "5e-3", "logging_steps": 1,
                "report_to": [], "save_strategy": "no", "gradient_checkpointing": False, "dataloader_num_workers": 0,
            },
        }  # fmt: skip
        for section, keys in overlay.items():
            sections[section] |= keys
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


@pytest.fixture
def open_source(write_run: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Return a function that opens records, or a file of them: what measures and what encodes."""
    from packplan.app.opening.runs import read_config
    from packplan.app.opening.splits import open_splits

    def open_(records: Any, of: str = "qwen2_5_vl", *, custom: Any = (), **template: Any) -> tuple[Any, Any]:
        data = records if isinstance(records, Path) else write_lines(tmp_path / "data.jsonl", records)
        custom, training = {"train_jsonl": str(data), **dict(custom)}, {"packing_length_precompute_workers": 1}
        split = open_splits(read_config(write_run(of, custom=custom, template=template, training=training)))["train"]
        return split.source, split.encoder

    return open_


@pytest.fixture
def ready() -> Callable[[Path], Any]:
    """Return a function that plans in this process, and returns a run that is ready to train."""
    from packplan.adapters.ranks.torch_group import OneRank
    from tests.e2e.ready import prepare

    return lambda path: prepare(_recall(path), OneRank())


@pytest.fixture
def execute() -> Callable[[Path], Any]:
    """Return a function that plans and trains in this process, and returns the result."""
    from packplan.adapters.ranks.torch_group import OneRank
    from tests.e2e.ready import train

    def run(path: Path) -> Any:
        result = train(config := _recall(path), OneRank())
        remember_verdict(config)
        return result

    return run


@pytest.fixture
def text_jsonl(tmp_path: Path) -> Path:
    """Write records without images, of several lengths, and return their file."""
    turns = ((f"say {n}", "blue circle " * (1 + n % 7)) for n in range(30))
    records = (chat({"role": "user", "content": one}, {"role": "assistant", "content": other}) for one, other in turns)
    return write_lines(tmp_path / "text.jsonl", records)


@pytest.fixture
def shortcuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples, as they are measured in this process by the shortcut."""
    from packplan.adapters.samples.measurer import SwiftMeasurer as Measurer

    seen, plain = [], Measurer.measure_batch
    monkeypatch.setattr(Measurer, "measure_batch", lambda self, n, **more: seen.extend(n) or plain(self, n, **more))
    return seen


@pytest.fixture
def fetched(monkeypatch) -> list[int]:
    """Packs, as they are fetched in this process."""
    from packplan.adapters.trainer.loader import PackedDataset as Packs

    seen, plain = [], Packs.__getitem__
    monkeypatch.setattr(Packs, "__getitem__", lambda dataset, pack: seen.append(pack) or plain(dataset, pack))
    return seen


@pytest.fixture
def start_ranks(server):
    """Return a function that starts the ranks of `rank_main`, which find the stored verdict."""
    from tests.e2e import rank_main

    def start(world_size: int, path: Path, out: Path, fault: str = "") -> list[Started]:
        _recall(path)
        return server.ranks(world_size, rank_main.main, str(path), str(out), fault, folder=out)

    return start


def _recall(path: Path) -> Any:
    """Return a run's configuration, with the verdict on its model stored unless it is refused."""
    from packplan.app.opening.runs import read_config

    with contextlib.suppress(PackplanError):
        asked(path)
    return read_config(path)
