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

from packplan.core.config import REFUSED_TRAINING_KEYS
from packplan.core.conversion.arguments import Argument, Given
from packplan.core.conversion.conversion import (
    PACKING,
    Conversion,
    Line,
    Verdict,
    World,
    batch_keys,
    listed,
    samples_of_step,
)
from packplan.core.conversion.special import SPECIAL, why_unread
from packplan.core.conversion.tables import KEPT, SECTIONS, UNNEEDED, UNSUPPORTED, UNSUPPORTED_PREFIXES
from packplan.core.errors import counted

STEP = 16
"""Samples of a step that ms-swift aims at where the command does not say."""


def convert(given: Sequence[Given], table: Mapping[str, Argument], world: World) -> Conversion:
    """
    Return the run that trains what a command of `swift sft` trains.

    Args:
        given: The command's arguments, which `require_consistent` accepts.
        table: Every argument of ms-swift, with its default.
        world: Facts about the model, the files and the ranks.
    """
    return Builder(given, table, world).result()


class Builder:
    """Puts the document and the lines together."""

    def __init__(self, given: Sequence[Given], table: Mapping[str, Argument], world: World) -> None:
        self.world: World = world
        self._given, self._table = given, table
        self._values = {argument.name: argument.value for argument in given}
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
        may_pack = self.value("packing") is False and not self.is_given("packing") and not self.world.model.unpacked
        converted = Conversion(self._document, tuple(self._lines), self._written, may_pack)
        size = int(self.value("sequence_parallel_size"))
        if size > 1:
            return _with_learners(converted, size, self.world.world_size)
        return _with_devices(converted, self.world) if self.world.spread else converted

    def value(self, name: str) -> Any:
        """Return the value of an argument, given or ms-swift's default."""
        return self._values.get(name, self._table[name].default if name in self._table else None)

    def is_given(self, name: str) -> bool:
        """Return whether the command gives an argument a value; None leaves it unset."""
        return self._values.get(name) is not None

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation data, and they are used."""
        if self.value("eval_strategy") == "no":
            return False
        split = self.value("split_dataset_ratio") > 0 and not self.value("val_dataset")
        return bool(self.value("val_dataset") or (split and not self.value("streaming")))

    @property
    def packs(self) -> bool:
        """Whether the command packs samples, and the model may."""
        return bool(self.value("packing")) and not self.world.model.unpacked

    def take(self, keys: Mapping[str, Any], also: str = "") -> None:
        """
        Write keys, and the line of the argument that they stand for.

        Args:
            keys: Key with its section -> value.
            also: Text behind the keys in the line.
        """
        for key, value in keys.items():
            section, _, name = key.partition(".")
            self._document[section][name] = value
            self._written[key] = self._shown
        self._say("taken over", listed(keys) + (f"; {also}" if also else ""))

    def unneeded(self, reason: str) -> None:
        """Say why the argument is not needed."""
        self._say("not needed here", reason)

    def unsupported(self, reason: str) -> None:
        """Say why the argument is not supported."""
        self._say("not supported", reason)

    def refused(self, reason: str) -> None:
        """Say why there is no run while the argument is given."""
        self._say("refused", reason)

    def _say(self, verdict: Verdict, reason: str) -> None:
        self._lines.append(Line(self._shown, verdict, reason))

    def _argument(self, name: str, value: Any) -> None:
        """Convert an argument, by the first case or table that has it."""
        section = SECTIONS.get(name, "training")
        if reason := why_unread(self, name, value):
            self.unneeded(reason)
            if name in KEPT:
                self._document[section][name] = value
        elif name in SPECIAL:
            SPECIAL[name](self, value)
        elif name in UNNEEDED:
            self.unneeded(UNNEEDED[name])
        elif reason := _why_unsupported(name):
            if value == self._table[name].default or value in (False, [], None, "none", "true"):
                self.unneeded("it is ms-swift's default, and nothing else is done here")
            else:
                self.unsupported(reason)
        elif name in REFUSED_TRAINING_KEYS:
            self.unsupported(REFUSED_TRAINING_KEYS[name])
        else:
            self.take({f"{section}.{name}": value})

    def _default(self, what: str, keys: Mapping[str, Any], also: str = "") -> None:
        """Write keys of a default; say that it is not supported, if there are none, and why."""
        self._shown = f"(default) {what}"
        if keys:
            self.take(keys, also)
        else:
            self.unsupported(also)

    def _unless_given(self, name: str, value: Any, *, what: str = "", also: str = "") -> None:
        """Write the default of an argument that is not given; None stands for an unknown one."""
        if not self.is_given(name):
            key = f"{SECTIONS.get(name, 'training')}.{name}"
            self._default(what or name, {} if value is None else {key: value}, also)

    def _defaults(self) -> None:
        """
        Write what ms-swift takes where the command says nothing, and this project takes otherwise.
        """
        default, model, tuner = self._unless_given, self.world.model, self.value("tuner_type")
        default("tuner_type", tuner, what="tuner_type lora")
        default("learning_rate", 1e-5 if tuner == "full" else 1e-4, what=f"learning_rate of {tuner}")
        size, ranks = int(self.value("per_device_train_batch_size")), 1 if self.world.spread else self.world.world_size
        steps, also = max(1, math.ceil(STEP / size / ranks)), f"{STEP} samples of a step over {ranks} ranks of {size}"
        default("gradient_accumulation_steps", steps, also=also)
        longest = self.value("max_model_len") if self.is_given("max_model_len") else model.max_length
        also = "what the model was made for; a pack is that long"
        if longest is None:
            also = "it is what the model was made for, and the model is not on this machine: set template.max_length"
        default("max_length", longest, also=also)
        self._default_precision()
        self._default_frozen()
        if self.evaluates:
            default("eval_strategy", self.value("save_strategy") or "steps", what="eval_strategy, as save_strategy")
            if self.value("eval_strategy") in {None, "steps"}:
                steps = self.value("save_steps")
                default("eval_steps", 500 if steps is None else steps, what="eval_steps, as save_steps")
        if model.loss_scale != self.value("loss_scale"):
            also = "the template is of a model that thinks: empty thoughts are not trained"
            default("loss_scale", model.loss_scale, also=also)
        name = str(self.value("model")).rstrip("/").rpartition("/")[2]
        default("output_dir", f"output/{name}")
        default("ddp_timeout", self.value("ddp_timeout"))
        default("metric_for_best_model", "loss")
        default("greater_is_better", "loss" not in (self.value("metric_for_best_model") or "loss"))
        self._packing()

    def _default_precision(self) -> None:
        unset = [name for name in ("bf16", "fp16") if not self.is_given(name)]
        dtype = self.value("torch_dtype") or self.world.model.torch_dtype
        if unset and dtype is None:
            reason = "they follow the type of the model's weights, which is not on this machine: set training.bf16"
            self._default("bf16, fp16", {}, reason)
        elif unset:
            keys = {f"training.{name}": (name == "bf16") == (dtype == "bfloat16") for name in unset}
            also = "no CPU computes in float16: remove it to train without a GPU" if keys.get("training.fp16") else ""
            self._default(f"mixed precision of {dtype} weights", keys, also)

    def _default_frozen(self) -> None:
        seen = self.world.model.is_multimodal
        frozen = [name for name in ("freeze_vit", "freeze_aligner") if not self.is_given(name)]
        if seen is not False and frozen:
            keys = {f"training.{name}": True for name in frozen} if seen else {}
            also = "" if seen else "nothing tells whether the model takes images: set them to true if it does"
            self._default(" and ".join(frozen), keys, also)

    def _packing(self) -> None:
        self._shown = PACKING
        unpacked = self.world.model.unpacked
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


def _with_learners(conversion: Conversion, size: int, ranks: int) -> Conversion:
    """
    Return the run with a step of as many samples where ms-swift counts *size* of the *ranks* as a
    learner.
    """
    shown = next(line.argument for line in conversion.lines if line.argument.startswith("--sequence_parallel_size"))
    training = conversion.document["training"]
    samples = samples_of_step(training)
    if ranks % size or samples % size:
        reason = (
            f"a step there holds {counted(samples, 'sample')} for {size} ranks together, and of {ranks} here each "
            "trains its own: "
            f"make per_device_train_batch_size times gradient_accumulation_steps, and the ranks, multiples of {size}, "
            "or remove it"
        )
        return conversion.with_line(shown, "refused", reason)
    reason = f"every rank trains samples of its own, and a step holds {samples * ranks // size} of all, as ms-swift's"
    return conversion.with_line(shown, "changed", reason, batch_keys(samples // size, training))


def ranks_of_devices(given: Sequence[Given], devices: int) -> int:
    """
    Return the most ranks, at most one for each device, that share the samples of a step evenly.

    Args:
        given: Arguments of a command that trains in one process.
        devices: Devices over which that process spreads the model.
    """
    values = {argument.name: argument.value for argument in given}
    size = int(values.get("per_device_train_batch_size") or 1)
    samples = size * int(values.get("gradient_accumulation_steps") or math.ceil(STEP / size))
    return max(ranks for ranks in range(1, devices + 1) if not samples % ranks)


def _with_devices(conversion: Conversion, world: World) -> Conversion:
    """
    Return the run of one process with several devices, with ranks that share its samples instead.
    """
    training, ranks = conversion.document["training"], world.world_size
    reason = (
        f"ms-swift spreads the model over these devices in one process; here {counted(ranks, 'rank')} hold it whole "
        "and share a step's samples: where it does not fit, set training.deepspeed or training.fsdp"
    )
    return conversion.with_line(
        world.spread, "changed", reason, batch_keys(samples_of_step(training) // ranks, training) if ranks > 1 else {}
    )


def _why_unsupported(name: str) -> str | None:
    """Return the reason for which an argument is not supported, or None."""
    by_prefix = (why for prefixes, why in UNSUPPORTED_PREFIXES.items() if name.startswith(prefixes))
    return UNSUPPORTED.get(name) or next(by_prefix, None)
