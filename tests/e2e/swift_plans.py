"""Tiny data sets for commands of ms-swift, and what a run of one has trained."""

import json
from pathlib import Path
from typing import Any

import packplan as pp

ROOT = Path(__file__).parents[2]

LENGTH = {"qwen2": 256, "qwen2_5_vl": 200}
"""Model -> packing length."""

PLAIN = (
    "--torch_dtype float32 --fp16 false --bf16 false --report_to none --check_model false --use_cpu true "
    "--dataset_shuffle false --add_version false --split_dataset_ratio 0 --dataset_num_proc 1 "
    "--dataloader_num_workers 0 --gradient_checkpointing false --logging_steps 1 --learning_rate 1e-3 "
    "--per_device_train_batch_size 1 --lora_dropout 0"
)

NUM = 21
"""Records of each file; the first half of them with images."""


def write_records(folder: Path, demo: Path) -> None:
    """Write records for each model, and pairs."""
    images = sorted((demo / "data" / "images").glob("train_*"), key=lambda image: image.stat().st_size)[:3]
    lines: dict[str, list[str]] = {name: [] for of in LENGTH for name in (of, f"{of}_pairs")}
    for number in range(NUM):
        question = {"role": "user", "content": f"what is {number}?"}
        record = {"messages": [question, {"role": "assistant", "content": "blue circle " * (1 + 5 * number % 23)}]}
        rejected = {"rejected_response": "red square " * (1 + number % 3)}
        for of in LENGTH if number <= NUM // 2 else ["qwen2"]:
            if of.endswith("vl") and number % 2:
                question["content"] = f"<image>{question['content']}"
                record["images"] = [str(images[number % len(images)])]
            lines[of].append(json.dumps(record))
            lines[f"{of}_pairs"].append(json.dumps(record | rejected))
    for name, texts in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{text}\n" for text in texts))


class Ran:
    """A run of a command of ms-swift, perhaps of several processes after one another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, rank: int = 0) -> list[list[list[int]]]:
        """Sequences of each row of the data set."""
        return json.loads((self.folder / f"rows{rank}.json").read_text())

    def trained(self, rank: int = 0) -> list[tuple[int, list[list[int]]]]:
        """Step and sequences of each microbatch of a rank, in order."""
        lines = (self.folder / f"trained{rank}.jsonl").read_text().splitlines()
        return [(step, sorted(sequences)) for step, sequences in map(json.loads, lines)]

    @property
    def said(self) -> str:
        """Text that rank 0 has printed."""
        return (self.folder / "said0").read_text()

    @property
    def history(self) -> list[dict[str, Any]]:
        """Entries of the log."""
        return json.loads((self.folder / "history0.json").read_text())

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [entry["loss"] for entry in self.history if "loss" in entry]

    def plan(self, length: int) -> pp.Plan:
        """Plan of the rows that ms-swift has."""
        return pp.plan([sum(map(len, row)) for row in self.rows()], length, algorithm="constant_volume")

    def planned(self, plan: pp.Plan, schedule: pp.EpochSchedule, rank: int = 0) -> list[tuple[int, list[list[int]]]]:
        """Step and sequences of each microbatch that a schedule gives a rank."""
        rows = self.rows(rank)
        return [
            (step.number, sorted(tokens for pack in batch for index in plan.packs[pack] for tokens in rows[index]))
            for step in schedule.steps(rank=rank)
            for batch in step.batches
        ]

    def assert_planned(self, plan: pp.Plan, schedule: pp.EpochSchedule) -> None:
        """Each rank's microbatches are those of the schedule, with all sequences of their rows."""
        for rank in range(schedule.world_size):
            assert self.planned(plan, schedule, rank) == self.trained(rank)
