"""
Everything that this project raises on purpose.

    PackplanError
    ├── UserError                  the caller can fix it: exit status 2
    │   ├── ConfigError            the YAML: every fault at once, each with its path
    │   ├── RecordError            one record of a data file: file, line, reason
    │   ├── DataSetError           a data set as a whole
    │   ├── ArgumentError          what a library function was given; a ValueError too
    │   │   ├── InvalidLengthError  a length no packer can place: index and value
    │   │   ├── WorkError           works that cannot be balanced: index and value, or their number
    │   │   ├── TooFewSamplesError  more packs are wanted than there are samples
    │   │   ├── OverBudgetError     a sequence of an RL batch is wider than a microbatch may be
    │   │   ├── UnevenShardsError   the workers do not divide an RL batch
    │   │   ├── BatchError          a batch in memory that is none, or does not fit
    │   │   ├── EmptyPlanError      no pack remains
    │   │   ├── DroppedTokensError  the fill filter drops packs with more of the tokens than it may
    │   │   ├── SampleTooLongError  a sample over the limit, where the template is to raise
    │   │   ├── PlanTooShortError   too few packs for a batch on each rank
    │   │   ├── BatchSizeError      an effective batch that the ranks cannot realise
    │   │   └── WholeBatchLossError a loss that cannot be computed part by part
    │   ├── IsolationError         an attention backend that is not known to keep samples apart
    │   ├── ProbeError             a model cannot be asked whether it keeps samples apart
    │   ├── AttentionError         an attention backend that does not run as configured
    │   ├── StaleLengthsError      stored lengths were measured from other inputs
    │   ├── PlanChangedError       a checkpoint was trained from another plan
    │   ├── ChangedImageError      an image is not the one that was measured
    │   ├── ContractError          a fetched sample is not the sample that was planned
    │   ├── NotBuiltError          what is to be looked at is not stored
    │   ├── OutputError            the output cannot be written, or has no room
    │   ├── LockedError            another job writes the same folder
    │   ├── RankZeroError          rank 0 failed, died, or was too slow, while others waited
    │   ├── RankGoneError          another rank did not respond in time
    │   ├── LoaderError            a process that loads data ended
    │   ├── NotFiniteError         a loss or gradient is not finite, or weights are ruined
    │   └── WorkerError            a worker of reinforcement learning raised or died
    └── VerificationError          something stored or shared is not what it claims: exit status 3
        ├── CorruptArtefactError   a file differs from its digest
        ├── CoverageError          other packs were consumed than were planned
        ├── UnequalError           packed samples do not give what they give alone
        ├── UnsoundError           artefacts or data are not what was measured and planned
        └── RanksDisagreeError     ranks hold different plans or step counts

Fields are positional, so that errors survive pickling between processes.
"""

from __future__ import annotations

import attrs


def counted(number: int, name: str) -> str:
    """
    Return the number with its noun, in the plural where that is due: `1 pack`, `2 packs`, `0
    batches`.
    """
    return f"{number:,} {name}" + ("" if number == 1 else "es" if name.endswith("ch") else "s")


def agree(number: int, one: str = "is", many: str = "are") -> str:
    """
    Return the verb that agrees with a number: `is` or `are`, or what is given instead.

    Args:
        number: How many there are.

        one: The verb for exactly one.

        many: The verb for any other number.
    """
    return one if number == 1 else many


def ranging(lowest: int, highest: int, name: str) -> str:
    """
    Return what numbers range over, with their noun: `7 tokens`, or `7 to 9 tokens`.

    Args:
        lowest: The least of them.

        highest: The greatest.

        name: The noun, in the singular.
    """
    return counted(highest, name) if lowest == highest else f"{lowest:,} to {counted(highest, name)}"


def _first(items: tuple[int, ...]) -> str:
    return ", ".join(map(str, items[:10])) + (", …" if len(items) > 10 else "") or "none"


MAX_LINE, MAX_LINES = 500, 60
"""
Characters of a line of an error's text, and lines of it: whatever it quotes, the fact and the
remedy can be read.
"""


def shortened(text: str) -> str:
    """
    Return *text* with the middle of its long lines, and of too many lines, left out.

    >>> len(shortened("x" * 100_000))
    500
    """
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        left_out = f"  … {len(lines) - MAX_LINES + 1:,} more lines …"
        lines = [*lines[: MAX_LINES - 3], left_out, *lines[-2:]]
    return "\n".join(map(_shortened_line, lines))


def _shortened_line(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    left_out = f" … {len(line):,} characters … "
    kept = MAX_LINE - len(left_out)
    return f"{line[: kept - kept // 2]}{left_out}{line[len(line) - kept // 2 :]}"


class PackplanError(Exception):
    """
    Base of all errors raised on purpose; its text is bounded, whatever the data or the YAML that it
    quotes.
    """

    def _text(self) -> str:
        """Return what is wrong, and what to do, however long."""
        return super().__str__()

    def __str__(self) -> str:
        return shortened(self._text())


class UserError(PackplanError):
    """The caller can fix it; the text says what is wrong and what to do."""


class ArgumentError(UserError, ValueError):
    """What a library function was given cannot be used: lengths, a batch, the number of ranks."""


class VerificationError(PackplanError):
    """Something stored or shared is not what it claims to be."""


@attrs.frozen
class Fault:
    """One thing wrong with a configuration."""

    path: str
    """Where: `training.packing_min_fill_ratio`."""

    reason: str
    """What is wrong, and the remedy."""

    place: str = ""
    """Where the value stands, if not in the YAML: what the command line says, `training.seed=x`."""

    def __str__(self) -> str:
        place = f" (command line: {self.place})" if self.place else ""
        return f"{self.path}{place}: {self.reason}" if self.path else self.reason


@attrs.define(eq=False)
class ConfigError(UserError):
    """The configuration cannot be used."""

    source: str
    """The YAML, or what else was to be configured."""

    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, path: str, reason: str) -> ConfigError:
        """Return the error of one fault, found after the YAML was read."""
        return cls("the configuration", (Fault(path, reason),))

    def _text(self) -> str:
        count = counted(len(self.faults), "fault")
        return "\n  ".join([f"{self.source} has {count}:", *map(str, self.faults)])


@attrs.define(eq=False)
class RecordError(UserError):
    """One record cannot become a sample."""

    where: str
    """Place of the record: `core.samples.Place` prints it."""

    reason: str

    remedy: str = ""
    """What to set, where the run and not the record is to be changed."""

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
class InvalidLengthError(ArgumentError):
    """A length that no packer can place."""

    index: int
    value: object
    reason: str

    def _text(self) -> str:
        return f"length {self.index} is {self.value!r}: {self.reason}"


@attrs.define(eq=False)
class WorkError(ArgumentError):
    """
    Works that cannot be balanced: of another number than what they are of, negative, or not finite.
    """

    of: str
    """What they are of, in the plural."""

    num: int
    num_works: int
    index: int | None = None
    """The first work that is negative or not finite; None if their number is wrong."""

    value: float = 0.0
    num_wrong: int = 0

    def _text(self) -> str:
        if self.index is None:
            return (
                f"works and {self.of} differ in number ({self.num_works:,} and {self.num:,}): give one work for each, "
                "as core.work.WorkModel.of does"
            )
        wrong = f"; {self.num_wrong:,} of {self.num:,} are wrong" if self.num_wrong > 1 else ""
        return (
            f"work {self.index} is {self.value}, but the work of {self.of} is a finite number of at least 0{wrong}: "
            "give FLOPs, as core.work.WorkModel.of does, or seconds"
        )


@attrs.define(eq=False)
class TooFewSamplesError(ArgumentError):
    """More packs are wanted than there are samples."""

    num_samples: int
    num_packs: int
    min_bin_count: int
    bin_count_multiple: int

    def _text(self) -> str:
        return (
            f"{counted(self.num_samples, 'sample')} cannot fill {counted(self.num_packs, 'pack')} (min_bin_count "
            f"{self.min_bin_count:,}, "
            f"bin_count_multiple {self.bin_count_multiple:,}), for no pack is empty: ask for at most "
            f"{counted(self.num_samples, 'pack')}, or give more samples"
        )


@attrs.define(eq=False)
class OverBudgetError(ArgumentError):
    """A sequence of an RL batch is wider than a microbatch may be."""

    index: int
    length: int
    padded: int
    max_tokens: int
    num_over: int
    widest: int

    def _text(self) -> str:
        rounded = f", {self.padded:,} when padded," if self.padded != self.length else ""
        others = f"; {counted(self.num_over, 'sequence')} are too wide" if self.num_over > 1 else ""
        return (
            f"sequence {self.index} has {counted(self.length, 'token')}{rounded} but a microbatch holds "
            f"{self.max_tokens:,} "
            f"(max_tokens_per_microbatch){others}: raise train_mb_tokens and logprob_mb_tokens to at least "
            f"{self.widest:,}"
        )


@attrs.define(eq=False)
class UnevenShardsError(ArgumentError):
    """The workers do not divide an RL batch."""

    num_sequences: int
    num_shards: int

    def _text(self) -> str:
        return (
            f"{counted(self.num_sequences, 'sequence')} of a batch cannot be divided evenly over "
            f"{counted(self.num_shards, 'worker')}: make "
            "the batch a multiple of the workers, allow uneven shards, or use packing or dynamic batching, which "
            "fill up"
        )


@attrs.define(eq=False)
class BatchError(ArgumentError):
    """A batch in memory is none, or does not fit what it is to be used with."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class EmptyPlanError(ArgumentError):
    """No pack remains, so there is nothing to train on."""

    num_samples: int
    num_skipped_long: int
    packing_length: int
    num_dropped_packs: int = 0

    dropped_lengths: tuple[int, int] = (0, 0)
    """Tokens of the shortest and of the longest sample in dropped packs."""

    fullest: int = 0
    """Tokens of the fullest pack that is dropped."""

    min_fill_ratio: str = ""
    """As the user wrote it."""

    def _text(self) -> str:
        if self.num_samples == 0:
            return "the data set is empty: 0 samples give no pack"
        remedies = []
        if self.num_skipped_long:
            remedies.append(
                f"{counted(self.num_skipped_long, 'sample')} {agree(self.num_skipped_long, 'has', 'have')} "
                f"{counted(self.packing_length, 'token')} or more (template.max_length): raise "
                "template.max_length, lower template.max_pixels, or set training.packing_allow_single_long: true"
            )
        if self.num_dropped_packs:
            # Rounded down, so that the value that is named is one that suffices.
            enough = self.fullest * 10_000 // self.packing_length / 10_000
            packs, lengths = (
                counted(self.num_dropped_packs, "pack"),
                f"samples of {ranging(*self.dropped_lengths, 'token')}",
            )
            remedies.append(
                f"{packs} ({lengths}) {agree(self.num_dropped_packs)} filled below "
                f"training.packing_min_fill_ratio ({self.min_fill_ratio}), the fullest to {enough:g} of "
                f"{counted(self.packing_length, 'token')}: set training.packing_drop_last: false to train all of "
                "them, or "
                f"lower the ratio, to at most {enough:g} for a first pack"
            )
        return f"none of {counted(self.num_samples, 'sample')} is left to train on: {'; '.join(remedies)}"


@attrs.define(eq=False)
class DroppedTokensError(ArgumentError):
    """
    The fill filter drops several packs, and with them a larger share of the tokens than is allowed.
    """

    num_dropped_packs: int
    num_dropped: int
    """Samples in these packs."""

    num_samples: int
    shortest: int
    longest: int
    """Tokens of the shortest and of the longest sample that is dropped."""

    dropped_tokens: int
    num_tokens: int
    """Tokens of the whole data set."""

    max_dropped_share: str
    """Share of the tokens that may be dropped, as the user wrote it."""

    min_fill_ratio: str

    def _text(self) -> str:
        # Rounded up, so that the value that is named is one that suffices.
        enough = -(-self.dropped_tokens * 10_000 // self.num_tokens) / 10_000
        return (
            f"{self.num_dropped:,} of {counted(self.num_samples, 'sample')} (of "
            f"{ranging(self.shortest, self.longest, 'token')}) would never be trained: their "
            f"{counted(self.num_dropped_packs, 'pack')} are filled below {self.min_fill_ratio}, and have "
            f"{self.dropped_tokens / self.num_tokens:.2%} of all tokens. Set training.packing_drop_last: false to "
            "train all "
            "of them, lower training.packing_min_fill_ratio, or raise training.packing_max_dropped_share from "
            f"{self.max_dropped_share} to {enough}"
        )


@attrs.define(eq=False)
class PlanTooShortError(ArgumentError):
    """Dropping what does not fill a batch on each rank would leave no batch."""

    num_packs: int
    world_size: int

    batch_size: int = 1
    """
    Packs of a rank in one forward pass; more than 1 only without packing, where every pack is one
    sample.
    """

    def _text(self) -> str:
        num, ranks, size = self.num_packs, self.world_size, self.batch_size
        ways = ["set training.dataloader_drop_last: false"]
        if size > 1:
            what = f"{counted(num, 'sample')} cannot feed {counted(ranks, 'rank')} with a batch of {size:,} each"
            if num >= ranks:
                ways.append(f"lower training.per_device_train_batch_size to {num // ranks:,}")
        else:
            what = f"{counted(num, 'pack')} cannot feed {counted(ranks, 'rank')}"
        if num >= size:
            ways.append(f"use {counted(num // size, 'rank')} at most")
        if size == 1:
            ways.append("when packing, lower template.max_length to get more packs")
        return f"{what} while the remainder is dropped: {', or '.join(ways)}"


@attrs.define(eq=False)
class SampleTooLongError(ArgumentError):
    """A sample is over the limit, and the template is to raise then."""

    index: int
    length: int
    limit: int
    num_too_long: int
    num_samples: int
    longest: int

    def _text(self) -> str:
        return (
            f"sample {self.index} has {counted(self.length, 'token')}, but template.truncation_strategy: raise allows "
            f"{self.limit:,} (template.max_length); {self.num_too_long:,} of {counted(self.num_samples, 'sample')} "
            f"{agree(self.num_too_long)} "
            "too long. "
            f"Raise template.max_length to {self.longest:,}, lower template.max_pixels, or remove "
            "template.truncation_strategy, so that they are packs of their own"
        )


@attrs.define(eq=False)
class BatchSizeError(ArgumentError):
    """The effective batch cannot be realised exactly."""

    effective_batch_size: int
    world_size: int
    per_device: int

    def _text(self) -> str:
        unit = self.world_size * self.per_device
        below = self.effective_batch_size // unit * unit
        nearest = f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
        each = counted(self.world_size, "rank") + (f" x {self.per_device:,} per device" if self.per_device > 1 else "")
        return (
            f"training.effective_batch_size is {self.effective_batch_size:,}, which is not divisible by {each}: "
            f"set it to {nearest}, or change the number of ranks"
        )


@attrs.define(eq=False)
class IsolationError(UserError):
    """Samples of one pack might see each other, or would not train as they do alone."""

    model_type: str
    attn_impl: str
    reason: str

    def _text(self) -> str:
        other = "" if self.attn_impl == "auto" else "set model.attn_impl: auto, or "
        return (
            f"{self.model_type} may not pack under model.attn_impl {self.attn_impl}: {self.reason}; "
            f"{other}set training.packing: false"
        )


@attrs.define(eq=False)
class ProbeError(UserError):
    """A model cannot be asked whether it keeps the samples of a pack apart."""

    model_type: str
    reason: str

    def _text(self) -> str:
        return f"whether {self.model_type} keeps the samples of a pack apart cannot be proven: {self.reason}"


@attrs.define(eq=False)
class AttentionError(UserError):
    """An attention backend does not run as the run is configured."""

    attn_impl: str
    why_not: str
    instead: str

    def _text(self) -> str:
        return f"model.attn_impl {self.attn_impl} cannot be taken: {self.why_not}; use model.attn_impl: {self.instead}"


@attrs.define(eq=False)
class WholeBatchLossError(ArgumentError):
    """A loss compares sequences that packing and dynamic batching compute apart."""

    loss: str

    def _text(self) -> str:
        return (
            f"the loss {self.loss} compares sequences with each other, so it needs the whole batch at once; sequence "
            "packing and dynamic batching compute it part by part. Set policy.sequence_packing.enabled: false and "
            "policy.dynamic_batching.enabled: false, or, if its parts add up, give it needs_whole_batch = False"
        )


@attrs.frozen
class Difference:
    """One key in which two fingerprints differ."""

    key: str
    stored: object
    current: object

    def __str__(self) -> str:
        return f"{self.key}: stored {self.stored!r}, now {self.current!r}"


@attrs.define(eq=False)
class StaleLengthsError(UserError):
    """Stored lengths were measured from other inputs."""

    where: str
    differences: tuple[Difference, ...]
    borrowed: bool = False
    """Whether they are another run's, which training.packing_lengths_from names."""

    def _text(self) -> str:
        head = f"the lengths in {self.where} were measured from other inputs"
        tail = (
            "restore the inputs, or remove training.packing_lengths_from to measure here"
            if self.borrowed
            else "use another training.output_dir, restore the inputs, or delete that folder to measure again "
            "(checkpoints lie elsewhere and stay)"
        )
        return "\n  ".join([f"{head}:", *map(str, self.differences), tail])


@attrs.define(eq=False)
class PlanChangedError(UserError):
    """A checkpoint was trained from another plan."""

    checkpoint: str
    differences: tuple[Difference, ...]

    def _text(self) -> str:
        head = f"{self.checkpoint} was trained from another plan or in another way, so this run cannot go on with it"
        ways = []
        keys = {difference.key for difference in self.differences}
        if "order_version" in keys:
            ways.append("this version trains packs in another order: install the one that wrote the checkpoint")
        if keys - {"order_version"}:
            ways.append("restore the data and the settings")
        again = "start again from its weights: set model.model to it, and remove training.resume_from_checkpoint"
        return "\n  ".join([f"{head}:", *map(str, self.differences), f"{' and '.join(ways)}, or {again}"])


@attrs.define(eq=False)
class ChangedImageError(UserError):
    """An image is not the one that was measured."""

    index: int
    image: int
    differences: tuple[Difference, ...]

    def _text(self) -> str:
        changes = "; ".join(map(str, self.differences))
        return (
            f"image {self.image} of sample {self.index} is not the one that was measured: {changes}. Restore it, or "
            "use "
            "another training.output_dir to measure and plan again"
        )


@attrs.define(eq=False)
class ContractError(UserError):
    """A fetched sample is not the sample that was planned."""

    index: int
    record: str
    differences: tuple[Difference, ...]

    def _text(self) -> str:
        changes = "; ".join(f"{d.key} planned {d.stored}, fetched {d.current}" for d in self.differences)
        return (
            f"sample {self.index} ({self.record}) is not the one that was planned: {changes}. The data changed after "
            "it was measured: restore it, or use another training.output_dir to measure and plan again"
        )


@attrs.define(eq=False)
class NotBuiltError(UserError):
    """What is to be looked at is not stored."""

    folder: str
    reason: str

    def _text(self) -> str:
        return f"{self.folder} {self.reason}: python -m app.plan build measures and plans"


@attrs.define(eq=False)
class OutputError(UserError):
    """A file, a folder or a stream cannot be written: no right to, or no room."""

    path: str
    reason: str
    remedy: str = "make room, or choose a training.output_dir that you may write"

    def _text(self) -> str:
        return f"{self.path} cannot be written: {self.reason}; {self.remedy}"


@attrs.define(eq=False)
class LockedError(UserError):
    """Another job writes the same folder."""

    folder: str
    holder: str
    limit_s: float
    """Seconds that a run waits, for all that it waits for."""

    def _text(self) -> str:
        return (
            f"{self.folder} is being written by {self.holder}, and this run has waited {self.limit_s:,g} s in all: "
            "wait until "
            "it is done, end it, use another training.output_dir, or raise training.packing_wait_timeout_s"
        )


@attrs.define(eq=False)
class RankGoneError(UserError):
    """Another rank did not respond in time."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class RankZeroError(UserError):
    """Rank 0 failed, died, or was too slow, while this rank waited for its plan."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class LoaderError(UserError):
    """A worker process that loads data for training ended before its time."""

    reason: str
    num_workers: int
    """Workers of each rank."""

    def _text(self) -> str:
        return (
            f"loading data failed: {self.reason}. Most often the machine, or its shared memory (/dev/shm), is full: "
            f"lower training.dataloader_num_workers (now {self.num_workers:,}; 0 loads in the training process), or "
            "training.dataloader_prefetch_factor, or give the machine more memory"
        )


@attrs.define(eq=False)
class NotFiniteError(UserError):
    """A loss or a gradient is no finite number, or the weights are ruined."""

    what: str
    number: float

    consequence: str = (
        "the policy was not updated and not saved: lower training.learning_rate, and look at what grpo.reward and "
        "grpo.loss give"
    )

    def _text(self) -> str:
        return f"{self.what} is {self.number}, so {self.consequence}"


@attrs.define(eq=False)
class WorkerError(UserError):
    """A worker of reinforcement learning raised or died."""

    worker: int
    method: str
    reason: str

    def _text(self) -> str:
        return f"worker {self.worker} failed in {self.method}: {self.reason}"


@attrs.define(eq=False)
class CorruptArtefactError(VerificationError):
    """A stored file is not what was written."""

    path: str
    reason: str
    remedy: str = "delete its folder to measure and plan again"

    def _text(self) -> str:
        return f"{self.path} is damaged: {self.reason}; {self.remedy}"


@attrs.define(eq=False)
class RanksDisagreeError(VerificationError):
    """Ranks hold different values of what must be equal."""

    what: str
    values: tuple[str, ...]

    def _text(self) -> str:
        rows = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(self.values))
        return f"ranks disagree on {self.what}: {rows}"


@attrs.define(eq=False)
class CoverageError(VerificationError):
    """A rank consumed other packs than its share."""

    what: str
    """What was consumed: training's epoch, or an evaluation."""

    missing: tuple[int, ...]
    """Packs that were not consumed, or not often enough."""

    surplus: tuple[int, ...]
    """Packs that were consumed too often."""

    def _text(self) -> str:
        return (
            f"{self.what} did not consume what was planned: packs missing {_first(self.missing)}, packs in excess "
            f"{_first(self.surplus)}"
        )


@attrs.define(eq=False)
class UnequalError(VerificationError):
    """Packed samples do not give what they give alone."""

    checks: tuple[str, ...]

    def _text(self) -> str:
        return (
            f"packed training is not the same training: {', '.join(self.checks)} differ; do not pack with this model "
            "and "
            "attention backend (model.attn_impl: another one, or training.packing: false)"
        )


@attrs.define(eq=False)
class UnsoundError(VerificationError):
    """Artefacts or data are not what was measured and planned."""

    num_findings: int

    def _text(self) -> str:
        findings = counted(self.num_findings, "finding")
        return f"{findings}: what is stored is not what training would use"
