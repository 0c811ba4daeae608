"""Runs a command of ms-swift, with tiny models, as one rank; writes down what it trains."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main(command: str, words: list[str], out: str, fault: str = "") -> int:
    """Train, and write what `record` writes, and the log; `fewer` leaves a row out on rank 1."""
    from swift.pipelines import pretrain_main, rlhf_main, sft_main

    record(out, fault)
    result = {"sft": sft_main, "pt": pretrain_main, "rlhf": rlhf_main}[command](words)
    (Path(out) / "history.json").write_text(json.dumps(result["log_history"]))
    return 0


def record(out: str, fault: str = "") -> None:
    """Write, from now on, each row's sequences, each microbatch's, and the attention's name."""
    from swift.pipelines.train.sft import SwiftSft
    from transformers import Trainer

    rank = os.environ.get("RANK", "0")
    encode, step = SwiftSft._encode_dataset, Trainer.training_step

    def encode_dataset(self: Any, train: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("image_token_id", "video_token_id"):
            if hasattr(self.template, name) and hasattr(self.processor, name):
                setattr(self.template, name, getattr(self.processor, name))
        encoded = encode(self, train, *args, **kwargs)
        rows = [
            sequences_of(row if "input_ids" in row else self.template.encode(dict(row), return_length=True))
            for row in encoded[0] or ()
        ]
        if fault == "fewer" and rank == "1":
            encoded[0] = encoded[0].select(range(len(rows) - 1))
        (Path(out) / f"rows{rank}.json").write_text(json.dumps(rows))
        return encoded

    def training_step(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        attention = self.model.config._attn_implementation
        (Path(out) / "attention").write_text(attention)
        with (Path(out) / f"trained{rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.state.global_step + 1, list(samples_of(inputs))]) + "\n")
        return step(self, model, inputs, *args, **kwargs)

    SwiftSft._encode_dataset, Trainer.training_step = encode_dataset, training_step
    start_adapters_alike()


def both(commands: list[list[str]], plugins: list[str], out: str) -> int:
    """Train commands of `swift rlhf` with a plugin, then with two; write both logs of each."""
    from swift.pipelines import rlhf_main

    logs: list[list[Any]] = [[] for _ in commands]
    for num in (1, 2):
        for words, held in zip(commands, logs, strict=True):
            held.append(rlhf_main([*words, "--external_plugins", *plugins[:num]])["log_history"])
    Path(out).write_text(json.dumps(logs))
    return 0


def refused(commands: list[tuple[str, list[str]]], out: str) -> int:
    """Write the message by which each command is refused, or nothing where it is not."""
    from swift.pipelines import pretrain_main, rlhf_main, sft_main

    record(str(Path(out).parent))
    messages = []
    for command, words in commands:
        try:
            {"sft": sft_main, "pt": pretrain_main, "rlhf": rlhf_main}[command](words)
        except SystemExit as error:
            messages.append(str(error))
        else:
            messages.append("")
    Path(out).write_text(json.dumps(messages))
    return 0


def changed(words: list[str], out: str, fault: str) -> int:
    """Train data of which a row gets `longer`, or is `gone`, after it was measured."""
    from packplan.adapters.swift import packs

    read_row = packs.PlannedPacks._encode_row

    def row(self: Any, index: int) -> Any:
        if index == 4:
            encode = self._encode

            def other(row: Any, **options: Any) -> Any:
                encoded = encode(row, **options)
                if fault == "gone":
                    raise ValueError("no such image")
                return encoded | {"lengths": [encoded["lengths"][0] + 1]}

            self._encode = other
            try:
                return read_row(self, index)
            finally:
                self._encode = encode
        return read_row(self, index)

    packs.PlannedPacks._encode_row = row
    return main("sft", words, str(Path(out).parent))


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
