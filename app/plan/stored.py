"""A split as it is stored, in numbers: opened without its data, its model, torch or ms-swift."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import attrs

from packplan.app.cli.forecasts import time_document
from packplan.app.plan.epochs import EpochsView, epochs_view, plan_of_epoch
from packplan.app.planning.bad import left_out
from packplan.app.planning.epochs import EpochPlanner
from packplan.app.planning.log_lines import describe
from packplan.app.planning.schedule import ragged_window, require_static, split_schedule
from packplan.app.planning.split import Split, Stores, alignment, plan_samples, samples_of
from packplan.app.planning.stored_lengths import open_lengths, refusals, stale_inputs
from packplan.app.wiring import stores
from packplan.app.wiring.attention import attention_by, needs_verdict, refuse_leak, stored_verdict
from packplan.app.wiring.forecasts import attention_name, earlier_timing, find_peak, find_timing, run_forecast
from packplan.app.wiring.mixes import recipe_of
from packplan.app.wiring.works import Work, policy_of, work_of
from packplan.core.align import AlignedPlan, align_plan
from packplan.core.config import RunConfig, with_remedy
from packplan.core.epochs import EpochRecipe, plan_key
from packplan.core.equality import AUTO, AttentionChoice, PackingVerdict
from packplan.core.errors import ConfigError, ModelError, NotBuiltError, UserError, counted
from packplan.core.forecast import RunForecast
from packplan.core.inspection import (
    PlanSummary,
    ScheduleSummary,
    SourceSummary,
    summarise,
    summarise_schedule,
    summarise_sources,
)
from packplan.core.plan import refuse_longer
from packplan.core.ports import StoredLengths, StoredPlan
from packplan.core.samples import by_source, column, video_totals
from packplan.core.schedule import EpochSchedule, PackStats


@attrs.frozen(eq=False)
class StoredSplit:
    """Lengths and plan of one split, which belong together."""

    name: str
    where: str
    lengths: StoredLengths
    plan: StoredPlan

    @property
    def packed(self) -> bool:
        """Whether samples share packs."""
        return bool(self.plan.key.inputs["packing"])

    def summary(self) -> PlanSummary:
        """Return the plan in numbers."""
        supervised = column(self.lengths.rows.table, "supervised")
        return summarise(self.plan.plan, self.lengths.tokens, packed=self.packed, supervised=supervised)

    def ranks(self, world_size: int | None) -> int:
        """Return the ranks asked for; None takes the most that the plan was aligned for."""
        return world_size or max(self.plan.world_sizes, default=1)

    def schedule(self, config: RunConfig, *, world_size: int | None) -> tuple[Work, AlignedPlan, EpochSchedule]:
        """
        Return the work of the samples, and the plan as so many ranks train it.

        Args:
            config: The run.
            world_size: Ranks; None takes the most that the plan was aligned for.

        Raises:
            ArgumentError: The ranks would get no batch.
            ArgumentError: The ranks cannot realise the batch.
        """
        raw, work = self.plan.plan, work_of(config, self.lengths.rows.table)
        aligned = align_plan(raw, world_size=self.ranks(world_size), **alignment(config, self.name))
        return work, aligned, split_schedule(config, self.name, aligned, raw.packs.sums(work.samples.flops))

    def schedule_summary(self, schedule: EpochSchedule, work: Work, epochs: EpochsView | None) -> ScheduleSummary:
        """
        Return a schedule of the plan in numbers.

        Args:
            schedule: Schedule over the plan.
            work: Work of the samples.
            epochs: Epochs that have plans of their own.
        """
        tokens, epoch = self.lengths.tokens, 0 if epochs is None else epochs.epoch
        summary = summarise_schedule(
            self.plan.plan, tokens, schedule, packed=self.packed, works=work.samples, epoch=epoch
        )
        return summary if epochs is None else attrs.evolve(summary, total_steps=epochs.schedule.total_steps)

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return the plan in numbers, source by source; none where older lengths name no files."""
        origin = self.lengths.origin
        if not origin.files:
            return ()
        rows = self.lengths.rows
        return summarise_sources(self.plan.plan, rows.table, origin.files, media=rows.media)


@attrs.frozen(eq=False)
class PlanView:
    """A split of a run, at one world size."""

    stored: StoredSplit
    planned: Split
    schedule: EpochSchedule
    plan_summary: PlanSummary
    schedule_summary: ScheduleSummary
    work: Work
    attention: AttentionChoice | None
    """That training takes; None if that cannot be said, which `warnings` then do."""

    verdict: PackingVerdict | None
    """Whether samples may share the model's packs; None if it was not asked yet."""

    warnings: tuple[str, ...]

    epochs: EpochsView | None = None
    """Epochs that have plans of their own; None where all have one."""

    forecast: RunForecast | None = None
    """Predicted time of the run; None for an evaluation, and where nothing was measured."""

    unused: str | None = None
    """Warning that a stored calibration is of something else; None if there is none."""

    price: float | None = None
    """Price of an hour of a rank's device; None shows no cost."""

    peak: int | None = None
    """Bytes that a step takes on a rank, which `packplan plan fit` stored; None if it did not."""

    @property
    def epoch(self) -> int:
        """Epoch of the plan, 0 where all have one."""
        return 0 if self.epochs is None else self.epochs.epoch


def splits_of(config: RunConfig, split: str | None) -> list[str]:
    """
    Return the splits of a run that are asked for, by default all; ConfigError if it lacks the one.
    """
    require_static(config)
    having = ["train", *(["eval"] if config.custom.val_jsonl else [])]
    if split is not None and split not in having:
        raise ConfigError.at("custom.val_jsonl", "is not set, so there is no eval split")
    return having if split is None else [split]


def open_split(name: str, kept: Stores) -> StoredSplit:
    """
    Return lengths and plan of a split.

    Raises:
        NotBuiltError: They are not stored, or not both of the same lengths.
        CorruptArtefactError: They are not what was written.
    """
    lengths, plan = open_lengths(kept.lengths), kept.plans.inspect()
    if plan is None:
        raise NotBuiltError(kept.plans.where, "holds lengths, but no plan")
    if plan.key.inputs["lengths"] != lengths.digest:
        raise NotBuiltError(kept.plans.where, "holds a plan of other lengths than it holds")
    return StoredSplit(name, kept.plans.where, lengths, plan)


def measured_recipe(config: RunConfig, split: str, lengths: StoredLengths, *, where: str) -> EpochRecipe | None:
    """
    Return the recipe of a split's epochs, whose sources are those that were measured.

    Args:
        config: The run.
        split: `train` or `eval`.
        lengths: Stored lengths of the split.
        where: Place of what was built, for errors.

    Raises:
        ConfigError: All faults of the mix.
        NotBuiltError: Other sources were measured.
    """
    recipe = recipe_of(config, split)
    measured = len(list(by_source(lengths.origin.files)))
    if recipe is not None and recipe.mixes is not None and measured != (now := len(recipe.mixes.files)):
        raise NotBuiltError(where, f"holds lengths of {counted(measured, 'source')}, but the mix now has {now:,}")
    return recipe


def _open_planned(config: RunConfig, split: str) -> StoredSplit:
    """
    Open a split; where its lengths give no plan, raise what building raises, for to build would not
    help.
    """
    kept = stores.open_stores(config, split)
    try:
        return open_split(split, kept)
    except NotBuiltError:
        lengths, policy = open_lengths(kept.lengths), policy_of(config, split)
        refuse_longer(lengths.tokens, policy)
        samples = samples_of(policy, lengths.rows.table, lengths.origin.files)
        recipe = measured_recipe(config, split, lengths, where=kept.plans.where)
        plan_samples(split, policy, samples, recipe=recipe, quick_bound=True)
        raise


def inspect_plan(
    config: RunConfig,
    split: str,
    *,
    world_size: int | None,
    epoch: int | None = None,
    price: float | None = None,
) -> PlanView:
    """
    Open a split of a run and put it in numbers.

    Args:
        config: The run.
        split: `train` or `eval`.
        world_size: Ranks; None takes the most that the plan was aligned for.
        epoch: Epoch whose plan is shown, where each has its own; None takes the first.
        price: Price of an hour of a rank's device; None shows no cost.

    Raises:
        PackplanError: It is not stored, or damaged, or not for so many ranks or epochs.
    """
    stored = _open_planned(config, split)
    recipe, policy = measured_recipe(config, split, stored.lengths, where=stored.where), policy_of(config, split)
    planner, is_current = None, True
    if recipe is not None:
        planner = EpochPlanner(
            policy, recipe, samples_of(policy, stored.lengths.rows.table, stored.lengths.origin.files)
        )
        epoch = epoch or 0
        is_current = stored.plan.key == plan_key(recipe, policy, stored.lengths.digest)
        plan = plan_of_epoch(planner, stored.plan, epoch, where=stored.where, is_current=is_current)
        stored = attrs.evolve(stored, plan=attrs.evolve(stored.plan, plan=plan))
    elif epoch:
        raise ConfigError.at("--epoch", "is of runs whose epochs have plans of their own; here all have the same")
    raw, origin = stored.plan.plan, stored.lengths.origin
    ranks = stored.ranks(world_size)
    work, aligned, schedule = stored.schedule(config, world_size=ranks)
    epochs = None
    if planner is not None and epoch is not None:
        epochs = epochs_view(
            planner, stored.plan.epochs, raw, schedule, epoch=epoch, where=stored.where, is_current=is_current
        )
    planned = Split(
        split, policy, table=stored.lengths.rows.table, data_digest=origin.data_digest, raw=raw, aligned=aligned
    )
    warnings = list(_warnings(config, stored, planned, schedule if epochs is None else epochs.schedule))
    attention, verdict, unknown = _attention_of(config, stored)
    warnings += unknown
    forecast, unused = (None, None) if split == "eval" else _forecast(config, stored, planned, schedule, work)
    unused = unused and f"{split}: a stored calibration is not used: {unused}"
    warnings += [unused] if unused else []
    if work.estimated:
        warnings.append(f"{split}: work is estimated from tokens and their squares: {work.estimated}")
    return PlanView(
        stored=stored,
        planned=planned,
        schedule=schedule,
        plan_summary=stored.summary(),
        schedule_summary=stored.schedule_summary(schedule, work, epochs),
        work=work,
        attention=attention,
        verdict=verdict,
        warnings=tuple(warnings),
        epochs=epochs,
        forecast=forecast,
        unused=unused,
        price=price,
        peak=find_peak(config, world_size=ranks, plan=stored.plan.key) if split == "train" else None,
    )


def _attention_of(
    config: RunConfig, stored: StoredSplit
) -> tuple[AttentionChoice | None, PackingVerdict | None, list[str]]:
    """
    Return the attention of a split's training and the verdict on its model, as far as they can be
    said without the model, and warnings that say why not.
    """
    choice = verdict = None
    warnings = []
    try:
        verdict = stored_verdict(config)
        if verdict is None and needs_verdict(config, packed=stored.packed):
            warnings.append("no stored verdict says whether samples may share the model's packs: build asks the model")
        if verdict is not None or config.model.attn_impl != AUTO:
            choice = attention_by(config, verdict, on_cpu=bool(config.training.trainer.get("use_cpu")))
            if stored.packed:
                refuse_leak(config, choice)
    except ModelError as error:
        warnings.append(f"training refuses the attention: {with_remedy(error)}")
    except UserError as error:
        warnings.append(f"which attention training takes cannot be said: {with_remedy(error)}")
    return choice, verdict, [f"{stored.name}: {warning}" for warning in warnings]


def _forecast(
    config: RunConfig, stored: StoredSplit, planned: Split, schedule: EpochSchedule, work: Work
) -> tuple[RunForecast | None, str | None]:
    """
    Return the forecast of a run over its stored plan, and that of `eval` if there is one, None if
    nothing was measured; and why stored calibrations do not fit.
    """
    ranks = schedule.world_size
    timing, unused = find_timing(config, world_size=ranks, attention=attention_name(config))
    plan = stored.plan.key.digest if stored.plan.epochs else planned.raw_checksum
    timing = timing or earlier_timing(config, world_size=ranks, plan=plan)
    if timing is None:
        return None, unused
    stats = PackStats.from_plan(stored.plan.plan, stored.lengths.tokens, packed=stored.packed, works=work.samples)
    evaluated = None
    if config.custom.val_jsonl:
        with contextlib.suppress(NotBuiltError):
            other = open_split("eval", stores.open_stores(config, "eval"))
            _, aligned, _ = other.schedule(config, world_size=schedule.world_size)
            policy = policy_of(config, "eval")
            evaluated = Split("eval", policy, table=other.lengths.rows.table, raw=other.plan.plan, aligned=aligned)
    return run_forecast(config, timing, stats, schedule, work.samples, evaluated=evaluated), unused


def _warnings(config: RunConfig, stored: StoredSplit, planned: Split, schedule: EpochSchedule) -> Iterator[str]:
    policy = planned.policy
    yield from (f"{planned.name}: {line}" for line in stale_inputs(config, stored.lengths))
    recipe = recipe_of(config, planned.name)
    differences = stored.plan.key.differences(plan_key(recipe, policy, stored.lengths.digest))
    for line in refusals(None if differences else planned.raw, stored.lengths.tokens, policy):
        yield f"{planned.name}: {line}"
    for difference in differences:
        yield f"{planned.name}: this is the stored plan, but training would plan again: {difference}"
    if bad := stored.lengths.origin.bad:
        yield f"{planned.name}: {left_out(bad, stored.lengths.origin.num_records)}"
    if stored.lengths.rows.repeatability is None:
        yield f"{planned.name}: repeatability is not yet checked: no sample was encoded twice; build does it"
    shown_as = attrs.evolve(
        policy,
        packing=stored.packed,
        min_fill_ratio=str(stored.plan.key.inputs.get("min_fill_ratio") or policy.min_fill_ratio),
    )
    lines = describe(attrs.evolve(planned, policy=shown_as))
    yield from (line for level, line in lines if level >= logging.WARNING)
    if planned.name == "train" and (window := ragged_window(schedule)):
        yield f"{planned.name}: {window}"


def as_document(view: PlanView) -> dict[str, Any]:
    """Return a view for programs, as one document."""
    stored, planned, attention = view.stored, view.planned, view.attention
    return {
        "folder": stored.where,
        "attention": None
        if attention is None
        else {
            "name": attention.name,
            "reason": attention.why,
            "native": attention.native,
            "split": attention.split,
            "follows_rows": attention.follows_rows,
        },
        "verdict": None if view.verdict is None else view.verdict.to_dict(),
        "warnings": list(view.warnings),
        "plan": attrs.asdict(view.plan_summary),
        "sources": [attrs.asdict(one) for one in stored.sources()],
        "videos": attrs.asdict(video_totals(stored.lengths.rows.table, stored.lengths.rows.media)),
        "schedule": attrs.asdict(view.schedule_summary),
        "peak_bytes": view.peak,
        "time": None
        if view.forecast is None
        else time_document(view.forecast, world_size=view.schedule.world_size, price=view.price),
        "epochs": None if view.epochs is None else _epochs_document(view.epochs),
        "checksums": {
            "raw_plan": planned.raw_checksum,
            "aligned_plan": planned.checksum,
            "lengths": stored.lengths.digest,
            "data": stored.lengths.origin.data_digest,
        },
        "fingerprints": {
            "lengths": {"sha256": stored.lengths.origin.key.digest, "inputs": dict(stored.lengths.origin.key.inputs)},
            "plan": {"sha256": stored.plan.key.digest, "inputs": dict(stored.plan.key.inputs)},
        },
        "aligned_for": list(stored.plan.world_sizes),
    }


def _epochs_document(epochs: EpochsView) -> dict[str, Any]:
    """Return all epochs for programs."""
    return {
        "shown": epochs.epoch,
        "total_steps": epochs.schedule.total_steps,
        "epochs": [
            {**attrs.asdict(record), "steps": epochs.schedule.steps_in(record.epoch)} for record in epochs.records
        ],
        "shares": [attrs.asdict(one) for one in epochs.shares],
        "meetings": None if epochs.meetings is None else attrs.asdict(epochs.meetings),
    }
