"""Runs commands of ms-swift, with tiny models and data, as one rank; what they have trained."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile, is_zipfile

import packplan as pp
from tests.records import write_lines

LENGTH = {"qwen2": 256, "qwen2_5_vl": 200}
"""Model -> packing length."""

PLAIN = (
    "--torch_dtype float32 --fp16 false --bf16 false --report_to none --check_model false --use_cpu true "
    "--dataset_shuffle false --add_version false --split_dataset_ratio 0 --dataset_num_proc 1 "
    "--dataloader_num_workers 0 --gradient_checkpointing false --logging_steps 1 --learning_rate 1e-3 "
    "--per_device_train_batch_size 1 --lora_dropout 0"
)

NUM = 21
"""Records of the text model; the other one has the first half of them, some with an image."""


def write_records(folder: Path, demo: Path) -> None:
    """Write records for each model, to train and to evaluate, and pairs."""
    images = sorted((demo / "data" / "images").glob("train_*"), key=lambda image: image.stat().st_size)[:3]
    for of in LENGTH:
        rows, pairs = [], []
        for number in range(NUM if of == "qwen2" else NUM // 2 + 1):
            has_image = of.endswith("vl") and number % 2
            question = {"role": "user", "content": f"{'<image>' * has_image}what is {number}?"}
            answer = {"role": "assistant", "content": "blue circle " * (1 + 5 * number % 23)}
            media = {"images": [str(images[number % len(images)])]} if has_image else {}
            rows.append({"messages": [question, answer], **media})
            pairs.append({**rows[-1], "rejected_response": "red square " * (1 + number % 3)})
        write_lines(folder / f"{of}.jsonl", rows)
        write_lines(folder / f"{of}_val.jsonl", rows[:6])  # three packs, also of two ranks
        write_lines(folder / f"{of}_pairs.jsonl", pairs)


def main(commands: list[tuple[str, str, list[str]]], folder: str) -> None:
    """
    Run commands in turn: name, task and words.

    In a folder of its name, each writes what `Spy` writes, what it says, and its log, or its error.
    """
    from swift.pipelines import pretrain_main, rlhf_main, sft_main

    from packplan.app import plugin
    from packplan.app.plan.__main__ import main as plan
    from tests.verdicts import keep_verdicts

    tasks = {"sft": sft_main, "pt": pretrain_main, "rlhf": rlhf_main, "plan": plan, "plugin": plugin.main}
    spy = Spy(folder)
    start_adapters_alike()
    keep_verdicts()
    for name, task, words in commands:
        spy.folder = Path(folder, name)
        spy.folder.mkdir(exist_ok=True)
        if "damaged" in name:
            copy_damaged(Path(folder, name.replace("-damaged", ""), "out", "checkpoint-2"), spy.folder / "checkpoint-2")
        with (
            (spy.folder / f"said{spy.rank}").open("w") as said,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            try:
                trained = tasks[task](words)
                outcome, found = "history", trained and trained["log_history"]
            except SystemExit as error:  # of the plugin, which shows no traceback
                cause: Any = error.__cause__ or SimpleNamespace(kind=error.code)  # by SIGTERM
                keys = [fault.path for fault in getattr(cause, "faults", ())] or [cause.kind]
                outcome, found = "error", [type(cause).__name__, *keys]
                found += ["a bug"] * (error.code == 1)
            except Exception as error:  # noqa: BLE001  # the other commands go on
                outcome, found = "error", ["traceback", repr(error)]
            (spy.folder / f"{outcome}{spy.rank}.json").write_text(json.dumps(found))
    spy.packs = False  # it notes no steps of other trainers of this process


def copy_damaged(checkpoint: Path, copy: Path) -> None:
    """Copy a checkpoint, and change a byte of a part of DeepSpeed's, or of the optimizer."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        shutil.copytree(checkpoint, copy)
        (path,) = [*copy.glob("global_step*/*zero_pp_rank_1_*optim_states.pt")] or copy.glob("optimizer.pt")
        change_a_byte(path)
    dist.barrier()


def change_a_byte(path: Path) -> None:
    """Change one byte of the largest entry of an archive, or of a text; its headers stay."""
    held, entry = bytearray(path.read_bytes()), b""
    if is_zipfile(path):
        with ZipFile(path) as archive:
            entry = max(map(archive.read, archive.namelist()), key=len)
    held[held.index(entry) + len(entry) // 2] ^= 1
    path.write_bytes(held)


class Spy:
    """
    Writes sequences of rows and microbatches, attention and wrapper, and whether weights are loaded
    from a checkpoint. It breaks rows and weights, and ends or kills processes.
    """

    def __init__(self, folder: str) -> None:
        from swift.pipelines.train.sft import SwiftSft
        from transformers import Trainer

        self.folder, self.rank, self.packs = Path(folder), os.environ.get("RANK", "0"), False
        self.third_step_batches = 0
        encode, pack, step = SwiftSft._encode_dataset, SwiftSft._post_process_datasets, Trainer.training_step
        prepare = SwiftSft._prepare_template

        def prepare_template(pipeline: Any) -> None:
            prepare(pipeline)
            for name in ("image_token_id", "video_token_id"):  # those of the tiny model, as the plugin sets them
                if "alone" in self.folder.name and hasattr(pipeline.template, name):
                    setattr(pipeline.template, name, getattr(pipeline.processor, name))

        def encode_dataset(pipeline: Any, *args: Any, **options: Any) -> Any:
            self.packs = pipeline.args.packing
            (self.folder / f"encoded{self.rank}").touch()
            return encode(pipeline, *args, **options)

        def post_process_datasets(pipeline: Any, data_sets: list[Any]) -> Any:
            self.packs = pipeline.args.packing
            if self.packs:
                self.note_rows(data_sets, pipeline.template)
            return pack(pipeline, data_sets)

        def training_step(trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
            if self.packs:
                last = getattr(trainer, "ref_model", None) or trainer.model
                plain = getattr(last, "module", last)  # inside DeepSpeed's engine
                (self.folder / "attention").write_text(plain.config._attn_implementation)
                (self.folder / "wrapper").write_text(type(model).__name__)
                with (self.folder / f"trained{self.rank}.jsonl").open("a") as file:
                    file.write(json.dumps([trainer.state.global_step + 1, list(samples_of(inputs))]) + "\n")
            self.end_process(trainer.state.global_step)
            return step(trainer, model, inputs, *args, **options)

        self.watch_checkpoints(Trainer)
        SwiftSft._encode_dataset, SwiftSft._post_process_datasets = encode_dataset, post_process_datasets
        SwiftSft._prepare_template, Trainer.training_step = prepare_template, training_step

    def end_process(self, step: int) -> None:
        """End or kill this process in its third step, as the run is named."""
        import torch.distributed as dist

        self.third_step_batches += step == 2
        if "killed" in self.folder.name and self.third_step_batches == 2:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.folder.name == "stopped" and self.rank == "1" and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def watch_checkpoints(self, kind: Any) -> None:
        """Note that a trainer loads weights; ruin those that it saves, as the run is named."""
        from packplan.adapters.swift import training

        planned = training._PlannedSwiftTraining
        load, save = planned._load_from_checkpoint, kind._maybe_log_save_evaluate

        def load_from_checkpoint(trainer: Any, *args: Any, **options: Any) -> None:
            (self.folder / f"loaded{self.rank}").touch()
            load(trainer, *args, **options)

        def log_save_evaluate(trainer: Any, *args: Any, **options: Any) -> None:
            if self.folder.name == "ruined" and trainer.state.global_step == 4:
                next(trainer.model.parameters()).data.view(-1)[0] = float("nan")
            save(trainer, *args, **options)

        planned._load_from_checkpoint, kind._maybe_log_save_evaluate = load_from_checkpoint, log_save_evaluate

    def note_rows(self, encoded: list[Any], template: Any) -> None:
        """Write the rows as encoded; then break one, as the name of the run says."""
        rows = [
            sequences_of(row if "input_ids" in row else template.encode(dict(row), return_length=True))
            for row in encoded[0] or ()
        ]
        (self.folder / f"rows{self.rank}.json").write_text(json.dumps(rows))
        if self.folder.name == "fewer" and self.rank == "1":
            encoded[0] = encoded[0].select(range(len(rows) - 1))
        if self.folder.name == "unlike":
            pack = template.packing_row
            template.packing_row = lambda rows: (found := pack(rows)) | {"position_ids": [*range(len(found["labels"]))]}
        if self.folder.name == "gone":
            Path(encoded[0][1]["images"][0]["path"]).unlink()
        if self.folder.name == "longer":
            import PIL.Image

            image = PIL.Image.open(path := encoded[0][1]["images"][0]["path"])
            image.resize((2 * image.width, image.height)).save(path)


def ours(config: str, out: str) -> int:
    """Train a run of `packplan sft`, and write what `rank_main` writes."""
    from tests.e2e import rank_main

    start_adapters_alike()
    return rank_main.main(config, out)


def start_adapters_alike() -> None:
    """Draw the first weights of adapters by their shape alone, whatever was drawn before."""
    import torch
    from peft.tuners.lora.layer import LoraLayer

    reset = LoraLayer.reset_lora_parameters

    def reset_alike(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(self.in_features * self.out_features)
            reset(self, *args, **kwargs)

    LoraLayer.reset_lora_parameters = reset_alike


def sequences_of(encoded: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of a sample, or of the chosen and the rejected half of a pair."""
    return [list(tokens) for key, tokens in encoded.items() if key.endswith("input_ids") and tokens is not None]


def samples_of(inputs: dict[str, Any]) -> Iterator[list[int]]:
    """Yield the sequences of a packed row, or of KTO's two; padded rows with their padding."""
    for prefix in ("completion_", "KL_completion_"):
        if f"{prefix}input_ids" in inputs:
            own = {key.removeprefix(prefix): value for key, value in inputs.items() if key.startswith(prefix)}
            yield from samples_of(own)
    if "input_ids" not in inputs:
        return
    positions = inputs.get("text_position_ids", inputs.get("position_ids"))
    if positions is None:
        yield from inputs["input_ids"].tolist()
        return
    tokens = inputs["input_ids"][0].tolist()
    starts = [at for at, position in enumerate(positions.reshape(-1, len(tokens))[0].tolist()) if position == 0]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        yield tokens[start:stop]


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
