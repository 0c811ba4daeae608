"""
Planning, which makes a raw plan from the lengths of samples. Long samples are planned first. The
other samples are then packed, and the packs are filtered by their fill and ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import inf, lcm
from typing import Any, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.bounds import Bound, effort_for_bound, find_bound
from packplan.core.errors import ArgumentError, counted, token_range, verb_for
from packplan.core.lengths import IntArray, Lengths, as_lengths, as_works, exact_share
from packplan.core.packers import pack
from packplan.core.packers.drawing import redraw
from packplan.core.packs import HasPacks, Packs, concatenate, sort_by_first_index
from packplan.core.patterns.certificate import BoundKind
from packplan.core.policy import PlanPolicy

_SAVED = 500
"""
`auto_packs` is set only if `auto` saves more than one pack in this number of packs, which is 0.2 %.
"""


_COUNTS = (
    "packing_length", "num_samples", "num_tokens", "planned_tokens", "dropped_tokens", "skipped_tokens", "long_tokens",
    "lower_bound", "auto_packs",
)  # fmt: skip

_BOUND_KINDS: tuple[BoundKind, ...] = get_args(BoundKind)


@attrs.frozen
class RawPlan(HasPacks):
    """
    All packs of a plan, in the order of their first samples. The packs do not depend on the number
    of ranks.
    """

    packs: Packs
    """Packs for training, ordered by first index; indices ascend in each pack."""

    single_long: tuple[int, ...]
    """
    Samples of `packing_length` tokens or more that are packs by themselves. The fill filter never
    drops them.
    """

    skipped_long: tuple[int, ...]
    """Samples of `packing_length` tokens or more that are skipped, so that they are in no pack."""

    dropped_packs: Packs
    """Packs that the fill filter drops, so that they are not trained."""

    packing_length: int
    """Maximum number of tokens in a pack of several samples."""

    num_samples: int
    num_tokens: int
    """Number of tokens of the whole data set."""

    planned_tokens: int
    dropped_tokens: int
    skipped_tokens: int
    """Number of tokens of planned, dropped and skipped samples; their sum is `num_tokens`."""

    long_tokens: int
    """Number of tokens of the samples in `single_long`; part of `planned_tokens`."""

    lower_bound: int
    """
    Lower bound on the number of packs, before the fill filter: no plan of the samples that are not
    skipped has fewer packs.
    """

    bound_kind: BoundKind
    """Method that found the lower bound."""

    auto_packs: int = attrs.field(default=0, eq=False)
    """
    Approximate number of packs that the algorithm `auto` would need for the same samples. The
    search for the lower bound finds this number. The value is 0 if `auto` saves at most 0.2 % or
    the policy is `replanned`. The value is also 0 if the packs depend on more than the number of
    samples of each length.
    """

    @property
    def planned_samples(self) -> int:
        """Number of samples in all packs."""
        return self.packs.num_samples

    @property
    def dropped_samples(self) -> int:
        """Number of samples in dropped packs."""
        return self.dropped_packs.num_samples

    @property
    def fill(self) -> float:
        """Mean fill of the packs. The pack of a long sample counts as full."""
        capacity = len(self.packs) * self.packing_length
        return (self.planned_tokens - self.long_tokens + len(self.single_long) * self.packing_length) / capacity

    @property
    def dropped_share(self) -> Fraction:
        """Share of all tokens that the fill filter drops."""
        return Fraction(self.dropped_tokens, self.num_tokens)

    def with_indices(self, indices: IntArray) -> RawPlan:
        """
        Return the same plan with each sample index replaced.

        Args:
            indices: New index of each sample, ascending; int64, shape (num_samples,).

        >>> plan = build_raw_plan([60, 90, 20], packing_length=80)
        >>> plan.with_indices(np.array([0, 2, 3])).packs.tolist()
        [[0, 3], [2]]
        """
        return attrs.evolve(
            self,
            packs=Packs(self.packs.offsets, indices[self.packs.indices]),
            dropped_packs=Packs(self.dropped_packs.offsets, indices[self.dropped_packs.indices]),
            single_long=tuple(indices[list(self.single_long)].tolist()),
            skipped_long=tuple(indices[list(self.skipped_long)].tolist()),
        )


def build_raw_plan(
    lengths: Lengths,
    policy: PlanPolicy | None = None,
    *,
    epoch: int = 0,
    works: NDArray[np.number] | Sequence[float] | None = None,
    images: Lengths | None = None,
    quick_bound: bool = False,
    report: Callable[[str], None] = lambda _: None,
    **fields: Any,
) -> RawPlan:
    """
    Group samples into packs by a policy.

    Args:
        lengths: Number of tokens of each sample, >= 1.
        policy: Settings that decide the plan. None uses only *fields*, which then need
            `packing_length`.
        epoch: Number of the planned epoch, from 0. The number changes the packs only if the policy
            is `replanned`.
        works: Work of each sample in any unit, >= 0, for algorithms that pack by work (`balanced`).
            None derives the work from the lengths.
        images: Number of images of each sample; needed if the policy has `max_images`.
        quick_bound: Whether to compute the lower bound without a search, for plans that are only
            compared. If false, a search computes the bound. The search's limit of steps grows with
            the number of samples, but `certified` without `max_images` has no such limit. The packs
            are the same in both cases.
        report: Called with a progress message.
        fields: Fields of `PlanPolicy` that replace the same fields of *policy*, such as
            `packing_length`, `algorithm` or `min_fill_ratio`.

    Raises:
        ArgumentError: A length is not a positive whole number.
        ArgumentError: No pack is left.
        ArgumentError: A field has an invalid value, `max_images` is set without *images*, or
            *policy* is not a `PlanPolicy`.
        TypeError: A field does not exist, or `packing_length` is missing.

    >>> build_raw_plan([80, 81, 20, 20, 20, 20], packing_length=80).packs.tolist()
    [[0], [1], [2, 3, 4, 5]]
    """
    if not isinstance(policy, PlanPolicy | None):
        message = f"the second argument has to be a PlanPolicy, not {policy!r}: write packing_length={policy!r}"
        raise ArgumentError("argument", message)
    policy = PlanPolicy(**fields) if policy is None else attrs.evolve(policy, **fields)
    array = as_lengths(lengths)
    long = np.flatnonzero(array >= policy.packing_length)
    single, skipped = (long, long[:0]) if policy.allow_single_long else (long[:0], long)
    # An algorithm that counts lengths already makes a sample that fills a pack a pack by itself.
    alone = single[:0] if policy.counts_lengths else single
    if not policy.packing:
        alone = np.delete(np.arange(array.size), skipped)
    is_packed = np.ones(array.size, dtype=bool)
    is_packed[alone] = is_packed[skipped] = False
    packed = slice(None) if is_packed.all() else np.flatnonzero(is_packed)
    tokens = np.minimum(array[packed], policy.packing_length)
    sizes, capacity = _sizes_with_images(array, images, policy)
    filled = np.minimum(sizes[packed], capacity)
    options: dict[str, Any] = {
        "capacity": capacity, "algorithm": policy.algorithm, "seed": policy.seed, "report": report,
        "works": None if works is None else as_works(works, array.size, items="samples")[packed],
    }  # fmt: skip
    grouped = redraw(filled, epoch=epoch, **options) if policy.replanned else pack(filled, **options)
    if not isinstance(packed, slice):
        grouped = Packs(grouped.offsets, packed[grouped.indices])
    packs, dropped = _split_by_fill(grouped, sizes, policy, capacity)
    if alone.size:
        packs = sort_by_first_index(concatenate([packs, Packs(np.arange(alone.size + 1), alone)]))
    if not len(packs):
        raise _no_packs_error(array, skipped, dropped, policy)
    proves = policy.algorithm == "certified" and policy.max_images is None
    effort = 0 if quick_bound else inf if proves else effort_for_bound(array.size)
    bound = _find_plan_bound(tokens, policy, known=len(grouped), effort=effort, report=report)
    saves = policy.counts_lengths and not policy.replanned and (len(packs) - bound.best) * _SAVED > len(packs)
    of_dropped, of_skipped, of_all = (int(part.sum()) for part in (array[dropped.indices], array[skipped], array))
    return RawPlan(
        packs=packs,
        single_long=tuple(single.tolist()),
        skipped_long=tuple(skipped.tolist()),
        dropped_packs=dropped,
        packing_length=policy.packing_length,
        num_samples=array.size,
        num_tokens=of_all,
        planned_tokens=of_all - of_dropped - of_skipped,
        dropped_tokens=of_dropped,
        skipped_tokens=of_skipped,
        long_tokens=int(array[single].sum()),
        lower_bound=alone.size + bound.packs,
        bound_kind=bound.kind,
        auto_packs=bound.best if saves else 0,
    )


def _sizes_with_images(lengths: IntArray, images: Lengths | None, policy: PlanPolicy) -> tuple[IntArray, int]:
    """
    Return the size of each sample and the capacity of a pack, in a common unit. The size of a
    sample is its share of the tokens or of the images, whichever is larger. Packs within this
    capacity therefore satisfy both limits.
    """
    if policy.max_images is None:
        return lengths, policy.packing_length
    try:
        counts = as_lengths([] if images is None else images, least=0)
    except ArgumentError as error:
        fact = error.fact.replace("length", "count").replace(" of tokens", "").replace(" tokens", "")
        raise attrs.evolve(error, fact=f"images: {fact}") from None
    if counts.size != lengths.size:
        message = f"images has {counts.size:,} counts, but max_images needs one for each of {lengths.size:,} samples"
        raise ArgumentError("argument", message)
    capacity = lcm(policy.packing_length, policy.max_images)
    per_token, per_image = capacity // policy.packing_length, capacity // policy.max_images
    most = max(int(lengths.max(initial=0)) * per_token, int(counts.max(initial=0)) * per_image, capacity)
    if most * lengths.size >= 2**63:
        message = f"max_images is {policy.max_images:,}, too many for a pack: leave it out, or give fewer"
        raise ArgumentError("argument", message)
    return np.maximum(lengths * per_token, counts * per_image), capacity


def _find_plan_bound(
    tokens: IntArray, policy: PlanPolicy, *, known: int, effort: float, report: Callable[[str], None]
) -> Bound:
    """
    Return a lower bound on the packs of a plan. Each sample that fills a pack needs a pack by
    itself.

    Args:
        tokens: Number of tokens of each packed sample, at most the packing length.
        policy: Settings that decide the plan.
        known: Number of packs of these samples in the plan.
        effort: Maximum number of steps of the search for the bound.
        report: Called with a progress message.
    """
    full = int(np.count_nonzero(tokens == policy.packing_length))
    report(f"{counted(known - full, 'pack')}, looking for the plan's bound")
    found = find_bound(
        tokens[tokens < policy.packing_length] if full else tokens,
        capacity=policy.packing_length,
        known=known - full,
        effort=effort,
        report=report,
    )
    return Bound(found.packs + full, found.kind, found.best + full)


def _split_by_fill(grouped: Packs, sizes: IntArray, policy: PlanPolicy, capacity: int) -> tuple[Packs, Packs]:
    """Return the packs that the fill filter keeps, and the packs that it drops."""
    # Exact and rounded up: 55 of 100 tokens for a ratio of 0.55.
    least = -int(-exact_share("min_fill_ratio", policy.min_fill_ratio) * capacity // 1) if policy.drop_last else 0
    keep = grouped.loads(sizes) >= least if least > 1 else np.ones(len(grouped), dtype=bool)
    if keep.all():
        return grouped, grouped[:0]
    return grouped.take(np.flatnonzero(keep)), grouped.take(np.flatnonzero(~keep))


def no_samples_error() -> ArgumentError:
    """Return the error for a data set without samples."""
    return ArgumentError("empty", "the data set is empty: give at least one sample")


def _no_packs_error(lengths: IntArray, skipped: IntArray, dropped: Packs, policy: PlanPolicy) -> ArgumentError:
    """Return the error for a plan without packs."""
    if not lengths.size:
        return no_samples_error()
    capacity = counted(policy.packing_length, "token")
    reasons: list[str] = []
    details: dict[str, float] = {"num_skipped": skipped.size, "num_dropped_packs": len(dropped)}
    if skipped.size:
        reasons.append(f"{counted(skipped.size, 'sample')} of {capacity} or more {verb_for(skipped.size)} skipped")
    if len(dropped):
        short, fullest = lengths[dropped.indices], int(dropped.loads(lengths).max())
        # Rounded down, so that the ratio in the message is low enough.
        details["fullest"] = fullest * 10_000 // policy.packing_length / 10_000
        reasons.append(
            f"{counted(len(dropped), 'pack')} (samples of {token_range(int(short.min()), int(short.max()))}) "
            f"{verb_for(len(dropped))} filled to at most {details['fullest']:g} ({fullest:,} of {capacity}), below "
            f"min_fill_ratio {policy.min_fill_ratio}"
        )
    fact = f"none of {counted(lengths.size, 'sample')} is left to train on, since {', and '.join(reasons)}"
    return ArgumentError("all_dropped" if len(dropped) else "all_skipped", fact, details)


def refuse_longer(lengths: Lengths, policy: PlanPolicy) -> None:
    """
    Raise an error if the policy refuses samples longer than a pack and there is such a sample.

    Args:
        lengths: Number of tokens of each record, 0 for a record that is not a sample; shape
            (num_records,).
        policy: Settings that decide the plan.

    Raises:
        ArgumentError: A sample is longer than a pack. The message has the index of the first such
            sample, and the number of such samples.
    """
    array, limit = as_lengths(lengths, least=0), policy.packing_length
    over = np.flatnonzero(array > limit)
    if policy.refuse_longer and over.size:
        first, num_samples = int(over[0]), int(np.count_nonzero(array))
        num, longest = over.size, int(array.max())
        fact = (
            f"sample {first} has {counted(int(array[first]), 'token')}, but a pack holds at most {limit:,} "
            f"(packing_length); {num:,} of {counted(num_samples, 'sample')} {verb_for(num)} too long, "
            f"the longest has {longest:,}"
        )
        raise ArgumentError("too_long", fact, {"index": first, "num_too_long": num, "longest": longest})


def refuse_dropped(plan: RawPlan, lengths: Lengths, policy: PlanPolicy) -> None:
    """
    Raise an error if the fill filter drops a larger share of the tokens than the policy allows.

    A single dropped pack is always allowed, since the last pack of a small data set is rarely full.

    Args:
        plan: The raw plan.
        lengths: Number of tokens of each record, 0 for a record that is not a sample; shape
            (num_records,).
        policy: Policy with which the plan was made.

    Raises:
        ArgumentError: Several packs are dropped, and they contain more than `max_dropped_share` of
            the tokens.

    >>> policy = PlanPolicy(packing_length=100, min_fill_ratio="0.5")
    >>> refuse_dropped(build_raw_plan([51, 51, 90], policy), [51, 51, 90], policy)
    """
    if len(plan.dropped_packs) <= 1 or plan.dropped_share <= exact_share("max_dropped_share", policy.max_dropped_share):
        return
    dropped = as_lengths(lengths, least=0)[plan.dropped_packs.indices]
    # Rounded up, so that the share in the message is high enough.
    enough = -(-plan.dropped_tokens * 10_000 // plan.num_tokens) / 10_000
    fact = (
        f"{plan.dropped_samples:,} of {counted(plan.num_samples, 'sample')} (of "
        f"{token_range(int(dropped.min()), int(dropped.max()))}) would never be trained: their "
        f"{len(plan.dropped_packs):,} packs are filled below min_fill_ratio {policy.min_fill_ratio}. These packs hold "
        f"{plan.dropped_tokens / plan.num_tokens:.2%} of all tokens, above max_dropped_share "
        f"{policy.max_dropped_share}"
    )
    raise ArgumentError("dropped_tokens", fact, {"num_dropped": plan.dropped_samples, "enough": enough})


def unsupervised_samples(plan: RawPlan, supervised: Lengths) -> IntArray:
    """
    Return the planned samples without supervised tokens, ascending; int64.

    Args:
        plan: The raw plan.
        supervised: Number of supervised tokens of each record; shape (num_records,).

    >>> unsupervised_samples(build_raw_plan([60, 20, 30], packing_length=80), [0, 7, 0]).tolist()
    [0, 2]
    """
    planned = plan.packs.indices
    return np.sort(planned[np.asarray(supervised)[planned] == 0])


def require_supervised(plan: RawPlan, supervised: Lengths) -> None:
    """
    Raise an error if no sample of the plan has a supervised token.

    Args:
        plan: The raw plan.
        supervised: Number of supervised tokens of each record; shape (num_records,).

    Raises:
        ArgumentError: No planned sample has a supervised token.
    """
    nothing = unsupervised_samples(plan, supervised)
    if nothing.size == plan.planned_samples:
        fact = f"none of {counted(nothing.size, 'planned sample')} has a supervised token, so nothing would be learned"
        raise ArgumentError("unsupervised", fact, {"num_samples": nothing.size, "sample": int(nothing[0])})


def plan_to_arrays(plan: RawPlan) -> dict[str, IntArray]:
    """Convert the plan to flat int64 arrays, which are stored and sent to other ranks."""
    return {
        "offsets": plan.packs.offsets,
        "indices": plan.packs.indices,
        "dropped_offsets": plan.dropped_packs.offsets,
        "dropped_indices": plan.dropped_packs.indices,
        "single_long": np.array(plan.single_long, dtype=np.int64),
        "skipped_long": np.array(plan.skipped_long, dtype=np.int64),
        "counts": np.array([getattr(plan, name) for name in _COUNTS], dtype=np.int64),
        "bound_kind": np.array([_BOUND_KINDS.index(plan.bound_kind)], dtype=np.int64),
    }


def plan_from_arrays(arrays: Mapping[str, IntArray]) -> RawPlan:
    """
    Rebuild a plan from the arrays that `plan_to_arrays` returned. Raise a ValueError or a
    LookupError if the arrays are not a valid plan.
    """
    return RawPlan(
        packs=Packs(arrays["offsets"], arrays["indices"]),
        dropped_packs=Packs(arrays["dropped_offsets"], arrays["dropped_indices"]),
        single_long=tuple(arrays["single_long"].tolist()),
        skipped_long=tuple(arrays["skipped_long"].tolist()),
        bound_kind=_BOUND_KINDS[int(arrays["bound_kind"][0])],
        **dict(zip(_COUNTS, arrays["counts"].tolist(), strict=True)),
    )
