"""
Train the demo's models on their own best answers, to prompts one at a time and in batches.

Text is answered by the demo's Qwen2, images by its Qwen2.5-VL, four times each prompt. A way trains
in a process of its own, from the same random weights. Seconds count from the first prompt.
"Generation" is the share of a step that passes before its answers are there to be scored.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import attrs

from benchmarks.child import run_in_child
from benchmarks.options import add_names, add_number
from benchmarks.table import Columns, show
from packplan.app.demo.scenes import corpus, write_data
from packplan.core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig

KINDS = {"text": ("qwen2", "repeat.jsonl", 512), "images": ("qwen2_5_vl", "messages.jsonl", 1024)}
"""Kind of prompts -> model, data file and packing length."""

WAYS = ("one at a time", "in batches")

LIMIT_S = 3600.0
"""Seconds after which a process is ended."""


@attrs.frozen
class RolloutRow:
    """Seconds of all steps of one way."""

    kind: str
    way: str
    prompts: int
    seconds: float
    generation_s: float

    @property
    def share(self) -> float:
        """Share of generation in the steps."""
        return self.generation_s / self.seconds


COLUMNS: Columns = {
    "prompts": lambda row: row.kind,
    "answered": lambda row: row.way,
    "number": lambda row: str(row.prompts),
    "prompts/s": lambda row: f"{row.prompts / row.generation_s:.1f}",
    "s of generation": lambda row: f"{row.generation_s:.2f}",
    "s of all": lambda row: f"{row.seconds:.2f}",
    "generation": lambda row: f"{row.share:.0%}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_names(parser, "--kinds", KINDS, KINDS)
    add_number(parser, "--steps", 12, "of each way")
    add_number(parser, "--packs", 8, "of a step")
    add_number(parser, "--buffer", 64, "samples that are packed together")
    add_number(parser, "--max-new-tokens", 64, "of an answer")


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        run_in_child(partial(_make, folder), limit_s=LIMIT_S)
        rows = [
            RolloutRow(kind, way, **run_in_child(partial(_train, folder, kind, way, options), limit_s=LIMIT_S))
            for kind in options.kinds
            for way in WAYS
        ]
    packages = ("torch", "transformers", "ms-swift")
    show(rows, COLUMNS, left={"prompts", "answered"}, as_json=options.json, packages=packages)


def _make(folder: Path) -> None:
    """Write the demo's data and the models that are measured."""
    # Seconds to load, for this benchmark alone.
    from packplan.app.demo.tiny_models import write_model

    write_data(folder / "data", seed=0, num_train=240, num_val=1)
    for model, _, _ in KINDS.values():
        write_model(folder / "models" / model, model, corpus(folder / "data"), seed=0)


def _train(folder: Path, kind: str, way: str, options: argparse.Namespace) -> dict[str, float]:
    """Train one way; return the number of prompts, and the seconds of all and of generation."""
    # Seconds to load, for this benchmark alone.
    from packplan.adapters.ranks.torch_group import OneRank
    from packplan.adapters.trainer.streams.rollouts import RolloutStream
    from packplan.app.sft import stream

    answers, calls = RolloutStream.answers, list[tuple[int, float, float]]()

    def timed(rollouts: RolloutStream, places: Sequence[int]) -> list[list[str]]:
        started = time.perf_counter()
        if way == "in batches":
            found = answers(rollouts, places)
        else:
            found = [answers(rollouts, [place])[0] for place in places]
        calls.append((len(places), started, time.perf_counter() - started))
        return found

    with patch.object(RolloutStream, "answers", timed):
        stream.run(_config(folder, kind, options), OneRank())
    return {
        "prompts": sum(number for number, _, _ in calls),
        "seconds": time.perf_counter() - calls[0][1],
        "generation_s": sum(seconds for _, _, seconds in calls),
    }


def _config(folder: Path, kind: str, options: argparse.Namespace) -> RunConfig:
    model, data, packing_length = KINDS[kind]
    return RunConfig(
        model=ModelConfig(model=str(folder / "models" / model)),
        template=TemplateConfig(max_length=packing_length),
        custom=CustomConfig(
            train_jsonl=(str(folder / "data" / data),),
            trainer_variant="rollout",
            rollout_reward="word_overlap",
            rollout_max_new_tokens=options.max_new_tokens,
        ),
        training=TrainingConfig(
            output_dir=str(folder / "run"),
            packing_mode="dynamic",
            packing_buffer=options.buffer,
            effective_batch_size=options.packs,
            max_steps=options.steps,
            trainer={
                "learning_rate": 5e-3,
                "use_cpu": True,
                "gradient_checkpointing": False,
                "save_strategy": "no",
                "report_to": [],
                "dataloader_num_workers": 0,
                "disable_tqdm": True,
            },
        ),
    )
