"""Arguments that are more than a key of another name, and those that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from packplan.core.conversion.tables import EVALUATION, PARTS_OF, SEEING, UNNEEDED
from packplan.core.samples import parse_entry

if TYPE_CHECKING:
    from packplan.core.conversion.convert import Builder


def _attention(builder: Builder, value: Any) -> None:
    if value in {"flash_attn", "flash_attention_2"}:
        reason = "packs need no flash attention here; model.attn_impl: auto takes the fastest that keeps samples apart"
        builder.unneeded(reason)
    elif value in {"sdpa", "eager", "flex_attention"}:
        builder.take({"model.attn_impl": value})
    else:
        builder.unsupported("model.attn_impl takes sdpa, eager, flex_attention and flash_attention_2; auto is the rest")


def _data(builder: Builder, value: Any, *, files: str, entries: str) -> None:
    names = [value] if isinstance(value, str) else list(value)
    plain = True
    for name in names:
        entry = parse_entry(name, exists=builder.world.exists)
        plain = plain and entry.count is None and entry.name == name and is_file_name(name)
    splits = files == "train_jsonl" and builder.value("split_dataset_ratio") > 0 and not builder.value("val_dataset")
    key = f"custom.{files}" if plain and not splits else f"custom.{entries}"
    builder.take({key: names})


def is_file_name(name: str) -> bool:
    """Return whether a data set's name is that of a file, by how it ends."""
    return name.lower().endswith((".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst"))


def _streaming(builder: Builder, value: Any) -> None:
    if value and any("#" in name for name in builder.value("dataset") or ()):
        also = "under streaming, ms-swift takes the first records of a data set"
        builder.take({"custom.dataset_shuffle": False}, also)
    else:
        builder.unneeded(UNNEEDED["streaming"])


def _data_seed(builder: Builder, value: Any) -> None:
    builder.take({"custom.data_seed": value, "training.data_seed": value})


def _packing_strategy(builder: Builder, value: Any) -> None:
    if value == "sequential":
        builder.take({"training.packing_algorithm": "concatenative"})
    else:
        builder.unneeded("training.packing_algorithm has a packer of its own; best_fit_decreasing is ms-swift's")


def _packing(builder: Builder, value: Any) -> None:
    if value and not builder.packs:
        builder.unsupported(f"{builder.world.model.unpacked} does not pack (docs/models.md)")
    else:
        builder.take({"training.packing": value}, "packs are planned once, before training" if value else "")


def _truncation(builder: Builder, value: Any) -> None:
    if value in {"left", "right"}:
        builder.take({"template.truncation_strategy": value})
    elif value in {None, "delete"}:
        builder.unneeded("training.packing_allow_single_long: false leaves long samples out, and counts them")
    else:
        builder.unsupported("split is of swift pt: set it to left or right, or raise max_length")


def _system(builder: Builder, value: Any) -> None:
    builder.take({"template.system": str(value).replace("\\n", "\n")})


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
    if isinstance(builder.value("deepspeed"), str) and builder.value("deepspeed") not in builder.world.sections:
        builder.unsupported("write it into the file that deepspeed names")
    elif builder.value("deepspeed"):
        builder.unneeded("training.deepspeed holds it")
    else:
        builder.unneeded("it is of deepspeed, which is not given")


_VERSIONED = re.compile(r"(.+)/v\d+-\d{8}-\d{6}/?")
"""Output folder of a run of ms-swift, which adds a version and the time to what it is told."""


def _output_dir(builder: Builder, value: Any) -> None:
    versioned = _VERSIONED.fullmatch(str(value))
    if versioned is None:
        builder.take({"training.output_dir": value})
    else:
        builder.take({"training.output_dir": versioned[1]}, "without the version that ms-swift added")


def _fsdp(builder: Builder, value: Any) -> None:
    if isinstance(value, str) and "shard" in value:
        builder.take({"training.fsdp": value})
        return
    section = builder.world.sections.get(value) if isinstance(value, str) else value
    if not isinstance(section, Mapping):
        builder.unsupported("name fsdp2, or write training.fsdp and training.fsdp_config")
        return
    config = section.get("fsdp_config", {})
    builder.take({"training.fsdp": section.get("fsdp", "full_shard auto_wrap"), "training.fsdp_config": dict(config)})


def _loss_scale(builder: Builder, _: Any) -> None:
    builder.take({"template.loss_scale": builder.world.model.loss_scale})


def _quantised(builder: Builder, value: Any) -> None:
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
    reason = "name the data that it was made of in dataset"
    if builder.value("dataset"):
        builder.unsupported(reason)
    else:
        builder.refused(reason)


def _eval_metric(builder: Builder, value: Any) -> None:
    if value == "acc":
        builder.unneeded("an evaluation always measures the accuracy of tokens")
    else:
        builder.unsupported("an evaluation measures the loss and the accuracy of tokens (acc)")


def _resume(builder: Builder, value: Any) -> None:
    reason = "a checkpoint of ms-swift does not say how far a plan was trained: to train on from its weights, set "
    builder.unsupported(f"{reason}model.model to it ({value})")


def _report_to(builder: Builder, value: Any) -> None:
    builder.take({"training.report_to": [value] if isinstance(value, str) else list(value)})


SPECIAL: Mapping[str, Callable[[Builder, Any], None]] = {
    "attn_impl": _attention,
    "dataset": lambda builder, value: _data(builder, value, files="train_jsonl", entries="dataset"),
    "val_dataset": lambda builder, value: _data(builder, value, files="val_jsonl", entries="val_dataset"),
    "data_seed": _data_seed,
    "streaming": _streaming,
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "truncation_strategy": _truncation,
    "system": _system,
    "deepspeed": _deepspeed,
    "zero_hpz_partition_size": _hpz,
    "fsdp": _fsdp,
    "loss_scale": _loss_scale,
    "quant_method": _quantised,
    "quant_bits": _quant_bits,
    "cached_dataset": _cached,
    "eval_metric": _eval_metric,
    "resume_from_checkpoint": _resume,
    "report_to": _report_to,
    "output_dir": _output_dir,
}
"""Arguments that are more than a key of another name."""

_Condition: TypeAlias = Callable[["Builder", Any], object]

_UNREAD: tuple[tuple[Collection[str], _Condition, str], ...] = (
    (EVALUATION, lambda builder, _: not builder.evaluates, "there are no evaluation data"),
    (SEEING, lambda builder, _: builder.world.model.is_multimodal is False, "the model takes no images"),
    (
        ("freeze_llm", "freeze_vit", "freeze_aligner"),
        lambda builder, value: value and builder.world.model.is_multimodal is False,
        "the model has no such part",
    ),
    (("cached_dataset", "val_dataset"), lambda _, value: not value, "it names no data"),
    (("val_dataset",), lambda builder, _: builder.value("eval_strategy") == "no", "eval_strategy is no"),
    (("split_dataset_ratio",), lambda _, value: not value, "0 splits nothing"),
    (
        ("split_dataset_ratio",),
        lambda builder, _: builder.value("val_dataset"),
        "val_dataset is given, and ms-swift splits nothing then",
    ),
    (
        ("split_dataset_ratio",),
        lambda builder, _: builder.value("streaming"),
        "streaming is given, and ms-swift splits nothing then",
    ),
    (
        ("split_dataset_ratio",),
        lambda builder, _: builder.value("eval_strategy") == "no",
        "eval_strategy is no, and ms-swift splits nothing then",
    ),
    (
        ("packing_length", "packing_strategy"),
        lambda builder, _: not builder.packs,
        "it is of packing, which is not given",
    ),
    (
        ("packing_length",),
        lambda builder, value: value == builder.value("max_length"),
        "packs are as long as template.max_length",
    ),
    (("warmup_ratio",), lambda _, value: not value, "0 warms nothing up"),
    (
        ("quant_bits",),
        lambda builder, _: builder.value("quant_method") is None,
        "quant_method is not given, and ms-swift quantises nothing then",
    ),
    (
        ("model_author", "model_name"),
        lambda builder, _: not any("self-cognition" in data for data in builder.value("dataset")),
        "it is of swift/self-cognition, which dataset does not name",
    ),
    (
        ("dataset_shuffle",),
        lambda builder, _: (
            not any("#" in data for data in builder.value("dataset")) and not builder.value("split_dataset_ratio")
        ),
        "all records are trained, in an order that training.seed draws",
    ),
    (
        ("project", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
        lambda builder, _: "trackio" not in builder.value("report_to"),
        "it is of trackio, which report_to does not name",
    ),
    (
        ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
        lambda builder, _: builder.value("quant_method") != "bnb",
        "it is of --quant_method bnb, which is not given",
    ),
)
"""Arguments, whether nothing reads them in a command, and why."""


def why_unread(builder: Builder, name: str, value: Any) -> str | None:
    """
    Return why nothing reads an argument of this command, None if something does.

    Args:
        builder: The command.
        name: The argument.
        value: Its value.
    """
    if name in PARTS_OF and not builder.value(PARTS_OF[name]):
        return f"it is of {PARTS_OF[name]}, which is not given"
    reasons = (why for names, is_unread, why in _UNREAD if name in names and is_unread(builder, value))
    return next(reasons, None)
