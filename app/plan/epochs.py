"""Epochs with plans of their own, as `show` and the report tell them."""

import attrs

from packplan.app.planning.epochs import EpochPlanner
from packplan.core.epochs import EpochRecord, select_epoch
from packplan.core.errors import ConfigError, NotBuiltError
from packplan.core.inspection import Meetings, meetings
from packplan.core.mixes import SourceShare, told_shares
from packplan.core.plan import RawPlan
from packplan.core.ports import StoredPlan
from packplan.core.schedule import EpochSchedule


@attrs.frozen(eq=False)
class EpochsView:
    """Epochs that have plans of their own."""

    epoch: int
    """Epoch whose plan is shown."""

    records: tuple[EpochRecord, ...]

    schedule: EpochSchedule
    """Schedule over all of them."""

    shares: tuple[SourceShare, ...]
    """Shares of the sources in the epoch that is shown; none without a mix, or of another one."""

    meetings: Meetings | None
    """
    How often its pairs of samples meet again in the next epoch; None in the last one, or where that
    would be planned in another way now.
    """


def plan_of_epoch(planner: EpochPlanner, stored: StoredPlan, epoch: int, *, where: str, is_current: bool) -> RawPlan:
    """
    Return the plan of an epoch, the one that was counted when it was built.

    Args:
        planner: Plans the epochs, as the run is now.
        stored: Plan of the first epoch that was built, and records of all.
        epoch: The epoch.
        where: Place of what was built, for errors.
        is_current: Whether it was built from the run as it is now.

    Raises:
        ConfigError: There is no such epoch.
        NotBuiltError: The epochs were not built, or of another run.
    """
    if not stored.epochs:
        raise NotBuiltError(where, "holds the plan of one epoch, and no records of the others")
    last = stored.epochs[-1].epoch
    if not 0 <= epoch <= last:
        raise ConfigError.at("--epoch", f"is {epoch}, but the epochs that are planned are 0 to {last}: name one")
    if epoch == 0:
        return stored.plan
    plan = planner.plan(epoch) if is_current else None
    if plan is None or planner.record(plan) != stored.epochs[epoch]:
        raise NotBuiltError(where, f"holds another plan of epoch {epoch} than this run gives")
    return plan.raw


def epochs_view(
    planner: EpochPlanner,
    records: tuple[EpochRecord, ...],
    plan: RawPlan,
    schedule: EpochSchedule,
    *,
    epoch: int,
    where: str,
    is_current: bool,
) -> EpochsView:
    """
    Return all epochs in numbers.

    Args:
        planner: Plans the epochs.
        records: Record of each.
        plan: Plan of the epoch that is shown.
        schedule: Settings of the schedule.
        epoch: The epoch that is shown.
        where: Place of what was built, for errors.
        is_current: Whether it was built from the run as it is now.

    Raises:
        NotBuiltError: The run has more epochs than were built.
    """
    recipe, samples = planner.recipe, planner.samples
    packs = tuple(one.num_packs for one in records)
    whole = attrs.evolve(schedule, num_packs=packs, works=None, group_by_work=0)
    last = records[-1].epoch
    if whole.end_of(last) < whole.max_steps if whole.max_steps > 0 else last + 1 < whole.num_train_epochs:
        raise NotBuiltError(where, f"holds plans up to epoch {last:,}, and the run has more epochs")
    records = records[: max(epoch + 1, whole.num_epochs)]
    whole = attrs.evolve(whole, num_packs=packs[: len(records)])
    shares: tuple[SourceShare, ...] = ()
    if is_current and recipe.mixes is not None:
        chosen = select_epoch(recipe, planner.policy, samples, epoch)
        shares = told_shares(recipe.mixes, samples.lengths, samples.sizes, chosen, epoch=epoch)
    again = None
    if is_current and epoch < records[-1].epoch:
        again = meetings(plan.packs, planner.plan(epoch + 1).raw.packs)
    return EpochsView(epoch, records, whole, shares, again)
