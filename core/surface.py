"""
Plans for scripts and notebooks: from a list of lengths to packs, figures and a schedule.

>>> from packplan.core.surface import plan
>>> found = plan([60, 20, 50, 30, 40, 40], 80)
>>> found.packs.tolist()
[[0, 1], [2, 3], [4, 5]]
>>> [step.batches for step in found.schedule(packs_per_step=2, shuffle=False).steps()]
[((0,), (1,)), ((2,),)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.align import align_plan
from packplan.core.batch import pack_degrees
from packplan.core.errors import ArgumentError, counted, verb_for
from packplan.core.inspection import BOUNDS, PlanSummary, summarise
from packplan.core.lengths import (
    MOST_RANKS,
    IntArray,
    Lengths,
    as_lengths,
    as_whole_number,
    frozen_array,
    require_bools,
)
from packplan.core.packs import HasPacks, Packs, plan_checksum
from packplan.core.plan import RawPlan, build_raw_plan, refuse_dropped
from packplan.core.plan import refuse_longer as refuse_longer_samples
from packplan.core.policy import PlanPolicy
from packplan.core.schedule import EpochSchedule
from packplan.core.work.model import WorkModel

_DRAWN_PACKS, _WIDTH, _BAR = 24, 640, 9
"""
Number of packs that a notebook draws, width of the drawing in pixels, and height of a pack in
pixels.
"""

_DRAWN_SAMPLES = 4000
"""Maximum number of samples that all drawings of the first packs show together."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@attrs.frozen(eq=False, repr=False)
class Plan(HasPacks):
    """Packs made from a list of lengths, with figures and schedules."""

    raw: RawPlan
    """Raw plan: the packs, and all counts that planning computes."""

    lengths: IntArray = attrs.field(converter=frozen_array)
    """Number of tokens of each sample; int64, read-only, shape (num_samples,)."""

    @property
    def packs(self) -> Packs:
        """Sample indices of each pack; the value behaves like a list of lists."""
        return self.raw.packs

    @cached_property
    def checksum(self) -> str:
        """
        SHA-256 of the packs, which is the same on every machine with equal lengths and options.
        """
        return plan_checksum(self.raw.packs)

    @cached_property
    def summary(self) -> PlanSummary:
        """Figures of the plan."""
        return summarise(self.raw, self.lengths)

    def schedule(
        self,
        *,
        world_size: int = 1,
        packs_per_step: int | None = None,
        epochs: float = 1,
        drop_last: bool = False,
        max_steps: int = -1,
        seed: int = 0,
        shuffle: bool = True,
        works: NDArray[np.number] | None = None,
        degrees: int | Literal["auto"] = 1,
    ) -> EpochSchedule:
        """
        Return the schedule that trains this plan.

        Args:
            world_size: Number of data-parallel ranks, >= 1.
            packs_per_step: Number of packs in one optimizer step over all ranks, a multiple of
                *world_size*. None means one pack for each rank.
            epochs: Number of epochs, which may be fractional.
            drop_last: Whether to drop packs that do not fill all ranks. If false, packs from the
                front are repeated.
            max_steps: Total number of optimizer steps. A positive number overrides *epochs*.
            seed: Seed for the order of packs, from 0.
            shuffle: Whether each epoch has a new random order. If false, packs keep the order of
                the plan.
            works: Work of each pack in any unit; shape (num_packs,). If given, the packs of each
                step are assigned to ranks by work.
            degrees: Maximum number of ranks that share a long pack: a power of two that divides
                *world_size*, or `auto` for the largest such power. A shared pack counts in a step
                once for each of its ranks, and `Step.ranks` contains these ranks.

        Raises:
            ArgumentError: An argument is invalid, *packs_per_step* is not a multiple of
                *world_size*, or *drop_last* leaves no pack for a rank.
        """
        require_bools(drop_last=drop_last)
        world_size = as_whole_number("world_size", world_size, most=MOST_RANKS)
        packs_per_step = world_size if packs_per_step is None else as_whole_number("packs_per_step", packs_per_step)
        accumulation, rest = divmod(packs_per_step, world_size)
        if rest:
            message = f"packs_per_step is {packs_per_step}, but has to be a multiple of world_size {world_size}"
            raise ArgumentError("argument", message)
        most = None if degrees == "auto" else as_whole_number("degrees", degrees, most=MOST_RANKS)
        tokens = None if most == 1 else self.packs.loads(self.lengths)
        needed = None if tokens is None else pack_degrees(tokens, self.raw.packing_length)
        options: dict[str, Any] = {"dataloader_drop_last": drop_last, "degrees": needed, "tokens": tokens}
        return EpochSchedule.from_plan(
            align_plan(self.raw, world_size=world_size, max_degree=most, **options),
            gradient_accumulation_steps=accumulation,
            num_train_epochs=epochs,
            max_steps=max_steps,
            seed=seed,
            shuffle=shuffle,
            works=works,
            plan=self.checksum,
        )

    def show(self) -> PlanTable:
        """Return a table of the figures. A notebook also displays a drawing of the first packs."""
        return PlanTable(self)

    def report(self, path: Any) -> None:
        """
        Write an HTML page with figures and plots of the plan. The page needs the extra `report`.

        Args:
            path: File to write, as a string or a path. An existing file is replaced.

        Raises:
            OutputError: The file cannot be written.
            ModuleNotFoundError: matplotlib or jinja2 is not installed.
        """
        from packplan import write_report  # noqa: PLC0415  # the package knows the adapter that writes it

        write_report(self, path)

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()

    def __repr__(self) -> str:
        return f"Plan({counted(len(self.packs), 'pack')} of {counted(self.raw.num_samples, 'sample')})"


def plan(
    lengths: Lengths,
    packing_length: int,
    *,
    algorithm: str = "auto",
    images: Lengths | None = None,
    max_images: int | None = None,
    allow_single_long: bool = True,
    refuse_longer: bool = False,
    drop_last: bool = True,
    min_fill_ratio: float | str | Decimal | Fraction = "0",
    max_dropped_share: float | str | Decimal | Fraction = "0.01",
    packing: bool = True,
    replanned: bool = False,
    seed: int = 0,
    work: WorkModel | None = None,
) -> Plan:
    """
    Group samples into packs. Every sample is in exactly one pack, unless an option drops or skips
    it.

    Args:
        lengths: Number of tokens of each sample, >= 1.
        packing_length: Maximum number of tokens in a pack of several samples, >= 1.
        algorithm: Name of a packing algorithm, a key of `ALGORITHMS`.
        images: Number of images of each sample, needed with *max_images* and only then.
        max_images: Maximum number of images in a pack of several samples, >= 1; None sets no limit.
        allow_single_long: Whether each sample of at least *packing_length* tokens becomes a pack by
            itself. If false, such samples are skipped.
        refuse_longer: Whether a sample of more than *packing_length* tokens is an error.
        drop_last: Whether packs that are filled below *min_fill_ratio* are dropped.
        min_fill_ratio: Share of a pack below which it is dropped, from 0 to 1; 0 drops no pack.
            With *max_images*, a sample fills its share of the tokens or of the images, whichever is
            larger.
        max_dropped_share: Largest share of all tokens, from 0 to 1, that may be lost in several
            dropped packs. A single dropped pack is always allowed.
        packing: Whether samples share packs; otherwise each sample is a pack by itself.
        replanned: Whether to draw the packs from *seed*, as for epoch 0 of a run that draws new
            packs each epoch.
        seed: Seed of random algorithms, from 0 to 2**64 - 1.
        work: Model of the samples' work, only for an algorithm that packs by work (`balanced`).
            None derives the work from the lengths.

    Raises:
        ArgumentError: An option or a length is invalid, or no pack is left.
        ArgumentError: *refuse_longer* is true, and a sample is longer than a pack.
        ArgumentError: Several dropped packs contain more than *max_dropped_share* of the tokens.

    >>> plan([60, 20, 50, 30, 90], 80, allow_single_long=False).packs.tolist()
    [[0, 1], [2, 3]]
    """
    policy = PlanPolicy(
        packing_length=packing_length,
        algorithm=algorithm,
        max_images=max_images,
        allow_single_long=allow_single_long,
        refuse_longer=refuse_longer,
        drop_last=drop_last,
        min_fill_ratio=min_fill_ratio,
        max_dropped_share=max_dropped_share,
        packing=packing,
        replanned=replanned,
        seed=seed,
        work=work,
    )
    if images is not None and max_images is None:
        raise ArgumentError("argument", "images decide nothing without max_images: give max_images too, or no images")
    array = as_lengths(lengths)
    refuse_longer_samples(array, policy)
    if not isinstance(work, WorkModel | None):
        raise ArgumentError(
            "argument", f"work is {work!r:.80}, but has to be a WorkModel: WorkModel.from_config(config)"
        )
    works = None if work is None else work.sample_flops(array)
    raw = build_raw_plan(array, policy, images=images, works=works)
    refuse_dropped(raw, array, policy)
    return Plan(raw, array)


@attrs.frozen
class Figure:
    """One figure of a plan or of its training, as text for a table."""

    key: str
    """Field of `PlanSummary` or of another summary, and name of the figure in a JSON document."""

    name: str
    """Name in the table, indented by spaces below the figure that it is a part of."""

    value: str

    remark: str
    """Text after the value in a table: its unit, or further figures and notes."""

    decides: bool = False
    """Whether a short table shows the figure too."""


def sample_figures(plan: PlanSummary, *, packed: bool = True) -> Iterator[Figure]:
    """
    Yield the figures of a plan's samples and tokens.

    Args:
        plan: Figures of the plan as numbers.
        packed: Whether samples share packs.
    """
    yield Figure("num_samples", "samples", f"{plan.num_samples:,}", counted(plan.num_tokens, "token"), decides=True)
    remark = f"{counted(plan.planned_tokens, 'token')}, {plan.token_coverage:.2%}"
    yield Figure("planned_samples", "  planned", f"{plan.planned_samples:,}", remark)
    if packed:
        remark = f"{counted(plan.dropped_tokens, 'token')}, in {counted(plan.dropped_packs, 'underfilled pack')}"
        yield _left_out("dropped_samples", "  dropped", plan.dropped_samples, remark)
    remark = counted(plan.skipped_tokens, "token")
    yield _left_out("skipped_samples", "  skipped, too long", plan.skipped_samples, remark)
    if packed:
        remark = counted(plan.long_tokens, "token")
        yield _left_out("long_samples", "  long, packs of their own", plan.long_samples, remark)
    if plan.supervised_tokens is not None and plan.unsupervised_samples is not None:
        remark = f"{plan.supervised_tokens / plan.planned_tokens:.1%} of the planned tokens; the loss counts them"
        yield Figure("supervised_tokens", "supervised tokens", f"{plan.supervised_tokens:,}", remark)
        name, remark = "  without supervised tokens", "nothing is learned from them"
        yield _left_out("unsupervised_samples", name, plan.unsupervised_samples, remark)


def pack_figures(plan: PlanSummary) -> Iterator[Figure]:
    """Yield the figures of a plan's packs."""
    bound = f"no plan has fewer than {plan.lower_bound:,}{' in all' * bool(plan.dropped_packs)}"
    remark = f"of {counted(plan.packing_length, 'token')}; {bound}"
    yield Figure("num_packs", "packs", f"{plan.num_packs:,}", remark, decides=True)
    if plan.auto_packs:
        remark = "approximately, with packing_algorithm: auto"
        yield Figure("auto_packs", "  by auto", f"{plan.auto_packs:,}", remark, decides=True)
    yield Figure("samples_per_pack", "  samples of each", f"{plan.samples_per_pack:.2f}", "on average")
    exceed = verb_for(plan.oversized_packs, "exceeds", "exceed")
    remark = f"tokens; {plan.oversized_packs:,} {exceed} 110 % of the packing length"
    yield Figure("longest_pack", "  longest", f"{plan.longest_pack:,}", remark)
    remark = f"of {BOUNDS[plan.bound_kind]}{'; dropped packs count too' * bool(plan.dropped_packs)}"
    yield Figure("gap", "  above the lower bound", f"{plan.gap:.3%}", remark)
    remark = f"95 % of packs reach {plan.fill_p5:.4f}"
    yield Figure("fill_mean", "  fill", f"{plan.fill_mean:.4f}", remark, decides=True)
    yield Figure("fill_worst", "  worst fill", f"{plan.fill_worst:.4f}", "a long pack counts as full")
    remark = f"of positions in padded batches of {max(1, round(plan.samples_per_pack))}, estimated"
    yield Figure("padding_saved", "  saved against padding", f"{plan.padding_saved:z.1%}", remark, decides=True)


def _left_out(key: str, name: str, number: int, remark: str) -> Figure:
    """Return a figure that a short table shows only if it is not 0."""
    return Figure(key, name, f"{number:,}", remark, decides=number > 0)


@attrs.frozen(repr=False)
class PlanTable:
    """Figures of a plan as text; a notebook shows them as HTML with a drawing."""

    plan: Plan

    @property
    def figures(self) -> list[Figure]:
        """Figures of the plan that are not 0."""
        summary, checksum = self.plan.summary, Figure("checksum", "checksum", self.plan.checksum[:12], "")
        return [one for one in (*sample_figures(summary), *pack_figures(summary), checksum) if one.value != "0"]

    def __repr__(self) -> str:
        rows = [(one.name, one.value, one.remark) for one in self.figures]
        names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{name:<{names}}  {value:>{values}}  {remark}".rstrip() for name, value, remark in rows)

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<tr><th style="text-align:left;white-space:pre">{one.name}</th><td>{one.value}</td>'
            f'<td style="text-align:left">{one.remark}</td></tr>'
            for one in self.figures
        )
        lengths = [self.plan.lengths[pack].tolist() for pack in self.plan.packs[:_DRAWN_PACKS]]
        return f"<table>{cells}</table>{draw_packs(lengths, packing_length=self.plan.raw.packing_length)}"


def draw_packs(packs: Sequence[Sequence[int]], *, packing_length: int) -> str:
    """
    Return an SVG drawing of packs. Each pack is a bar of its samples, on grey up to the packing
    length.

    Args:
        packs: Number of tokens of each sample, for each pack.
        packing_length: Number of tokens of a full bar, >= 1. The bar of a longer pack is cut off.

    >>> '<rect x="160.0" y="0" width="479.5"' in draw_packs([[20, 60], [80]], packing_length=80)
    True
    """
    height = len(packs) * (_BAR + 2)
    bars = []
    for number, pack in enumerate(packs):
        top = number * (_BAR + 2)
        bars.append(_bar(0, top, _WIDTH, "#b8bec6"))
        for place, end in enumerate(accumulate(pack)):
            left, right = ((min(at, packing_length) * _WIDTH / packing_length) for at in (end - pack[place], end))
            bars.append(_bar(left, top, right - left, COLOURS[(number + place) % len(COLOURS)]))
    title = f"{counted(len(packs), 'pack')}, each a bar of its samples; grey is empty"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">'
    return f"{head}<title>{title}</title>{''.join(bars)}</svg>"


def draw_first_packs(plan: RawPlan, lengths: IntArray) -> list[str]:
    """
    Return drawings of up to 60 packs from the front, 20 packs in each. Fewer packs are drawn if
    these packs have more than 4,000 samples.

    Args:
        plan: Plan of samples with these lengths.
        lengths: Number of tokens of each record; int64, shape (num_records,).
    """
    count = min(60, int(np.searchsorted(plan.packs.offsets, _DRAWN_SAMPLES, side="right")) - 1)
    packs = [lengths[samples].tolist() for samples in plan.packs[:count]]
    return [draw_packs(packs[at : at + 20], packing_length=plan.packing_length) for at in range(0, count, 20)]


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.5, 0.5):.1f}" height="{_BAR}" fill="{colour}"/>'
