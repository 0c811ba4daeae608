"""A split as it is stored, in numbers: opened without its data, its model, torch or ms-swift."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import attrs

from packplan.app.planning.bad import left_out
from packplan.app.planning.log_lines import describe
from packplan.app.planning.schedule import ragged_window, require_static, split_schedule
from packplan.app.planning.split import Alignment, PlannedSplit, Stores, plan_table
from packplan.app.planning.stored_lengths import open_lengths, refusals, stale_inputs
from packplan.app.wiring import stores
from packplan.app.wiring.attention import attention_by, needs_verdict, refuse_leak, stored_verdict
from packplan.app.wiring.works import Work, policy_of, work_of
from packplan.core.align import AlignedPlan
from packplan.core.config import RunConfig, with_remedy
from packplan.core.equality import AUTO, AttentionChoice, PackingVerdict
from packplan.core.errors import ConfigError, ModelError, NotBuiltError, UserError
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
from packplan.core.samples import column, video_totals
from packplan.core.schedule import EpochSchedule


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

    def schedule(self, config: RunConfig, *, world_size: int | None) -> tuple[Work, AlignedPlan, EpochSchedule]:
        """
        Return the work of the samples, and the plan as so many ranks train it.

        Args:
            config: The run.
            world_size: Ranks; None takes the most that the plan was aligned for.

        Raises:
            PlanError: The ranks would get no batch.
            ArgumentError: The ranks cannot realise the batch.
        """
        raw, work = self.plan.plan, work_of(config, self.lengths.rows.table)
        ranks = world_size or max(self.plan.world_sizes, default=1)
        aligned = Alignment.from_config(config, self.name).align(raw, world_size=ranks)
        return work, aligned, split_schedule(config, self.name, aligned, raw.packs.sums(work.samples.flops))

    def schedule_summary(self, schedule: EpochSchedule, work: Work) -> ScheduleSummary:
        """Return a schedule of the plan in numbers."""
        tokens = self.lengths.tokens
        return summarise_schedule(self.plan.plan, tokens, schedule, packed=self.packed, works=work.samples)

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
    planned: PlannedSplit
    schedule: EpochSchedule
    plan_summary: PlanSummary
    schedule_summary: ScheduleSummary
    work: Work
    attention: AttentionChoice | None
    """That training takes; None if that cannot be said, which `warnings` then do."""

    verdict: PackingVerdict | None
    """Whether samples may share the model's packs; None if it was not asked yet."""

    warnings: tuple[str, ...]


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
        plan_table(split, policy, lengths.rows.table, quick_bound=True)
        raise


def inspect_plan(config: RunConfig, split: str, *, world_size: int | None) -> PlanView:
    """
    Open a split of a run and put it in numbers.

    Args:
        config: The run.
        split: `train` or `eval`.
        world_size: Ranks; None takes the most that the plan was aligned for.

    Raises:
        PackplanError: It is not stored, or damaged, or not for so many ranks.
    """
    stored = _open_planned(config, split)
    raw, origin = stored.plan.plan, stored.lengths.origin
    work, aligned, schedule = stored.schedule(config, world_size=world_size)
    planned = PlannedSplit(split, stored.lengths.rows.table, raw, aligned, origin.data_digest)
    warnings = list(_warnings(config, stored, planned, schedule))
    attention = verdict = None
    try:
        verdict = stored_verdict(config)
        if verdict is None and needs_verdict(config, packed=stored.packed):
            warnings.append(
                f"{split}: no stored verdict says whether samples may share the model's packs: build asks the model"
            )
        if verdict is not None or config.model.attn_impl != AUTO:
            on_cpu = bool(config.training.trainer.get("use_cpu"))
            attention = attention_by(config, verdict, on_cpu=on_cpu)
            if stored.packed:
                refuse_leak(config, attention)
    except ModelError as error:
        warnings.append(f"{split}: training refuses the attention: {with_remedy(error)}")
    except UserError as error:
        warnings.append(f"{split}: which attention training takes cannot be said: {with_remedy(error)}")
    if work.estimated:
        warnings.append(f"{split}: work is estimated from tokens and their squares: {work.estimated}")
    return PlanView(
        stored=stored,
        planned=planned,
        schedule=schedule,
        plan_summary=stored.summary(),
        schedule_summary=stored.schedule_summary(schedule, work),
        work=work,
        attention=attention,
        verdict=verdict,
        warnings=tuple(warnings),
    )


def _warnings(config: RunConfig, stored: StoredSplit, planned: PlannedSplit, schedule: EpochSchedule) -> Iterator[str]:
    policy = policy_of(config, planned.name)
    yield from (f"{planned.name}: {line}" for line in stale_inputs(config, stored.lengths))
    differences = stored.plan.key.differences(policy.fingerprint(stored.lengths.digest))
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
    lines = describe(planned, shown_as)
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
