"""What measuring text costs beside the bare tokenizer, on the same rows, in one process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
import torch

from packplan.adapters.progress import progress
from packplan.app.demo.tiny_models import write_model
from packplan.app.wiring import training
from packplan.core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig

VOCABULARY = 16_000
"""Tokens that the tokenizer learns from the text, if none is named."""

AT_ONCE = 32
"""Rows between two turns: what else the machine does meets all ways alike."""

_SYSTEM = "You answer questions on a programming language."


@attrs.frozen
class TextCost:
    """CPU seconds that the same rows take in each way."""

    num_rows: int
    tokens_per_row: float

    tokenizer_s: float
    """The tokenizer, called for each row's text, as a loop over the data does."""

    library_s: float
    """The tokenizer's library, asked for many texts at once, and for nothing but tokens."""

    measured_s: float
    """Records read, checked, digested and measured."""

    full_s: float
    """A full encode of each row: what measuring costs where a template allows no less."""

    @property
    def ratio(self) -> float:
        """Rows a second of measuring, over those of the tokenizer."""
        return self.tokenizer_s / self.measured_s

    @property
    def library_ratio(self) -> float:
        """Rows a second of measuring, over those of the tokenizer's library in batches."""
        return self.library_s / self.measured_s


def measure_text(num_rows: int, model: str | None = None) -> TextCost:
    """
    Measure chats of one to three turns, made of English text.

    Args:
        num_rows: Rows; the first `AT_ONCE` are not counted.

        model: Folder of a model whose tokenizer and template are taken; None takes a small one with
        a tokenizer that is learned from the text.
    """
    # Threads of the library would hide its work from this process's clock.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    paragraphs = [part.strip() for topic in topics.values() for part in topic.split("\n\n") if len(part) > 40]
    with TemporaryDirectory() as name:
        folder = Path(name)
        if model is None:
            write_model(folder / "model", "qwen2", paragraphs, seed=0, vocabulary=VOCABULARY)
        data = folder / "chats.jsonl"
        data.write_text("\n".join(json.dumps(_chat(paragraphs, seed)) for seed in range(num_rows)), encoding="utf-8")
        config = RunConfig(
            model=ModelConfig(model=model or str(folder / "model")),
            template=TemplateConfig(max_length=8192),
            custom=CustomConfig(train_jsonl=(str(data),)),
            training=TrainingConfig(output_dir=str(folder / "run"), packing_length_precompute_workers=1),
        )
        return _compare(config, num_rows)


def _chat(paragraphs: Sequence[str], seed: int) -> dict[str, Any]:
    """Return a chat: questions of about 100 characters, answers of about 600."""
    rng = np.random.default_rng(seed)

    def said(size: float) -> str:
        wanted = int(rng.lognormal(np.log(size), 0.9))
        words = " ".join(paragraphs[place] for place in rng.integers(0, len(paragraphs), 2 + wanted // 100))
        return words[: max(wanted, 20)]

    messages = [{"role": "system", "content": _SYSTEM}] if rng.random() < 0.2 else []
    for _ in range(int(rng.integers(1, 4))):
        messages += [{"role": "user", "content": said(100)}, {"role": "assistant", "content": said(600)}]
    return {"messages": messages}


def _compare(config: RunConfig, num_rows: int) -> TextCost:
    encoder = training.open_samples(config)["train"]
    samples = training.open_measurer(config, encoder)
    tokenizer = encoder.template.tokenizer
    texts = [tokenizer.decode(encoder.encode(index)["input_ids"]) for index in range(num_rows)]
    lengths = np.zeros(num_rows, int)

    def call(rows: range) -> None:
        for row in rows:
            lengths[row] = len(tokenizer(texts[row], add_special_tokens=False)["input_ids"])

    def ask_library(rows: range) -> None:
        tokenizer.backend_tokenizer.encode_batch_fast(texts[rows.start : rows.stop], add_special_tokens=False)

    def measure(rows: range) -> None:
        list(samples.measure_many(rows, in_full=False))
        samples.data_digest(rows.stop)

    def encode(rows: range) -> None:
        for row in rows:
            encoder.encode(row)

    ways: tuple[Callable[[range], None], ...] = (call, ask_library, measure, encode)
    spent = [0.0] * len(ways)
    for start in progress(range(0, num_rows, AT_ONCE), desc="measuring text", leave=False):
        rows = range(start, min(start + AT_ONCE, num_rows))
        for number, way in enumerate(ways):
            before = time.process_time()
            way(rows)
            spent[number] += (time.process_time() - before) * (start >= AT_ONCE)
    return TextCost(num_rows - AT_ONCE, float(lengths[AT_ONCE:].mean()), *spent)
