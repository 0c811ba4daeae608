"""Runs commands of ms-swift, with tiny models, as one rank; writes down what they train."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main(commands: list[tuple[str, str, list[str]]], folder: str) -> int:
    """
    Run commands in turn: name, task and words.

    In a folder of its name, each writes what `Spy` writes, what it says, and its log, or its error.
    """
    from datasets import Dataset
    from swift.pipelines import pretrain_main, rlhf_main, sft_main

    from packplan.app import plugin
    from packplan.app.plan.__main__ import main as plan

    tasks = {"sft": sft_main, "pt": pretrain_main, "rlhf": rlhf_main, "plan": plan, "plugin": plugin.main}
    spy, mapped = Spy(folder), Dataset.map
    start_adapters_alike()
    # A pool of one process for each map takes a third of a run.
    Dataset.map = lambda rows, *args, **options: mapped(rows, *args, **(options | {"num_proc": None}))
    for name, task, words in commands:
        spy.folder = Path(folder, name)
        spy.folder.mkdir(exist_ok=True)
        with (
            (spy.folder / f"said{spy.rank}").open("w") as said,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            try:
                found = tasks[task](words)
            except SystemExit as error:  # of the plugin, which shows no traceback
                cause: Any = error.__cause__
                keys = [fault.path for fault in getattr(cause, "faults", ())] or [cause.kind]
                (spy.folder / f"error{spy.rank}.json").write_text(json.dumps([type(cause).__name__, *keys]))
            except Exception as error:  # noqa: BLE001  # the other commands go on
                (spy.folder / f"error{spy.rank}.json").write_text(json.dumps(["traceback", repr(error)]))
            else:
                (spy.folder / f"history{spy.rank}.json").write_text(json.dumps(found and found["log_history"]))
    return 0


class Spy:
    """Writes sequences of rows and microbatches, and the attention's name; breaks rows."""

    def __init__(self, folder: str) -> None:
        from swift.pipelines.train.sft import SwiftSft
        from transformers import Trainer

        self.folder, self.rank, self.packs = Path(folder), os.environ.get("RANK", "0"), False
        encode, step = SwiftSft._encode_dataset, Trainer.training_step

        def encode_dataset(pipeline: Any, train: Any, *args: Any, **options: Any) -> Any:
            for name in ("image_token_id", "video_token_id"):
                if hasattr(pipeline.template, name) and hasattr(pipeline.processor, name):
                    setattr(pipeline.template, name, getattr(pipeline.processor, name))
            encoded, self.packs = encode(pipeline, train, *args, **options), pipeline.args.packing
            if self.packs:
                self.note_rows(encoded, pipeline.template)
            return encoded

        def training_step(trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
            if self.packs:
                (self.folder / "attention").write_text(trainer.model.config._attn_implementation)
                with (self.folder / f"trained{self.rank}.jsonl").open("a") as file:
                    file.write(json.dumps([trainer.state.global_step + 1, list(samples_of(inputs))]) + "\n")
            return step(trainer, model, inputs, *args, **options)

        SwiftSft._encode_dataset, Trainer.training_step = encode_dataset, training_step

    def note_rows(self, encoded: list[Any], template: Any) -> None:
        """Write the rows as encoded; then break one, as the name of the run says."""
        rows = [
            sequences_of(row if "input_ids" in row else template.encode(dict(row), return_length=True))
            for row in encoded[0] or ()
        ]
        (self.folder / f"rows{self.rank}.json").write_text(json.dumps(rows))
        if self.folder.name == "fewer" and self.rank == "1":
            encoded[0] = encoded[0].select(range(len(rows) - 1))
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
    """Yield the sequences of a packed row; those of padded rows with their padding."""
    positions = inputs.get("text_position_ids", inputs.get("position_ids"))
    if positions is None:
        yield from inputs["input_ids"].tolist()
        return
    tokens = inputs["input_ids"][0].tolist()
    starts = [at for at, position in enumerate(positions.reshape(-1, len(tokens))[0].tolist()) if position == 0]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        yield tokens[start:stop]
