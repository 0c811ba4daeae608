"""
Everything that this project raises on purpose.

    PackplanError
    ├── UserError                   the caller can fix it: exit status 2
    │   ├── ConfigError             the YAML: every fault at once, each with its path
    │   ├── RecordError             one record of a data file: place and reason
    │   ├── DataSetError            a data set as a whole
    │   ├── ArgumentError           an argument of a library function; a ValueError too
    │   │   └── PlanError           the samples give no plan that the ranks can train
    │   ├── ModelError              a model may not pack, or not as the run says
    │   ├── StaleError              stored lengths, a checkpoint, an image or a sample changed
    │   ├── NotBuiltError           nothing is stored yet
    │   ├── OutputError             a file or folder cannot be written, or another job writes it
    │   └── RunError                a run that has begun cannot go on
    └── VerificationError           something is not what it claims to be: exit status 3
        ├── MismatchError           packs, ranks, samples or artefacts are not as planned
        ├── ProofError              samples of a pack are not apart, or not as they are alone
        └── CorruptArtefactError    a stored file is not what was written

Errors that several things raise have a `kind`, by which a program tells them apart. They state
a fact in the words of the library; `core.config.remedies` adds what helps, in keys of a YAML.
Fields are positional, so that errors survive pickling between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Literal

import attrs

from packplan.core.errors.words import (
    MAX_LINE,
    MAX_LINES,
    agree,
    counted,
    in_lines,
    in_ranges,
    ranging,
    shortened,
)


class PackplanError(Exception):
    """Base of all errors raised on purpose; its text is bounded, whatever it quotes."""

    kind: str = ""
    """Name of the fact, by which programs tell errors of a class apart, and find a remedy."""

    details: Mapping[str, Any] = MappingProxyType({})
    """Numbers and names in the fact, by name."""

    def _text(self) -> str:
        """Return the whole text, however long."""
        return super().__str__()

    def __str__(self) -> str:
        return shortened(self._text())


class UserError(PackplanError):
    """The caller can fix it."""


class VerificationError(PackplanError):
    """Something stored or shared is not what it claims to be."""


@attrs.frozen
class Fault:
    """One thing wrong with a configuration."""

    path: str
    """Key of the YAML, with its section."""

    reason: str
    """Fact and remedy, as a clause."""

    place: str = ""
    """Argument of the command line that set the value, `section.key=value`; empty for the YAML."""

    def __str__(self) -> str:
        place = f" (command line: {self.place})" if self.place else ""
        return f"{self.path}{place}: {self.reason}" if self.path else self.reason


@attrs.define(eq=False)
class ConfigError(UserError):
    """The configuration cannot be used."""

    source: str
    """Name of the YAML, or of another source of settings."""

    faults: tuple[Fault, ...]

    @classmethod
    def at(cls, path: str, reason: str) -> ConfigError:
        """Return the error of one fault, found after the YAML was read."""
        return cls("the configuration", (Fault(path, reason),))

    def _text(self) -> str:
        return in_lines(f"{self.source} has {counted(len(self.faults), 'fault')}", self.faults)


@attrs.define(eq=False)
class RecordError(UserError):
    """One record cannot become a sample."""

    where: str
    """Place of the record: `core.samples.Place` prints it."""

    reason: str

    remedy: str = ""
    """Setting to change; empty where the record is to be changed."""

    @property
    def why(self) -> str:
        """The reason, with the remedy if it has one."""
        return f"{self.reason}: {self.remedy}" if self.remedy else self.reason

    def _text(self) -> str:
        return f"{self.where}: {self.why}"


@attrs.define(eq=False)
class DataSetError(UserError):
    """A data set as a whole cannot be used."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class ArgumentError(UserError, ValueError):
    """An argument of a library function cannot be used: lengths, a batch, the number of ranks."""

    kind: Literal[
        "length", "works", "too_few_samples", "over_budget", "uneven_shards", "batch", "batch_size",
        "whole_batch_loss", "ranks", "host", "packed_batch", "empty", "all_skipped", "all_dropped", "dropped_tokens",
        "too_long", "too_short", "unsupervised", "too_many_epochs",
    ]  # fmt: skip

    fact: str

    details: Mapping[str, Any] = attrs.field(factory=dict)

    def _text(self) -> str:
        return self.fact


@attrs.define(eq=False)
class PlanError(ArgumentError):
    """
    Samples give no plan that the ranks can train.

    Kinds: `empty` (there is no sample), `all_skipped`, `all_dropped` (no pack remains),
    `dropped_tokens` (the fill filter drops too many tokens), `too_long` (a sample is longer than a
    pack), `too_short` (too few packs for the ranks), `unsupervised` (no planned sample has a
    supervised token), `too_many_epochs` (more than are planned before the first step).
    """


@attrs.define(eq=False)
class ModelError(UserError):
    """A model may not pack, or not with this attention, or cannot be asked, weighed or traced."""

    kind: Literal["isolation", "attention", "probe", "work", "trace"]
    fact: str
    details: Mapping[str, Any] = attrs.field(factory=dict)

    def _text(self) -> str:
        return self.fact

    @classmethod
    def isolation(cls, model_type: str, attn_impl: str, reason: str) -> ModelError:
        """
        Return the error of a model whose samples may not share packs.

        Args:
            model_type: Its `model_type`.
            attn_impl: Attention that the run asks for.
            reason: Fact that forbids it, as a clause.
        """
        fact = f"{model_type} may not pack under attn_impl {attn_impl}: {reason}"
        return cls("isolation", fact, {"model_type": model_type, "attn_impl": attn_impl})

    @classmethod
    def attention(cls, attn_impl: str, reason: str) -> ModelError:
        """Return the error of an attention that the model does not run under."""
        return cls("attention", f"attn_impl {attn_impl} cannot be taken: {reason}", {"attn_impl": attn_impl})


@attrs.define(eq=False)
class StaleError(UserError):
    """Something stored was made from other inputs than those of this run."""

    kind: Literal[
        "stale_lengths", "borrowed_lengths", "table_lengths", "changed_plan", "changed_order", "changed_image",
        "changed_sample", "changed_copy",
    ]  # fmt: skip

    fact: str
    details: Mapping[str, Any] = attrs.field(factory=dict)

    def _text(self) -> str:
        return self.fact

    @classmethod
    def lengths(cls, where: str, differences: tuple[Difference, ...]) -> StaleError:
        """Return the error of stored lengths that were measured from other inputs."""
        fact = in_lines(f"the lengths in {where} were measured from other inputs", differences)
        return cls("stale_lengths", fact, {"differences": differences})

    @classmethod
    def plan(cls, checkpoint: str, differences: tuple[Difference, ...]) -> StaleError:
        """Return the error of a checkpoint that was trained from another plan."""
        head = f"{checkpoint} was trained from another plan or in another way, so this run cannot go on with it"
        reordered = any(difference.key == "order_version" for difference in differences)
        kind: Literal["changed_order", "changed_plan"] = "changed_order" if reordered else "changed_plan"
        return cls(kind, in_lines(head, differences), {"differences": differences})

    @classmethod
    def file(cls, name: str, found: str) -> StaleError:
        """Return the error of a data file that changed while it was open, by what was *found*."""
        return cls("changed_sample", f"{name} has changed since this run opened it: {found}", {"file": name})

    @classmethod
    def sample(
        cls, index: int, where: str, differences: tuple[Difference, ...], *, copy: str | None = None
    ) -> StaleError:
        """
        Return the error of a sample that is not the one that was planned.

        Args:
            index: Number of the sample.
            where: Place of its record.
            differences: Values as planned and as fetched.
            copy: Folder of the copy that its file is read from; None if the file itself is read.
        """
        changes = "; ".join(f"{one.key} planned {one.stored}, fetched {one.current}" for one in differences)
        fact = f"sample {index} ({where}) is not the one that was planned: {changes}"
        details = {"index": index, "differences": differences}
        if copy is None:
            return cls("changed_sample", fact, details)
        return cls("changed_copy", f"{fact}. Its copy was changed: delete {copy}, which is made again", details)


@attrs.define(eq=False)
class NotBuiltError(UserError):
    """Lengths or a plan are asked for that are not stored yet."""

    kind = "not_built"

    folder: str
    reason: str

    def _text(self) -> str:
        return f"{self.folder} {self.reason}"


@attrs.define(eq=False)
class OutputError(UserError):
    """A file, a folder or a stream cannot be written: no right to, no room, or another job does."""

    path: str
    reason: str
    kind: Literal["refused", "locked"] = "refused"

    def _text(self) -> str:
        return f"{self.path} cannot be written: {self.reason}"


@attrs.define(eq=False)
class RunError(UserError):
    """A run that has begun cannot go on: its ranks, its processes, or its numbers."""

    kind: Literal["rank_zero", "rank_gone", "different_runs", "lost_process", "memory", "not_finite", "worker"]
    fact: str
    details: Mapping[str, Any] = attrs.field(factory=dict)

    def _text(self) -> str:
        return self.fact

    @classmethod
    def worker(cls, worker: int, method: str, reason: str) -> RunError:
        """
        Return the error of a worker of reinforcement learning that raised or died.

        Args:
            worker: Its rank.
            method: Name of the method that it computed.
            reason: Its own error.
        """
        fact = f"worker {worker} failed in {method}: {reason}"
        return cls("worker", fact, {"worker": worker, "method": method})


@attrs.define(eq=False)
class MismatchError(VerificationError):
    """Packs, ranks, samples or artefacts are not what was planned."""

    kind: Literal["coverage", "unequal", "unequal_lengths", "unsound", "ranks_disagree", "too_large"]
    fact: str
    details: Mapping[str, Any] = attrs.field(factory=dict)

    def _text(self) -> str:
        return self.fact


@attrs.define(eq=False)
class ProofError(VerificationError, AssertionError):
    """Samples of a pack are not apart, or they or a step are not equal to themselves alone."""

    kind: Literal["leak", "unlike_alone", "unlike_padded", "unlike_step"]
    fact: str
    details: Mapping[str, Any] = attrs.field(factory=dict)

    def _text(self) -> str:
        return self.fact


@attrs.define(eq=False)
class CorruptArtefactError(VerificationError):
    """A stored file is not what was written."""

    path: str
    reason: str
    remedy: str = "delete its folder to measure and plan again"

    def _text(self) -> str:
        return f"{self.path} is damaged: {self.reason}; {self.remedy}"


@attrs.frozen
class Difference:
    """One key in which two fingerprints differ."""

    key: str
    stored: object
    current: object

    def __str__(self) -> str:
        return f"{self.key}: stored {self.stored!r}, now {self.current!r}"


@attrs.frozen
class RankDifference:
    """One key in which ranks differ."""

    key: str

    values: tuple[str | None, ...]
    """Value of each rank, as text; None where a rank has none."""

    def __str__(self) -> str:
        ranks: dict[str | None, list[int]] = {}
        for rank, value in enumerate(self.values):
            ranks.setdefault(value, []).append(rank)
        same = sum(1 for _ in takewhile(lambda at: len(set(at)) == 1, zip(*filter(None, ranks), strict=False)))
        shown = [f"{_from(value, same)} on {_ranks(ranks[value])}" for value in list(ranks)[:_MOST]]
        left_out = len(ranks) - len(shown)
        return f"{self.key}: {'; '.join(shown)}" + (f"; {counted(left_out, 'other value')}" if left_out else "")


_MOST, _MOST_CHARACTERS, _BEFORE = 3, 80, 20
"""
Values and ranks of a difference that are named, characters of a value, and those of them before the
first that differs.
"""


def _from(value: str | None, same: int) -> str:
    """Return a value, a long one from where it differs, behind so many characters that do not."""
    if value is None or len(value) <= _MOST_CHARACTERS:
        return "absent" if value is None else value
    start = max(0, same - _BEFORE)
    end = start + _MOST_CHARACTERS
    return f"{'…' if start else ''}{value[start:end]}{'…' if end < len(value) else ''}"


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words: the first ones by number."""
    named = ", ".join(map(str, ranks[:_MOST]))
    others = f" and {len(ranks) - _MOST:,} more" if len(ranks) > _MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{others}"
