"""
Arguments of `swift sft` -> the keys of a run, with a line for each: taken over, changed, not needed
here, not supported and why, or refused, so that there is no run.

Where ms-swift's defaults differ from this project's, they are written too, so that the run has the
settings that ms-swift would resolve from the same command. Two of this project's own are set the
same way: `packing_drop_last: false`, for ms-swift drops no pack, and, unless samples are truncated,
`packing_allow_single_long: false`, for ms-swift deletes samples that are too long. Samples share
packs where the command packs; `core.conversion.packs` says when they do where it does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from packplan.core.config import REFUSED_TRAINING_KEYS
from packplan.core.conversion.arguments import Argument, Given
from packplan.core.conversion.tables import (
    ADAPTERS,
    EVALUATION,
    GENERATION,
    KEPT,
    KEYS,
    PARTS_OF,
    SEEING,
    UNNEEDED,
    UNSUPPORTED,
    UNSUPPORTED_PREFIXES,
    WHOLE,
)
from packplan.core.errors import ConfigError, Fault, counted
from packplan.core.samples import parse_entry

Verdict: TypeAlias = Literal["taken over", "changed", "not needed here", "not supported", "refused"]

DIFFERENT = frozenset({"changed", "not supported", "refused"})
"""Verdicts on what the run does otherwise than ms-swift."""

PACKING = "(this project) packing"
"""What the line on packs is of."""

STEP = 16
"""Samples of a step that ms-swift aims at where the command does not say."""


@attrs.frozen
class ModelFacts:
    """What ms-swift finds out about a model."""

    is_multimodal: bool | None = None
    """Whether it takes images; None if nothing tells."""

    max_length: int | None = None
    """Tokens that it was made for; None if its folder is not here."""

    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of its weights, as ms-swift loads them; None if its folder is not here."""

    loss_scale: str = "default"
    """What ms-swift makes of `--loss_scale` with the model's template."""

    unpacked: str | None = None
    """Family of the model, or template, that is known not to pack; None if neither is."""


@attrs.frozen
class Line:
    """What becomes of an argument."""

    argument: str
    """The argument and its value, as they are written; or the default that ms-swift takes."""

    verdict: Verdict

    reason: str
    """The keys that it is here, or why it is none."""


@attrs.frozen
class World:
    """What convert knows beyond the command."""

    trainer_keys: frozenset[str]
    """Settings that `training.` passes on to ms-swift's training arguments."""

    model: ModelFacts

    exists: Callable[[str], bool]
    """Whether there is a file or folder of a name."""

    sections: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """Name of a configuration that ms-swift brings (`zero2`, `fsdp2`) -> what it holds."""

    world_size: int = 1

    is_mapped: bool = False
    """Whether ms-swift would spread the model over several devices of one process."""


@attrs.frozen
class Conversion:
    """A run, and how it came about."""

    document: Mapping[str, Mapping[str, Any]]
    """Sections of the run's YAML."""

    lines: tuple[Line, ...]

    written: Mapping[str, str]
    """Key of the run, with its section -> the argument that it was written for, as in its line."""

    may_pack: bool
    """Whether samples could share packs, though the command says nothing of it."""

    @property
    def different(self) -> tuple[Line, ...]:
        """What the run does otherwise than the command asks for, or not at all."""
        return tuple(line for line in self.lines if line.verdict in DIFFERENT)

    def changed(self, shown: str, keys: Mapping[str, Any], reason: str) -> Conversion:
        """
        Return the run with keys of other values, which the lines of their arguments say too.

        Args:
            shown: The argument, or the decision, that asks for them: its line is replaced.
            keys: Key with its section -> value; each is in the run already.
            reason: Reason of the change.
        """
        document = {section: dict(held) for section, held in self.document.items()}
        lines = {line.argument: line for line in self.lines}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            document[section][name] = value
            argument = self.written[key]
            lines[argument] = Line(argument, "changed", f"{key}: {_shown(value)}")
        lines[shown] = Line(shown, "changed", reason)
        return attrs.evolve(self, document=document, lines=tuple(lines.values()))


def convert(given: Sequence[Given], table: Mapping[str, Argument], world: World, *, source: str) -> Conversion:
    """
    Return the run that trains what a command of `swift sft` trains.

    Args:
        given: The command's arguments.
        table: Every argument of ms-swift, with its default.
        world: What is known of the model, the files and the ranks.
        source: Name of the command's file, for errors.

    Raises:
        ConfigError: The arguments contradict each other, or are of another task.
    """
    require_consistent(given, source=source)
    return _Builder(given, {argument.name: argument.value for argument in given}, table, world).result()


def require_consistent(given: Sequence[Given], *, source: str) -> None:
    """Refuse arguments that contradict each other, or are of another task; ConfigError with all."""
    if found := tuple(_contradictions({argument.name: argument.value for argument in given})):
        raise ConfigError(source, found)


def _contradictions(values: Mapping[str, Any]) -> Iterator[Fault]:
    """
    Yield what of the given arguments cannot be together, or is no fine-tuning of a chat model.
    """
    if not values.get("model"):
        yield Fault("--model", "is not given: name the model")
    if not values.get("dataset") and not values.get("cached_dataset"):
        yield Fault("--dataset", "is not given: name the data")
    task = values.get("task_type", "causal_lm")
    if task != "causal_lm":
        yield Fault("--task_type", f"is {task}, but only causal_lm is trained")
    tuner = values.get("tuner_type", "lora")
    if tuner not in {"full", "lora"}:
        yield Fault("--tuner_type", f"is {tuner}, but has to be full or lora: the others are not tried with packs")
    for first, second, why in _EXCLUSIVE:
        if values.get(first) and values.get(second):
            yield Fault(f"--{first}", f"and --{second} {why}")
    if tuner == "full" and values.get("quant_method"):
        yield Fault("--quant_method", "quantises weights that --tuner_type full would train: use lora, or remove it")
    if values.get("quant_method") == "bnb" and not values.get("quant_bits"):
        yield Fault("--quant_method", "needs --quant_bits: set it to 4 or 8")
    if tuner == "full" and (values.get("use_dora") or values.get("use_rslora") or values.get("lorap_lr_ratio")):
        yield Fault("--tuner_type", "is full, but --use_dora, --use_rslora and --lorap_lr_ratio are of lora: keep one")


_EXCLUSIVE = (
    ("bf16", "fp16", "are both true: keep one"),
    ("warmup_ratio", "warmup_steps", "both say how long to warm up: keep one"),
    ("packing", "lazy_tokenize", "exclude each other in ms-swift: keep one"),
    ("streaming", "lazy_tokenize", "exclude each other in ms-swift: keep one"),
    ("deepspeed", "fsdp", "both shard the weights: keep one"),
    ("deepspeed", "device_map", "exclude each other in ms-swift: keep one"),
)
"""Arguments that exclude each other, and why."""


class _Builder:
    """Puts the document and the lines together."""

    def __init__(
        self, given: Sequence[Given], values: Mapping[str, Any], table: Mapping[str, Argument], world: World
    ) -> None:
        self._given, self._values, self._table, self._world = given, values, table, world
        self._document: dict[str, dict[str, Any]] = {"model": {}, "template": {}, "custom": {}, "training": {}}
        self._lines: list[Line] = []
        self._written: dict[str, str] = {}
        self._shown = ""

    def result(self) -> Conversion:
        """Convert argument by argument, then add what ms-swift would take where none is given."""
        for argument in self._given:
            self._shown = f"--{argument.written} {argument.text}".rstrip()
            self._argument(argument.name, argument.value)
        self._defaults()
        may_pack = self.value("packing") is False and not self.is_given("packing") and not self._world.model.unpacked
        converted = Conversion(self._document, tuple(self._lines), self._written, may_pack)
        return _with_learners(converted, self)

    def value(self, name: str) -> Any:
        """Return what is given for an argument, or ms-swift's default."""
        return self._values.get(name, self._table[name].default if name in self._table else None)

    def _argument(self, name: str, value: Any) -> None:
        if special := _SPECIAL.get(name):
            special(self, value)
        elif reason := self._why_unread(name):
            self.unneeded(reason)
            if name in KEPT:
                section, _, key = KEYS.get(name, f"training.{name}").partition(".")
                self._document[section][key] = value
        else:
            self._plain(name, value)

    def _plain(self, name: str, value: Any) -> None:
        """Convert an argument by the tables, the first that has it."""
        if name in ADAPTERS and self.value("tuner_type") == "full":
            self.unneeded("tuner_type is full: there are no adapters")
        elif name in WHOLE and self.value("tuner_type") != "full":
            self.unneeded("tuner_type is lora: only adapters are trained")
        elif name in KEYS:
            self.take({KEYS[name]: value})
        elif name in GENERATION:
            self.unneeded("it is of answers, and training writes none")
        elif name in UNNEEDED:
            self.unneeded(UNNEEDED[name])
        elif reason := _why_unsupported(name):
            self._refused(name, value, reason)
        elif name in REFUSED_TRAINING_KEYS:
            self.unsupported(REFUSED_TRAINING_KEYS[name])
        else:
            assert name in self._world.trainer_keys  # noqa: S101  # a test holds every argument against these cases
            self.take({f"training.{name}": value})

    def _why_unread(self, name: str) -> str | None:
        """Return why nothing reads an argument of this command, None if something does."""
        if name in EVALUATION and not self.evaluates:
            return "there are no evaluation data"
        if name in SEEING and self._world.model.is_multimodal is False:
            return "the model takes no images"
        if name in PARTS_OF and not self.value(PARTS_OF[name]):
            return f"it is of {PARTS_OF[name]}, which is not given"
        if (name == "project" or name.startswith("trackio_")) and "trackio" not in self.value("report_to"):
            return "it is of trackio, which report_to does not name"
        if name.startswith("bnb_4bit_") and self.value("quant_method") != "bnb":
            return "it is of --quant_method bnb, which is not given"
        return None

    def _refused(self, name: str, value: Any, reason: str) -> None:
        """Say why an argument is not supported, unless it asks for what is done anyway."""
        if value == self._table[name].default or value in (False, [], None, "none", "true"):
            self.unneeded("it is ms-swift's default, and nothing else is done here")
        else:
            self.unsupported(reason)

    @property
    def world(self) -> World:
        """What is known beyond the command."""
        return self._world

    def is_given(self, name: str) -> bool:
        """Return whether the command gives an argument."""
        return name in self._values

    def take(self, keys: Mapping[str, Any], also: str = "") -> None:
        """
        Write keys, and the line of the argument that they stand for.

        Args:
            keys: Key with its section -> value.
            also: What else the line says.
        """
        for key, value in keys.items():
            section, _, name = key.partition(".")
            self._document[section][name] = value
            self._written[key] = self._shown
        self._lines.append(Line(self._shown, "taken over", listed(keys) + (f"; {also}" if also else "")))

    def unneeded(self, reason: str) -> None:
        """Say why the argument is not needed."""
        self._lines.append(Line(self._shown, "not needed here", reason))

    def unsupported(self, reason: str) -> None:
        """Say why the argument is not supported."""
        self._lines.append(Line(self._shown, "not supported", reason))

    def refused(self, reason: str) -> None:
        """Say why there is no run while the argument is given."""
        self._lines.append(Line(self._shown, "refused", reason))

    def _default(self, what: str, keys: Mapping[str, Any], also: str = "") -> None:
        self._shown = f"(default) {what}"
        self.take(keys, also)

    def _defaults(self) -> None:
        """
        Write what ms-swift takes where the command says nothing, and this project takes otherwise.
        """
        tuner, full = self.value("tuner_type"), self.value("tuner_type") == "full"
        if not self.is_given("tuner_type"):
            self._default("tuner_type lora", {"training.tuner_type": tuner})
        if not self.is_given("learning_rate"):
            rate = 1e-5 if full else 1e-4
            self._default(f"learning_rate of {tuner}", {"training.learning_rate": rate})
        self._default_batch()
        self._default_length()
        self._default_precision()
        self._default_frozen()
        self._default_evaluation()
        self._default_loss_scale()
        if not self.is_given("output_dir"):
            name = str(self.value("model")).rstrip("/").rpartition("/")[2]
            self._default("output_dir", {"training.output_dir": f"output/{name}"})
        if not self.is_given("ddp_timeout"):
            self._default("ddp_timeout", {"training.ddp_timeout": self._table["ddp_timeout"].default})
        best = self.value("metric_for_best_model")
        if best is None:
            self._default("metric_for_best_model", {"training.metric_for_best_model": "loss"})
        if self.value("greater_is_better") is None:
            self._default("greater_is_better", {"training.greater_is_better": "loss" not in (best or "loss")})
        self._packing()

    def _default_batch(self) -> None:
        if self.is_given("gradient_accumulation_steps"):
            return
        size = int(self.value("per_device_train_batch_size"))
        steps = max(1, math.ceil(STEP / size / self._world.world_size))
        also = f"{STEP} samples of a step over {self._world.world_size} ranks of {size}"
        self._default("gradient_accumulation_steps", {"training.gradient_accumulation_steps": steps}, also)

    def _default_length(self) -> None:
        if self.is_given("max_length"):
            return
        longest = self._world.model.max_length
        if self.is_given("max_model_len"):
            longest = int(self.value("max_model_len"))
        if longest is not None:
            also = "what the model was made for; a pack is that long"
            self._default("max_length", {"template.max_length": longest}, also)
            return
        self._shown = "(default) max_length"
        reason = "it is what the model was made for, and the model is not on this machine: set template.max_length"
        self.unsupported(reason)

    def _default_precision(self) -> None:
        bf16, fp16 = self._values.get("bf16"), self._values.get("fp16")
        if bf16 is not None and fp16 is not None:
            return
        dtype = self.value("torch_dtype") or self._world.model.torch_dtype
        if dtype is None:
            self._shown = "(default) bf16, fp16"
            reason = "they follow the type of the model's weights, which is not on this machine: set training.bf16"
            self.unsupported(reason)
            return
        keys = {}
        if bf16 is None:
            keys["training.bf16"] = dtype == "bfloat16"
        if fp16 is None:
            keys["training.fp16"] = dtype != "bfloat16"
        also = "no CPU computes in float16: remove it to train without a GPU" if keys.get("training.fp16") else ""
        self._default(f"mixed precision of {dtype} weights", keys, also)

    def _default_frozen(self) -> None:
        seen = self._world.model.is_multimodal
        frozen = [name for name in ("freeze_vit", "freeze_aligner") if not self.is_given(name)]
        if seen is False or not frozen:
            return
        self._shown = f"(default) {' and '.join(frozen)}"
        if seen is None:
            self.unsupported("nothing tells whether the model takes images: set them to true if it does")
            return
        self.take({f"training.{name}": True for name in frozen})

    def _default_evaluation(self) -> None:
        if not self.evaluates:
            return
        if not self.is_given("eval_strategy"):
            strategy = self.value("save_strategy") or "steps"
            self._default("eval_strategy, as save_strategy", {"training.eval_strategy": strategy})
        if self.value("eval_strategy") in {None, "steps"} and not self.is_given("eval_steps"):
            steps = self.value("save_steps")
            self._default("eval_steps, as save_steps", {"training.eval_steps": 500 if steps is None else steps})

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation data, and they are used."""
        if self.value("eval_strategy") == "no":
            return False
        split = self.value("split_dataset_ratio") > 0 and not self.value("val_dataset")
        return bool(self.value("val_dataset") or (split and not self.value("streaming")))

    def _default_loss_scale(self) -> None:
        if not self.is_given("loss_scale") and self._world.model.loss_scale != self.value("loss_scale"):
            also = "the template is of a model that thinks: empty thoughts are not trained"
            self._default("loss_scale", {"template.loss_scale": self._world.model.loss_scale}, also)

    @property
    def packs(self) -> bool:
        """Whether the command packs samples, and the model may."""
        return bool(self.value("packing")) and not self._world.model.unpacked

    def _packing(self) -> None:
        self._shown = PACKING
        unpacked = self._world.model.unpacked
        also = "a step holds as many samples as ms-swift's"
        if self.packs:
            also = "packs hold what fits, as ms-swift's do"
        elif unpacked:
            also = f"{unpacked} does not pack (docs/models.md); {also}"
        self.take({"training.packing": self.packs, "training.packing_drop_last": False}, also)
        if self.value("truncation_strategy") in {None, "delete"}:
            self._shown = "(this project) long samples"
            also = "samples of max_length tokens or more are left out, and counted"
            self.take({"training.packing_allow_single_long": False}, also)


def _with_learners(conversion: Conversion, builder: _Builder) -> Conversion:
    """
    Return the run with a step of as many samples where ms-swift counts several ranks as a learner.
    """
    size = int(builder.value("sequence_parallel_size"))
    if size <= 1:
        return conversion
    shown = next(line.argument for line in conversion.lines if line.argument.startswith("--sequence_parallel_size"))
    training, ranks = conversion.document["training"], builder.world.world_size
    samples = samples_of_step(training)
    if ranks % size or samples % size:
        reason = (
            f"a step there holds {counted(samples, 'sample')} for {size} ranks together, and of {ranks} here each "
            "trains its own: "
            f"make per_device_train_batch_size times gradient_accumulation_steps, and the ranks, multiples of {size}, "
            "or remove it"
        )
        lines = [attrs.evolve(line, verdict="refused", reason=reason) if line.argument == shown else line
                 for line in conversion.lines]  # fmt: skip
        return attrs.evolve(conversion, lines=tuple(lines))
    reason = f"every rank trains samples of its own, and a step holds {samples * ranks // size} of all, as ms-swift's"
    return conversion.changed(shown, batch_keys(samples // size, training), reason)


def samples_of_step(training: Mapping[str, Any]) -> int:
    """Return how many samples, or packs, a rank takes in an optimizer step by a section's keys."""
    return int(training.get("per_device_train_batch_size", 1)) * int(training["gradient_accumulation_steps"])


def batch_keys(batches: int, training: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the keys of a step of so many samples, or packs, of a rank.

    Args:
        batches: Samples, or packs, that a rank takes.
        training: The section as it is, whose batch of a forward pass is kept where it divides them.
    """
    size = int(training.get("per_device_train_batch_size", 1))
    if not batches % size:
        return {"training.gradient_accumulation_steps": batches // size}
    return {"training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": batches}


def _why_unsupported(name: str) -> str | None:
    """Return why an argument is not supported, None if it may be."""
    by_prefix = (why for prefix, why in UNSUPPORTED_PREFIXES.items() if name.startswith(prefix))
    return UNSUPPORTED.get(name) or next(by_prefix, None)


def listed(keys: Mapping[str, Any]) -> str:
    """Return keys and their values as a line shows them."""
    return ", ".join(f"{key}: {_shown(value)}" for key, value in keys.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{…}"
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _model(builder: _Builder, value: Any) -> None:
    builder.take({"model.model": value})


def _tuner(builder: _Builder, value: Any) -> None:
    builder.take({"training.tuner_type": value})


def _attention(builder: _Builder, value: Any) -> None:
    if value in {"flash_attn", "flash_attention_2"}:
        reason = "packs need no flash attention here; model.attn_impl: auto takes the fastest that keeps samples apart"
        builder.unneeded(reason)
    elif value in {"sdpa", "eager", "flex_attention"}:
        builder.take({"model.attn_impl": value})
    else:
        builder.unsupported("model.attn_impl takes sdpa, eager, flex_attention and flash_attention_2; auto is the rest")


def _data(builder: _Builder, value: Any, *, files: str, entries: str) -> None:
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


def _train_data(builder: _Builder, value: Any) -> None:
    _data(builder, value, files="train_jsonl", entries="dataset")


def _val_data(builder: _Builder, value: Any) -> None:
    if not value:
        builder.unneeded("it names no data")
        return
    if builder.value("eval_strategy") == "no":
        builder.unneeded("eval_strategy is no")
        return
    _data(builder, value, files="val_jsonl", entries="val_dataset")


def _split(builder: _Builder, value: Any) -> None:
    if not value:
        builder.unneeded("0 splits nothing")
    elif builder.value("val_dataset"):
        builder.unneeded("val_dataset is given, and ms-swift splits nothing then")
    elif builder.value("streaming"):
        builder.unneeded("streaming is given, and ms-swift splits nothing then")
    elif builder.value("eval_strategy") == "no":
        builder.unneeded("eval_strategy is no, and ms-swift splits nothing then")
    else:
        builder.take({"custom.split_dataset_ratio": value})


def _streaming(builder: _Builder, value: Any) -> None:
    if value and any("#" in name for name in builder.value("dataset") or ()):
        also = "under streaming, ms-swift takes the first records of a data set"
        builder.take({"custom.dataset_shuffle": False}, also)
    else:
        builder.unneeded(UNNEEDED["streaming"])


def _data_seed(builder: _Builder, value: Any) -> None:
    builder.take({"custom.data_seed": value, "training.data_seed": value})


def _packing(builder: _Builder, value: Any) -> None:
    if value and not builder.packs:
        builder.unsupported(f"{builder.world.model.unpacked} does not pack (docs/models.md)")
    else:
        builder.take({"training.packing": value}, "packs are planned once, before training" if value else "")


def _packing_strategy(builder: _Builder, value: Any) -> None:
    if not builder.packs:
        builder.unneeded("it is of packing, which is not given")
    elif value == "sequential":
        builder.take({"training.packing_algorithm": "concatenative"})
    else:
        builder.unneeded("training.packing_algorithm has a packer of its own; best_fit_decreasing is ms-swift's")


def _packing_length(builder: _Builder, value: Any) -> None:
    if not builder.packs:
        builder.unneeded("it is of packing, which is not given")
    elif value == builder.value("max_length"):
        builder.unneeded("packs are as long as template.max_length")
    else:
        builder.unsupported(UNSUPPORTED["packing_length"])


def _truncation(builder: _Builder, value: Any) -> None:
    if value in {"left", "right"}:
        builder.take({"template.truncation_strategy": value})
    elif value in {None, "delete"}:
        builder.unneeded("training.packing_allow_single_long: false leaves long samples out, and counts them")
    else:
        builder.unsupported("split is of swift pt: set it to left or right, or raise max_length")


def _system(builder: _Builder, value: Any) -> None:
    builder.take({"template.system": str(value).replace("\\n", "\n")})


def _frozen(builder: _Builder, value: Any, *, name: str) -> None:
    if value and builder.world.model.is_multimodal is False:
        builder.unneeded("the model has no such part")
    else:
        builder.take({f"training.{name}": value})


def _deepspeed(builder: _Builder, value: Any) -> None:
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


def _hpz(builder: _Builder, _: Any) -> None:
    if isinstance(builder.value("deepspeed"), str) and builder.value("deepspeed") not in builder.world.sections:
        builder.unsupported("write it into the file that deepspeed names")
    elif builder.value("deepspeed"):
        builder.unneeded("training.deepspeed holds it")
    else:
        builder.unneeded("it is of deepspeed, which is not given")


_VERSIONED = re.compile(r"(.+)/v\d+-\d{8}-\d{6}/?")
"""Output folder of a run of ms-swift, which adds a version and the time to what it is told."""


def _output_dir(builder: _Builder, value: Any) -> None:
    versioned = _VERSIONED.fullmatch(str(value))
    if versioned is None:
        builder.take({"training.output_dir": value})
    else:
        builder.take({"training.output_dir": versioned[1]}, "without the version that ms-swift added")


def _fsdp(builder: _Builder, value: Any) -> None:
    if isinstance(value, str) and "shard" in value:
        builder.take({"training.fsdp": value})
        return
    section = builder.world.sections.get(value) if isinstance(value, str) else value
    if not isinstance(section, Mapping):
        builder.unsupported("name fsdp2, or write training.fsdp and training.fsdp_config")
        return
    config = section.get("fsdp_config", {})
    builder.take({"training.fsdp": section.get("fsdp", "full_shard auto_wrap"), "training.fsdp_config": dict(config)})


def _evaluation(builder: _Builder, value: Any, *, name: str) -> None:
    if builder.evaluates:
        builder.take({f"training.{name}": value})
    else:
        builder.unneeded("there are no evaluation data")


def _loss_scale(builder: _Builder, _: Any) -> None:
    builder.take({"template.loss_scale": builder.world.model.loss_scale})


def _warmup_ratio(builder: _Builder, value: Any) -> None:
    builder.take({"training.warmup_ratio": value}) if value else builder.unneeded("0 warms nothing up")


def _quantised(builder: _Builder, value: Any) -> None:
    if value == "bnb":
        builder.take({"model.quant_method": value}, "on a GPU alone")
    else:
        builder.unsupported("model.quant_method takes bnb")


def _quant_bits(builder: _Builder, value: Any) -> None:
    method = builder.value("quant_method")
    if method == "bnb":
        builder.take({"model.quant_bits": value})
    elif method is None:
        builder.unneeded("quant_method is not given, and ms-swift quantises nothing then")
    else:
        builder.unsupported(f"quantisation by {method} is not offered: use bnb")


def _sequence_parallel(builder: _Builder, value: Any) -> None:
    if value == 1:
        builder.unneeded("it is ms-swift's default, and nothing else is done here")
    else:
        builder.unsupported("every rank trains samples of its own")


def _cached(builder: _Builder, value: Any) -> None:
    reason = "name the data that it was made of in dataset"
    if not value:
        builder.unneeded("it names no data")
    elif builder.value("dataset"):
        builder.unsupported(reason)
    else:
        builder.refused(reason)


def _eval_metric(builder: _Builder, value: Any) -> None:
    if value == "acc":
        builder.unneeded("an evaluation always measures the accuracy of tokens")
    else:
        builder.unsupported("an evaluation measures the loss and the accuracy of tokens (acc)")


def _self_cognition(builder: _Builder, value: Any, *, name: str) -> None:
    if any("self-cognition" in data for data in builder.value("dataset")):
        builder.take({f"custom.{name}": value})
    else:
        builder.unneeded("it is of swift/self-cognition, which dataset does not name")


def _dataset_shuffle(builder: _Builder, value: Any) -> None:
    if any("#" in data for data in builder.value("dataset")) or builder.value("split_dataset_ratio"):
        builder.take({"custom.dataset_shuffle": value})
    else:
        builder.unneeded("all records are trained, in an order that training.seed draws")


def _resume(builder: _Builder, value: Any) -> None:
    reason = "a checkpoint of ms-swift does not say how far a plan was trained: to train on from its weights, set "
    builder.unsupported(f"{reason}model.model to it ({value})")


def _report_to(builder: _Builder, value: Any) -> None:
    builder.take({"training.report_to": [value] if isinstance(value, str) else list(value)})


_SPECIAL: Mapping[str, Callable[[_Builder, Any], None]] = {
    "model": _model,
    "task_type": lambda builder, _: builder.unneeded("it is what is trained here"),
    "tuner_type": _tuner,
    "attn_impl": _attention,
    "dataset": _train_data,
    "val_dataset": _val_data,
    "split_dataset_ratio": _split,
    "data_seed": _data_seed,
    "streaming": _streaming,
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "packing_length": _packing_length,
    "truncation_strategy": _truncation,
    "system": _system,
    "freeze_llm": lambda builder, value: _frozen(builder, value, name="freeze_llm"),
    "freeze_vit": lambda builder, value: _frozen(builder, value, name="freeze_vit"),
    "freeze_aligner": lambda builder, value: _frozen(builder, value, name="freeze_aligner"),
    "deepspeed": _deepspeed,
    "zero_hpz_partition_size": _hpz,
    "fsdp": _fsdp,
    "eval_steps": lambda builder, value: _evaluation(builder, value, name="eval_steps"),
    "eval_strategy": lambda builder, value: _evaluation(builder, value, name="eval_strategy"),
    "loss_scale": _loss_scale,
    "disable_ignore_empty_think": lambda builder, _: builder.unneeded("template.loss_scale says it"),
    "warmup_ratio": _warmup_ratio,
    "quant_method": _quantised,
    "quant_bits": _quant_bits,
    "sequence_parallel_size": _sequence_parallel,
    "cached_dataset": _cached,
    "model_name": lambda builder, value: _self_cognition(builder, value, name="model_name"),
    "model_author": lambda builder, value: _self_cognition(builder, value, name="model_author"),
    "dataset_shuffle": _dataset_shuffle,
    "max_model_len": lambda builder, _: builder.unneeded("template.max_length says it"),
    "eval_metric": _eval_metric,
    "resume_from_checkpoint": _resume,
    "report_to": _report_to,
    "gradient_accumulation_steps": lambda builder, value: builder.take({"training.gradient_accumulation_steps": value}),
    "output_dir": _output_dir,
}
"""Arguments that are more than a key of another name."""
