"""Arguments that cannot be together, or are of another task than fine-tuning a chat model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packplan.core.config import TUNERS
from packplan.core.conversion.arguments import Given
from packplan.core.conversion.launch import INSIDE
from packplan.core.errors import ConfigError, Fault


def require_consistent(given: Sequence[Given], *, source: str) -> None:
    """Refuse arguments that contradict each other, or are of another task; ConfigError with all."""
    if found := tuple(_contradictions({argument.name: argument.value for argument in given})):
        raise ConfigError(source, found)


def _contradictions(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield faults in arguments that contradict each other, or are of another task."""
    if not values.get("model"):
        yield Fault("--model", "is not given: name the model")
    if not values.get("dataset") and not values.get("cached_dataset"):
        yield Fault("--dataset", "is not given: name the data")
    task = values.get("task_type", "causal_lm")
    if task != "causal_lm":
        way = f": {INSIDE}" if task in _PACKED_TASKS else ""
        yield Fault("--task_type", f"is {task}, but only causal_lm is trained here{way}")
    tuner = values.get("tuner_type", "lora")
    if tuner not in TUNERS:
        why = _UNTRIED.get(str(tuner), f"the command's own code makes it, and {INSIDE}")
        yield Fault("--tuner_type", f"is {tuner}, but has to be one of {', '.join(TUNERS)}: {why}")
    for first, second, why in _EXCLUSIVE:
        if values.get(first) and values.get(second):
            yield Fault(f"--{first}", f"and --{second} {why}")
    if tuner == "full" and values.get("quant_method"):
        yield Fault("--quant_method", "quantises weights that --tuner_type full would train: use lora, or remove it")
    if values.get("quant_method") == "bnb" and not values.get("quant_bits"):
        yield Fault("--quant_method", "needs --quant_bits: set it to 4 or 8")
    if tuner == "full" and (values.get("use_dora") or values.get("use_rslora") or values.get("lorap_lr_ratio")):
        yield Fault("--tuner_type", "is full, but --use_dora, --use_rslora and --lorap_lr_ratio are of lora: keep one")


_PACKED_TASKS = frozenset({"seq_cls", "embedding", "reranker", "generative_reranker"})
"""Tasks that the plugin of ms-swift was shown to train in planned packs."""

_UNTRIED = {
    "adalora": "its ranks change with the steps, which a resumed run does not know",
    "bone": "the peft that ms-swift takes no longer has it",
    "longlora": "it attends over the borders of packed samples",
    "lora_llm": "a resumed run does not get all of its weights back",
    "reft": "its interventions are not tried with packs",
}
"""Tuner of ms-swift that is not offered -> why."""

_EXCLUSIVE = (
    ("bf16", "fp16", "are both true: keep one"),
    ("warmup_ratio", "warmup_steps", "both say how long to warm up: keep one"),
    ("packing", "lazy_tokenize", "exclude each other in ms-swift: keep one"),
    ("streaming", "lazy_tokenize", "exclude each other in ms-swift: keep one"),
    ("deepspeed", "fsdp", "both shard the weights: keep one"),
    ("deepspeed", "device_map", "exclude each other in ms-swift: keep one"),
)
"""Arguments that exclude each other, and why."""
