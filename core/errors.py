"""
Errors that Packplan raises on purpose.

    PackplanError
    ├── UserError                   errors that the caller can fix; exit status 2
    │   ├── ConfigError             faults of the YAML, all at once, each with its path
    │   ├── RecordError             fault of one record of a data file: place and reason
    │   ├── DataSetError            fault of a data set as a whole
    │   ├── ArgumentError           invalid argument of a library function, or samples that allow
    │   │                           no plan; also a ValueError
    │   ├── ModelError              the model cannot be packed, or not with these settings
    │   ├── StaleError              stored lengths, a checkpoint, an image or a sample has changed
    │   ├── NotBuiltError           lengths or a plan are not stored yet
    │   ├── OutputError             a file or folder cannot be written, or another job locks it
    │   └── RunError                a run that has started cannot continue
    └── VerificationError           failed checks of stored or shared data; exit status 3
        ├── MismatchError           packs or ranks differ from the plan, or packed samples from
        │                           single samples; also an AssertionError
        └── CorruptArtefactError    a stored file differs from the file that was written

Callers distinguish errors by class, and errors of one class by `kind`. The text of an error states
a fact, followed by the remedy for its kind. Fields are positional, so that errors can be pickled
and sent between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby, takewhile
from textwrap import wrap
from types import MappingProxyType
from typing import Any

import attrs

SHARED_BY = "number of ranks that share the longest pack"
"""Key of the `Difference` in the degree of the longest pack."""

_DIGESTS = {"plan": "checksum of the packs", "data": "digest of the data", "lengths": "digest of the lengths"}
"""
Name of a digest -> its name in a message. A digest is reported only if no other value differs.
"""

_MOST, _MOST_CHARACTERS, _BEFORE = 3, 80, 20
"""
Maximum number of values, or of ranks, that the text of a difference lists, and maximum number of
characters of a value. The last number is that of characters before the first difference in a value.
"""

LINE_WIDTH = 110
"""Maximum number of characters in a console line of a run, unless a single word is longer."""

MAX_LINE, MAX_LINES = 500, 60
"""
Maximum number of characters per line, and of lines, in an error's text. A long quotation therefore
never hides the fact or the remedy.
"""


class PackplanError(Exception):
    """Base class of all errors that Packplan raises on purpose, with a text of limited length."""

    kind: str = ""
    """
    Identifier of the stated fact, with which programs distinguish errors of one class and find a
    remedy.
    """

    details: Mapping[str, Any] = MappingProxyType({})
    """Numbers and names in the fact: name -> value."""

    is_printed = False
    """Whether the error has been printed, by this rank or by another rank that raises it too."""

    def _full_text(self) -> str:
        """Return the complete fact without a limit on its length."""
        return super().__str__()

    def __str__(self) -> str:
        from packplan.core.config.remedies import REMEDIES  # noqa: PLC0415  # planning loads few modules

        fact, remedy = self._full_text(), REMEDIES.get(self.kind, "").format_map(self.details)
        between = "\n  " if "\n" in fact else "; "
        return shorten(f"{shorten(fact)}{between}{remedy}" if remedy else fact)


class UserError(PackplanError):
    """Base class of errors that the caller can fix."""


@attrs.define(eq=False)
class _FactError(PackplanError):
    """Base class of errors that state one of several facts, distinguished by `kind`."""

    kind: str

    fact: str = ""
    """
    Text without the remedy; empty if torch has made the error from a text alone, as it does with
    errors of a `DataLoader`'s worker processes. The text is then `kind`.
    """

    details: Mapping[str, Any] = attrs.field(factory=dict)

    def _full_text(self) -> str:
        return self.fact or self.kind


@attrs.frozen
class Fault:
    """One fault of a configuration, at one key."""

    path: str
    """Key of the YAML, with its section."""

    reason: str
    """Fact and remedy, as a clause whose subject is `path`."""

    def __str__(self) -> str:
        return f"{self.path} {self.reason}".strip()


@attrs.define(eq=False)
class ConfigError(UserError):
    """The configuration cannot be used."""

    source: str
    """Name of the YAML or of another source of settings. Empty if the key alone is clear enough."""

    faults: tuple[Fault, ...]

    @classmethod
    def for_key(cls, path: str, reason: str) -> ConfigError:
        """
        Return an error with a single fault, which was found in the key *path* after the YAML was
        read.
        """
        return cls("", (Fault(path, reason),))

    def _full_text(self) -> str:
        if self.source and any(fault.path for fault in self.faults):
            return format_lines(f"{self.source} has {counted(len(self.faults), 'fault')}", self.faults)
        return "\n".join(f"{self.source} {fault}".strip() for fault in self.faults)


@attrs.define(eq=False)
class RecordError(UserError):
    """One record cannot become a sample."""

    where: str
    """Place of the record, as `core.samples.tables.RecordLocation` prints it."""

    reason: str

    remedy: str = ""
    """Setting to change. Empty if the record itself has to be changed."""

    @property
    def explanation(self) -> str:
        """The reason, followed by the remedy if there is one."""
        return f"{self.reason}: {self.remedy}" if self.remedy else self.reason

    def _full_text(self) -> str:
        return f"{self.where}: {self.explanation}"


@attrs.define(eq=False)
class DataSetError(UserError):
    """A data set as a whole cannot be used."""

    reason: str

    def _full_text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class ArgumentError(_FactError, UserError, ValueError):
    """
    An argument of a library function cannot be used, or the samples allow no plan.

    Kinds for samples that allow no plan:

    - `empty`: there is no sample;
    - `all_skipped`: every sample is skipped;
    - `all_dropped`: the fill filter drops every pack;
    - `dropped_tokens`: the fill filter drops too many tokens;
    - `too_long`: a sample is longer than a pack;
    - `too_short`: there are too few packs for the ranks;
    - `unsupervised`: no planned sample has a supervised token;
    - `too_many_epochs`: there are more epochs than can be planned before training.
    """


@attrs.define(eq=False)
class ModelError(_FactError, UserError):
    """
    Packing is impossible for the model or with this attention, or the model's work or memory cannot
    be computed.
    """

    @classmethod
    def for_leak(cls, model_type: str, attn_impl: str, reason: str) -> ModelError:
        """
        Return the error about a model whose samples must not share packs.

        Args:
            model_type: The model's `model_type`.
            attn_impl: Attention backend that the run is configured with.
            reason: Clause that says why the model cannot be packed.
        """
        by = "" if attn_impl == "auto" else f" with attn_impl {attn_impl}"
        fact = f"models of the type {model_type} cannot be packed{by}: {reason}"
        return cls("attention" if by else "isolation", fact, {"model_type": model_type, "attn_impl": attn_impl})


@attrs.define(eq=False)
class StaleError(_FactError, UserError):
    """Stored data, a checkpoint or a file does not match the inputs of this run."""

    @classmethod
    def for_lengths(cls, where: str, differences: tuple[Difference, ...]) -> StaleError:
        """Return the error about stored lengths that were measured from other inputs."""
        fact = format_lines(f"the lengths in {where} were measured from other inputs", differences)
        return cls("stale_lengths", fact, {"differences": differences, "folder": where})

    @classmethod
    def for_plan(cls, checkpoint: str, differences: tuple[Difference, ...]) -> StaleError:
        """Return the error about a checkpoint that was trained with another plan."""
        reordered, facts = any(one.key == "order_version" for one in differences), {"differences": differences}
        causes = [one for one in differences if one.key not in _DIGESTS]
        shown = causes or [attrs.evolve(one, key=_DIGESTS[one.key]) for one in differences]
        fact = format_lines(f"this run cannot resume from {checkpoint}, since these have changed", shown)
        if {one.key for one in differences} == {SHARED_BY}:
            return cls("fewer_ranks", fact, facts)
        return cls("changed_order" if reordered else "changed_plan", fact, facts)

    @classmethod
    def for_file(cls, name: str, found: str) -> StaleError:
        """
        Return the error about a data file that changed while it was open; *found* describes the
        change.
        """
        return cls("changed_sample", f"{name} has changed since this run opened it: {found}", {"file": name})

    @classmethod
    def for_sample(
        cls, index: int, where: str, differences: tuple[Difference, ...], *, copy: str | None = None
    ) -> StaleError:
        """
        Return the error about a sample that has changed since the plan was made.

        Args:
            index: Index of the sample.
            where: Place of the sample's record.
            differences: Planned values and current values that differ.
            copy: Folder of the copy from which the data file is read; None if the original file is
                read.
        """
        details = {"index": index, "differences": differences, "copy": copy}
        what = f"the copy of sample {index} ({where}) in {copy}" if copy else f"sample {index} ({where})"
        fact = f"{what} has changed since it was planned: {'; '.join(map(str, differences))}"
        return cls("changed_copy" if copy else "changed_sample", fact, details)


@attrs.define(eq=False)
class NotBuiltError(UserError):
    """Lengths or a plan that the command needs are not stored yet."""

    kind = "not_built"

    folder: str
    reason: str

    def _full_text(self) -> str:
        return f"{self.folder} {self.reason}"


@attrs.define(eq=False)
class OutputError(UserError):
    """
    A file, folder or stream cannot be written, for example because another job locks it or the disk
    is full.
    """

    path: str
    reason: str
    kind: str = "refused"
    """
    `refused` if the operating system refuses the write, or `locked` if another job holds the lock.
    """

    def _full_text(self) -> str:
        return f"{self.path} cannot be written: {self.reason}"


@attrs.define(eq=False)
class RunError(_FactError, UserError):
    """
    A run that has started cannot continue, because a rank or process failed or a number is not
    finite.
    """

    @classmethod
    def for_worker(cls, worker: int, method: str, reason: str) -> RunError:
        """
        Return the error about a worker of reinforcement learning that raised an error or died.

        Args:
            worker: Rank of the worker.
            method: Name of the method that failed.
            reason: Text of the error on the worker.
        """
        return cls("worker", f"worker {worker} failed in {method}: {reason}")


class VerificationError(PackplanError):
    """Stored or shared data have failed a verification."""


@attrs.define(eq=False)
class MismatchError(_FactError, VerificationError, AssertionError):
    """
    Packs, ranks or samples differ from the plan, or packed samples give other results than single
    samples.
    """


@attrs.define(eq=False)
class CorruptArtefactError(VerificationError):
    """A stored file differs from the file that was written."""

    path: str
    reason: str
    remedy: str = "delete its folder to measure and plan again"

    def _full_text(self) -> str:
        return f"{self.path} is damaged: {self.reason}; {self.remedy}"


@attrs.frozen
class Difference:
    """Key or field whose stored value differs from its current value, with both values."""

    key: str
    stored: object
    current: object

    def __str__(self) -> str:
        change = f"was {_value_text(self.stored)}, now {_value_text(self.current)}"
        return "its first bytes have changed" if self.key == "head" else f"{self.key} {change}"


def _value_text(value: object) -> str:
    """Return a value of a `Difference` as text. A SHA-256 is cut to its first 12 digits."""
    text = "unset" if value is None else repr(value)
    return f"{text[:13]}'" if len(text) == 66 and not text[1:-1].strip("0123456789abcdef") else text


@attrs.frozen
class RankDifference:
    """Key whose value differs between ranks."""

    key: str

    values: tuple[str | None, ...]
    """Value of each rank, as text; None if the rank has no value."""

    def __str__(self) -> str:
        ranks: dict[str | None, list[int]] = {}
        for rank, value in enumerate(self.values):
            ranks.setdefault(value, []).append(rank)
        same = sum(1 for _ in takewhile(lambda at: len(set(at)) == 1, zip(*filter(None, ranks), strict=False)))
        shown = [f"{_differing_part(value, same)} on {_ranks_in_words(ranks[value])}" for value in list(ranks)[:_MOST]]
        left_out = len(ranks) - len(shown)
        return f"{self.key}: {'; '.join(shown)}" + (f"; {counted(left_out, 'other value')}" if left_out else "")


def _differing_part(value: str | None, same: int) -> str:
    """
    Return a value as text. Of a long value, only the part around the first difference is returned.
    The difference follows *same* equal characters.
    """
    if value is None or len(value) <= _MOST_CHARACTERS:
        return "absent" if value is None else value
    start = max(0, same - _BEFORE)
    end = start + _MOST_CHARACTERS
    return f"{'…' if start else ''}{value[start:end]}{'…' if end < len(value) else ''}"


def _ranks_in_words(ranks: list[int]) -> str:
    """Return ranks as text: the numbers of the first few, and how many more there are."""
    others = f" and {len(ranks) - _MOST:,} more" if len(ranks) > _MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST]))}{others}"


def counted(number: int, name: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1: `1 pack`, `0 batches`."""
    return f"{number:,} {name}" + ("" if number == 1 else "es" if name.endswith("tch") else "s")


def verb_for(number: int, one: str = "is", many: str = "are") -> str:
    """
    Return the form of a verb that agrees with a number, such as `is` or `are`.

    Args:
        number: Number of items.
        one: Verb form for exactly one item.
        many: Verb form for any other number of items.
    """
    return one if number == 1 else many


def token_range(lowest: int, highest: int) -> str:
    """Return a range of token counts as text: `7 tokens`, or `7 to 9 tokens`."""
    return counted(highest, "token") if lowest == highest else f"{lowest:,} to {counted(highest, 'token')}"


def format_ranges(indices: Iterable[int], *, most: int | None = None) -> str:
    """
    Return indices as text, in the given order, with consecutive indices as a range.

    A range that occurs several times in a row is written once, with the number of occurrences.

    Args:
        indices: Whole numbers.
        most: Maximum number of ranges; an ellipsis replaces further ranges. None sets no limit.

    >>> format_ranges([2, 7, 8, 9]), format_ranges([0, 1, 0, 1, 0]), format_ranges([1, 3], most=1)
    ('2, 7..9', '0..1 x 2, 0', '1, …')
    """
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], index
        else:
            ranges.append((index, index))
    parts = []
    for (first, last), same in groupby(ranges):
        times = len(list(same))
        parts.append((f"{first}..{last}" if first < last else f"{first}") + (f" x {times}" if times > 1 else ""))
    return ", ".join([*parts[:most], "…"] if most is not None and len(parts) > most else parts)


def format_lines(head: str, items: Iterable[object]) -> str:
    """
    Return a headline followed by the items, each indented on its own line.

    >>> print(format_lines("the run has 1 fault", ["seed: is x"]))
    the run has 1 fault:
      seed: is x
    """
    return "\n  ".join([f"{head}:", *map(str, items)])


def fit_lines(text: str, *, indent: int = 2) -> str:
    """
    Break the lines of *text* that exceed `LINE_WIDTH` between words. Lines that end in a backslash,
    as in a shell command, stay whole.

    Args:
        text: One or more lines.
        indent: Number of spaces before the continuation of a broken line.

    >>> [len(line) for line in fit_lines("word " * 30).splitlines()]
    [109, 41]
    """
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    lines: list[str] = []
    for line in text.splitlines():
        whole = line.endswith("\\") or not line
        lines += [line] if whole else wrap(line, LINE_WIDTH, subsequent_indent=" " * indent, **options)
    return "\n".join(lines)


def format_command(*parts: str) -> str:
    r"""
    Return a shell command on one line, or with one line per part if the command is long.

    >>> format_command("packplan plan show", "run.yaml")
    'packplan plan show run.yaml'
    """
    return (" " if sum(map(len, parts)) < LINE_WIDTH - 30 else " \\\n").join(parts)


def shorten(text: str) -> str:
    r"""
    Return *text* without the middle of long lines, and without the middle of many lines.

    >>> text = shorten("the image " + "x" * 75_852 + " does not exist")
    >>> len(text), text[:12], text[-16:], "… 75,877 characters …" in text
    (500, 'the image xx', 'x does not exist', True)
    >>> shorten("\n".join(map(str, range(1000)))).split("\n")[-3:]
    ['  … 941 more lines …', '998', '999']
    """
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        left_out = f"  … {len(lines) - MAX_LINES + 1:,} more lines …"
        lines = [*lines[: MAX_LINES - 3], left_out, *lines[-2:]]
    return "\n".join(map(_shorten_line, lines))


def _shorten_line(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    left_out = f" … {len(line):,} characters … "
    kept = MAX_LINE - len(left_out)
    return f"{line[: kept - kept // 2]}{left_out}{line[len(line) - kept // 2 :]}"
