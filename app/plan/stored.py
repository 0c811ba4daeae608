"""A stored split of a run, which is opened without data, model, torch or ms-swift."""

import logging
from collections.abc import Iterator

import attrs

from packplan.app.opening.policies import epoch_recipe, policy_of_split, work_of_run
from packplan.app.opening.stores import open_stores
from packplan.app.planning.epochs import EpochPlanner, lengths_of_records, plan_first_epoch
from packplan.app.planning.log_lines import plan_warnings
from packplan.app.planning.measure import bad_records_line
from packplan.app.planning.schedule import partial_window_line, refuse_stream, schedule_of_split
from packplan.app.planning.split import PlannedSplit, Split, Stores, align_options
from packplan.core.config.identity import config_length_inputs
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecipe, plan_fingerprint
from packplan.core.errors import ArgumentError, ConfigError, Difference, NotBuiltError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray, Lengths
from packplan.core.plan import RawPlan, refuse_dropped, refuse_longer, require_supervised
from packplan.core.policy import PlanPolicy
from packplan.core.ports import StoredLengths, StoredPlan
from packplan.core.samples.tables import source_sizes
from packplan.core.schedule import EpochSchedule


@attrs.frozen(eq=False)
class StoredSplit:
    """Stored lengths and plan of a split, with the schedule for a number of ranks."""

    lengths: StoredLengths

    plan: StoredPlan
    """Plan of the chosen epoch, and records of all epochs."""

    split: PlannedSplit
    """The split with its lengths, raw plan, aligned plan and work under the run's policy."""

    schedule: EpochSchedule
    """Schedule of the plan of the chosen epoch."""

    estimated: str | None
    """Reason why work is only estimated; None if it is computed from the model's sizes."""

    epoch: int = 0
    """Chosen epoch; 0 if all epochs have the same plan."""

    epochs: EpochSchedule | None = None
    """Schedule over all epochs; None if all epochs have the same plan."""

    warnings: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether the stored plan packs samples; if not, each sample is a pack by itself."""
        return bool(self.plan.key.inputs["packing"])


def selected_splits(config: RunConfig, split: str | None) -> list[str]:
    """Return the names of all splits, or only *split*; ConfigError if the run lacks *split*."""
    refuse_stream(config)
    having = ["train", *(["eval"] if config.custom.val_jsonl else [])]
    if split is not None and split not in having:
        raise ConfigError.for_key("custom.val_jsonl", "is not set, so there is no eval split: set it, or show train")
    return having if split is None else [split]


def open_stored_lengths(config: RunConfig, split: str) -> tuple[StoredLengths, EpochRecipe | None, Stores]:
    """
    Return the stored lengths of a split, the recipe of its epochs, and its stores.

    Args:
        config: The run.
        split: `train` or `eval`.

    Raises:
        ConfigError: The mix has faults; the error lists all of them.
        NotBuiltError: Stored lengths are missing or incomplete, or the number of sources has
            changed.
    """
    kept = open_stores(config, split)
    lengths, recipe = open_lengths(kept), epoch_recipe(config, split)
    measured = len(list(source_sizes(lengths.origin.files)))
    if recipe is not None and recipe.mixes is not None and measured != (now := len(recipe.mixes.files)):
        reason = f"holds lengths of {counted(measured, 'source')}, but the mix now has {now:,}"
        raise NotBuiltError(str(kept.plans.folder), reason)
    return lengths, recipe, kept


def open_lengths(stores: Stores) -> StoredLengths:
    """
    Return the lengths of all records of a split.

    Raises:
        NotBuiltError: The lengths of some records are not stored.
        CorruptArtefactError: A stored file is damaged.
    """
    lengths, folder = stores.lengths.inspect(), str(stores.lengths.folder)
    if lengths is None:
        raise NotBuiltError(folder, "holds no lengths")
    measured = len(lengths.rows.table)
    if measured < lengths.origin.num_records:
        reason = (
            f"holds the lengths of {measured:,} of {counted(lengths.origin.num_records, 'record')}, since measuring "
            "was interrupted"
        )
        raise NotBuiltError(folder, reason)
    return lengths


def open_split(config: RunConfig, name: str, *, world_size: int | None, epoch: int | None = None) -> StoredSplit:
    """
    Open the stored lengths and plan of a split, and make its schedule for a number of ranks.

    Args:
        config: The run.
        name: `train` or `eval`.
        world_size: Number of ranks; if None, the largest that the plan was aligned for.
        epoch: Epoch to open, if each epoch has its own plan; if None, the first epoch.

    Raises:
        PackplanError: The split is not stored, is damaged, has no such epoch, or has too few packs
            for this number of ranks.
    """
    lengths, recipe, kept = open_stored_lengths(config, name)
    plans, origin, policy = kept.plans, lengths.origin, policy_of_split(config, name)
    plan, where = plans.inspect(), str(plans.folder)
    samples = lengths_of_records(policy, lengths.rows.table, origin.files)
    if plan is None or plan.key.inputs["lengths"] != lengths.digest:
        # If the lengths give no plan, building would raise the same error.
        refuse_longer(lengths.tokens, policy)
        plan_first_epoch(name, policy, samples, recipe=recipe, quick_bound=True)
        reason = "holds lengths, but no plan" if plan is None else "holds lengths, and a plan of other lengths"
        raise NotBuiltError(where, reason)
    if recipe is not None:
        planner = EpochPlanner(policy, recipe, samples)
        plan = attrs.evolve(plan, plan=_plan_of_epoch(planner, plan, epoch or 0, lengths.digest, where=where))
    elif epoch:
        reason = "needs a run that plans each epoch, but all epochs of this run have the same plan: leave it out"
        raise ConfigError.for_key("--epoch", reason)
    work, estimated = work_of_run(config)
    measured = Split(name, policy, align_options(config, name), work, recipe).measured(
        lengths.rows.table, origin.data_digest
    )
    split = measured.planned(plan.key, plan.plan, world_size=world_size or max(plan.world_sizes, default=1))
    schedule = schedule_of_split(config, name, split.aligned, split.pack_works)
    epochs = None
    if recipe is not None:
        plan, epochs = _drop_epochs_after_run(plan, schedule, epoch or 0, where=where)
    opened = StoredSplit(lengths, plan, split, schedule, estimated, epoch or 0, epochs)
    warnings = tuple(config.name_settings(f"{name}: {line}") for line in _warnings(config, opened))
    return attrs.evolve(opened, warnings=warnings)


def _plan_of_epoch(planner: EpochPlanner, stored: StoredPlan, epoch: int, digest: str, *, where: str) -> RawPlan:
    """
    Return the raw plan of an epoch. The plan of the first epoch is stored. The plan of any other
    epoch is made again, and compared with its stored record.

    Raises:
        ConfigError: The plan has no epoch with this number.
        NotBuiltError: The plans of the epochs are not stored, or have changed.
    """
    if not stored.epochs:
        raise NotBuiltError(where, "holds the plan of one epoch, but no plans of the others")
    last = stored.epochs[-1].epoch
    if epoch > last:
        raise ConfigError.for_key("--epoch", f"is {epoch}, but only epochs 0 to {last} are planned: name one of these")
    if epoch == 0:
        return stored.plan
    is_current = stored.key == plan_fingerprint(planner.recipe, planner.policy, digest)
    plan = planner.plan(epoch) if is_current else None
    if plan is None or planner.make_record(plan) != stored.epochs[epoch]:
        raise NotBuiltError(where, f"holds a plan of epoch {epoch} that differs from the plan of this run")
    return plan.raw


def _drop_epochs_after_run(
    plan: StoredPlan, schedule: EpochSchedule, epoch: int, *, where: str
) -> tuple[StoredPlan, EpochSchedule]:
    """
    Return a plan with records of only the run's epochs, and of epochs up to *epoch*. Also return
    the schedule over these epochs. NotBuiltError if the run has more epochs than the plan.
    """
    packs, last = tuple(one.num_packs for one in plan.epochs), plan.epochs[-1].epoch
    whole = attrs.evolve(schedule, num_packs=packs, works=None)
    if whole.last_step(last) < whole.max_steps if whole.max_steps > 0 else last + 1 < whole.num_train_epochs:
        raise NotBuiltError(where, f"holds plans up to epoch {last:,}, but the run has more epochs")
    count = max(epoch + 1, whole.num_epochs)
    return attrs.evolve(plan, epochs=plan.epochs[:count]), attrs.evolve(whole, num_packs=packs[:count])


def _warnings(config: RunConfig, opened: StoredSplit) -> Iterator[str]:
    """Yield warnings about a stored plan, such as why training would refuse it, or plan again."""
    split, lengths, plan = opened.split, opened.lengths, opened.plan
    yield from yield_stale_inputs(config, lengths)
    differences = plan.key.differences(split.plan_key(lengths.digest))
    yield from yield_refusals(None if differences else split.raw, lengths.tokens, split.policy)
    for difference in differences:
        yield f"training would plan again, since a setting has changed: {difference}"
    if bad := lengths.origin.bad:
        yield bad_records_line(bad, lengths.origin.num_records)
    if lengths.rows.repeatability is None:
        yield "no sample has been encoded a second time yet, to check that lengths repeat: run packplan plan build"
    ratio = str(plan.key.inputs.get("min_fill_ratio") or split.policy.min_fill_ratio)
    as_stored = attrs.evolve(split, policy=attrs.evolve(split.policy, packing=opened.packed, min_fill_ratio=ratio))
    yield from plan_warnings(as_stored)
    window = partial_window_line(config, opened.epochs or opened.schedule) if split.name == "train" else None
    if window is not None and window[0] >= logging.WARNING:
        yield window[1]
    if opened.estimated:
        yield f"the work of samples is estimated from their tokens: {opened.estimated}"


def yield_refusals(
    plan: RawPlan | None, lengths: IntArray, policy: PlanPolicy, *, supervised: Lengths | None = None
) -> Iterator[str]:
    """
    Yield each reason why training would refuse stored lengths, or their plan.

    Args:
        plan: The stored plan; None skips the checks of the plan.
        lengths: Tokens of each sample; int64, shape (num_samples,).
        policy: Settings that decide the plan.
        supervised: Supervised tokens of each sample; None skips the checks of supervised tokens.
    """
    try:
        refuse_longer(lengths, policy)
    except ArgumentError as error:
        yield f"training refuses the data: {error}"
    try:
        if plan is not None:
            refuse_dropped(plan, lengths, policy)
            if supervised is not None:
                require_supervised(plan, supervised)
    except ArgumentError as error:
        yield f"training refuses the plan: {error}"


def setting_differences(config: RunConfig, lengths: StoredLengths) -> tuple[Difference, ...]:
    """Return the settings of a run that differ from those of stored lengths."""
    inputs, asked = lengths.origin.key.inputs, config_length_inputs(config)
    return Fingerprint({key: inputs.get(key) for key in asked}).differences(Fingerprint(asked))


def yield_stale_inputs(config: RunConfig, lengths: StoredLengths) -> Iterator[str]:
    """
    Yield a line for each setting that differs from the setting of the stored lengths. Changes of
    the data or the model are not found here; `packplan plan verify` finds them.
    """
    for difference in setting_differences(config, lengths):
        line = f"training would refuse the stored lengths, since a setting has changed: {difference}"
        yield config.name_settings(line)
