"""Arguments that are more than a key of another name, and those that nothing reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from packplan.core.config import tuners_of
from packplan.core.conversion.tables import BNB, EVALUATION, PARTS_OF, SEEING, TRACKIO, UNNEEDED

if TYPE_CHECKING:
    from packplan.core.conversion.convert import Builder

_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst")
"""Ends of the names of data files."""

_VERSIONED = re.compile(r"(.+)/v\d+-\d{8}-\d{6}/?")
"""Output folder of a run of ms-swift, which adds a version and the time to what it is told."""


def _attention(builder: Builder, value: Any) -> None:
    if value in {"flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4"}:
        reason = "packs need no flash attention here; model.attn_impl: auto takes the fastest that keeps samples apart"
        builder.unneeded(reason)
    elif value in {"sdpa", "eager", "flex_attention"}:
        builder.take({"model.attn_impl": value})
    else:
        builder.unsupported("model.attn_impl takes sdpa, eager, flex_attention and flash_attention_2; auto is the rest")


def _data(builder: Builder, value: Any, *, files: str, entries: str) -> None:
    names = [value] if isinstance(value, str) else list(value)
    splits = files == "train_jsonl" and builder.value("split_dataset_ratio") > 0 and not builder.value("val_dataset")
    plain = all(
        name.lower().endswith(_FILES) and (builder.world.exists(name) or not {":", "#"} & set(name)) for name in names
    )
    builder.take({f"custom.{files if plain and not splits else entries}": names})


def _streaming(builder: Builder, value: Any) -> None:
    if value and any("#" in name for name in builder.value("dataset")):
        also = "under streaming, ms-swift takes the first records of a data set"
        builder.take({"custom.dataset_shuffle": False}, also)
    else:
        builder.unneeded(UNNEEDED["streaming"])


def _packing(builder: Builder, value: Any) -> None:
    if value and not builder.packs:
        builder.unsupported(f"{builder.world.model.unpacked} does not pack (docs/models.md)")
    else:
        builder.take({"training.packing": value}, "packs are planned once, before training" if value else "")


def _packing_strategy(builder: Builder, value: Any) -> None:
    if value == "sequential":
        builder.take({"training.packing_algorithm": "concatenative"})
    else:
        builder.unneeded("training.packing_algorithm has a packer of its own; best_fit_decreasing is ms-swift's")


def _truncation(builder: Builder, value: Any) -> None:
    if value in {"left", "right"}:
        builder.take({"template.truncation_strategy": value})
    elif value in {None, "delete"}:
        builder.unneeded("training.packing_allow_single_long: false leaves long samples out, and counts them")
    else:
        builder.unsupported("split is of swift pt: set it to left or right, or raise max_length")


def _deepspeed(builder: Builder, value: Any) -> None:
    section = builder.world.sections.get(value) if isinstance(value, str) else value
    if section is None:
        builder.take({"training.deepspeed": value})
        return
    size = builder.value("zero_hpz_partition_size")
    if size is not None:
        optimization = {**section.get("zero_optimization", {}), "zero_hpz_partition_size": size}
        section = {**section, "zero_optimization": optimization}
    builder.take(
        {"training.deepspeed": dict(section)}, f"what ms-swift's {value} holds" if isinstance(value, str) else ""
    )


def _hpz(builder: Builder, _: Any) -> None:
    deepspeed = builder.value("deepspeed")
    if isinstance(deepspeed, str) and deepspeed not in builder.world.sections:
        builder.unsupported("write it into the file that deepspeed names")
    else:
        builder.unneeded("training.deepspeed holds it" if deepspeed else "it is of deepspeed, which is not given")


def _fsdp(builder: Builder, value: Any) -> None:
    section = builder.world.sections.get(value) if isinstance(value, str) else value
    if isinstance(value, str) and value.startswith("{"):
        section = json.loads(value)
    if isinstance(value, str) and "shard" in value and section is None:
        builder.take({"training.fsdp": value})
    elif isinstance(section, Mapping):
        config = dict(section.get("fsdp_config", {}))
        builder.take({"training.fsdp": section.get("fsdp", "full_shard auto_wrap"), "training.fsdp_config": config})
    else:
        builder.unsupported("name fsdp2, or write training.fsdp and training.fsdp_config")


def _quant_method(builder: Builder, value: Any) -> None:
    if value == "bnb":
        builder.take({"model.quant_method": value}, "on a GPU alone")
    else:
        builder.unsupported("model.quant_method takes bnb")


def _quant_bits(builder: Builder, value: Any) -> None:
    if builder.value("quant_method") == "bnb":
        builder.take({"model.quant_bits": value})
    else:
        builder.unsupported(f"quantisation by {builder.value('quant_method')} is not offered: use bnb")


def _cached(builder: Builder, _: Any) -> None:
    if builder.world.exports:
        builder.unneeded(
            "swift export of the script makes it of dataset, whose samples are encoded while training runs"
        )
        return
    say = builder.unsupported if builder.value("dataset") else builder.refused
    say("name the data that it was made of in dataset")


def _cached_evaluation(builder: Builder, value: Any) -> None:
    if builder.world.exports:
        _cached(builder, value)
    else:
        builder.unsupported("name the data that it was made of in val_dataset")


def _init_weights(builder: Builder, value: Any) -> None:
    name = str(value).lower()
    if name == "true":
        builder.unneeded("adapters start at no effect, unless training.init_weights says otherwise")
    elif name == "lora-ga":
        builder.unsupported("it needs gradients of the data before training starts: name pissa or olora")
    else:
        builder.take({"training.init_weights": name})


def _chat(builder: Builder, value: Any) -> None:
    if value is False:
        builder.take({"template.use_chat_template": value})
    else:
        builder.unneeded("records are chats, unless template.use_chat_template says otherwise")


def _router(builder: Builder, value: Any) -> None:
    also = "models with experts add it to the loss; an evaluation measures the cross entropy alone"
    builder.take({"training.router_aux_loss_coef": value}, also if value else "")


def _dft(builder: Builder, value: Any) -> None:
    also = "an evaluation measures the cross entropy" if value else ""
    builder.take({"training.enable_dft_loss": value}, also)


def _save_total_limit(builder: Builder, value: Any) -> None:
    if value is not None and value < 1:
        builder.unneeded("all checkpoints are kept, as ms-swift does below 1")
    else:
        builder.take({"training.save_total_limit": value})


def _eval_metric(builder: Builder, value: Any) -> None:
    if value == "acc":
        builder.unneeded("an evaluation always measures the accuracy of tokens")
    else:
        builder.unsupported("an evaluation measures the loss and the accuracy of tokens (acc)")


def _resume(builder: Builder, value: Any) -> None:
    reason = "a checkpoint of ms-swift does not say how far a plan was trained: to train on from its weights, set "
    builder.unsupported(f"{reason}model.model to it ({value})")


def _output_dir(builder: Builder, value: Any) -> None:
    versioned = _VERSIONED.fullmatch(str(value))
    also = "without the version that ms-swift added" if versioned else ""
    builder.take({"training.output_dir": versioned[1] if versioned else value}, also)


SPECIAL: Mapping[str, Callable[[Builder, Any], None]] = {
    "attn_impl": _attention,
    "dataset": lambda builder, value: _data(builder, value, files="train_jsonl", entries="dataset"),
    "val_dataset": lambda builder, value: _data(builder, value, files="val_jsonl", entries="val_dataset"),
    "data_seed": lambda builder, value: builder.take({"custom.data_seed": value, "training.data_seed": value}),
    "streaming": _streaming,
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "truncation_strategy": _truncation,
    "system": lambda builder, value: builder.take({"template.system": str(value).replace("\\n", "\n")}),
    "deepspeed": _deepspeed,
    "zero_hpz_partition_size": _hpz,
    "fsdp": _fsdp,
    "loss_scale": lambda builder, _: builder.take({"template.loss_scale": builder.world.model.loss_scale}),
    "quant_method": _quant_method,
    "quant_bits": _quant_bits,
    "cached_dataset": _cached,
    "cached_val_dataset": _cached_evaluation,
    "init_weights": _init_weights,
    "router_aux_loss_coef": _router,
    "enable_dft_loss": _dft,
    "save_total_limit": _save_total_limit,
    "use_chat_template": _chat,
    "eval_metric": _eval_metric,
    "resume_from_checkpoint": _resume,
    "report_to": lambda builder, value: builder.take(
        {"training.report_to": [value] if isinstance(value, str) else list(value)}
    ),
    "output_dir": _output_dir,
}
"""Arguments that are more than a key of another name."""


def why_unread(builder: Builder, name: str, value: Any) -> str | None:
    """
    Return the reason for which nothing reads an argument of this command, or None.

    Args:
        builder: Conversion of the command.
        name: Name of the argument.
        value: Value of the argument.
    """
    if name in PARTS_OF and not builder.value(PARTS_OF[name]):
        return f"it is of {PARTS_OF[name]}, which is not given"
    tuner, tuners, blind = builder.value("tuner_type"), tuners_of(name), builder.world.model.is_multimodal is False
    unevaluated, unquantised = builder.value("eval_strategy") == "no", builder.value("quant_method") is None
    data, split = builder.value("dataset"), ("split_dataset_ratio",)
    draws = any("#" in entry for entry in data) or builder.value("split_dataset_ratio")
    cases: tuple[tuple[Collection[str], object, str], ...] = (
        ((name,), tuners and tuner not in tuners, f"it is of tuner_type {' and '.join(tuners)}, which is {tuner}"),
        (EVALUATION, not builder.evaluates, "there are no evaluation data"),
        (SEEING, blind, "the model takes no images"),
        (("freeze_llm", "freeze_vit", "freeze_aligner"), value and blind, "the model has no such part"),
        (("cached_dataset", "cached_val_dataset", "val_dataset"), not value, "it names no data"),
        (("val_dataset",), unevaluated, "eval_strategy is no"),
        (split, not value, "0 splits nothing"),
        (split, builder.value("val_dataset"), "val_dataset is given, and ms-swift splits nothing then"),
        (split, builder.value("streaming"), "streaming is given, and ms-swift splits nothing then"),
        (split, unevaluated, "eval_strategy is no, and ms-swift splits nothing then"),
        (("packing_length", "packing_strategy"), not builder.packs, "it is of packing, which is not given"),
        (("packing_length",), value == builder.value("max_length"), "packs are as long as template.max_length"),
        (("warmup_ratio",), not value, "0 warms nothing up"),
        (("quant_bits",), unquantised, "quant_method is not given, and ms-swift quantises nothing then"),
        (
            ("model_author", "model_name"),
            not any("self-cognition" in entry for entry in data),
            "it is of swift/self-cognition, which dataset does not name",
        ),
        (("dataset_shuffle",), not draws, "all records are trained, in an order that training.seed draws"),
        (TRACKIO, "trackio" not in builder.value("report_to"), "it is of trackio, which report_to does not name"),
        (BNB, builder.value("quant_method") != "bnb", "it is of --quant_method bnb, which is not given"),
    )
    return next((why for names, is_unread, why in cases if is_unread and name in names), None)
