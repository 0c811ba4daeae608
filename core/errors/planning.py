"""Lengths that make no plan, or none that the ranks can train."""

from __future__ import annotations

import attrs

from packplan.core.errors.base import ArgumentError
from packplan.core.errors.words import agree, counted, ranging


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
