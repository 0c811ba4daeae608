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
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from packplan.core.config import REFUSED_TRAINING_KEYS
from packplan.core.conversion.arguments import Argument, Given
from packplan.core.conversion.contradictions import require_consistent
from packplan.core.conversion.conversion import PACKING, Conversion, Line, World, batch_keys, listed, samples_of_step
from packplan.core.conversion.special import SPECIAL, why_unread
from packplan.core.conversion.tables import (
    ADAPTERS,
    GENERATION,
    KEPT,
    KEYS,
    UNNEEDED,
    UNSUPPORTED,
    UNSUPPORTED_PREFIXES,
    WHOLE,
)
from packplan.core.errors import counted

STEP = 16
"""Samples of a step that ms-swift aims at where the command does not say."""


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
    return Builder(given, {argument.name: argument.value for argument in given}, table, world).result()


class Builder:
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
        if reason := why_unread(self, name, value):
            self.unneeded(reason)
            if name in KEPT:
                section, _, key = KEYS.get(name, f"training.{name}").partition(".")
                self._document[section][key] = value
        elif name in SPECIAL:
            SPECIAL[name](self, value)
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


def _with_learners(conversion: Conversion, builder: Builder) -> Conversion:
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


def _why_unsupported(name: str) -> str | None:
    """Return why an argument is not supported, None if it may be."""
    by_prefix = (why for prefix, why in UNSUPPORTED_PREFIXES.items() if name.startswith(prefix))
    return UNSUPPORTED.get(name) or next(by_prefix, None)
