"""
Plans of measured records: one for all epochs, or one for each epoch.

If each epoch has its own plan, all plans are made once before the first step, to count their packs.
Each plan is then made again for its epoch. At most two plans are in memory: the plans of the
current and the next epoch.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Thread

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.epochs import EpochPlan, EpochRecipe, EpochRecord, RecordLengths, plan_epoch, record_epoch
from packplan.core.errors import DataSetError, MismatchError, counted, verb_for
from packplan.core.plan import RawPlan, refuse_dropped
from packplan.core.policy import PlanPolicy
from packplan.core.ports import ReportProgress
from packplan.core.samples.tables import DataFile, Table, column, source_sizes
from packplan.core.schedule import PackStats
from packplan.core.work.model import SampleWorks, WorkModel

SLOW_ALGORITHMS = {"certified", "balanced"}
"""
Algorithms that take seconds to minutes for a million samples. Their progress is shown from the
start.
"""


_BAR = "{desc}{postfix} [{elapsed}]"


def works_of_records(model: WorkModel, table: Table) -> SampleWorks:
    """
    Return the work of each measured record.

    Args:
        model: Work model, which counts FLOPs.
        table: Measurements of the records; shape (num_records, num_columns).
    """
    media = {name: column(table, name).astype(np.int64) for name in ("images", "patches", "frames", "video_patches")}
    return SampleWorks.from_lengths(model, column(table, "length").astype(np.int64), **media)


def lengths_of_records(policy: PlanPolicy, table: Table, files: Sequence[DataFile] = ()) -> RecordLengths:
    """
    Return the lengths of measured records, and their work and images if *policy* uses them for
    packing.

    The length of a record that belongs to the other split is 0. DataSetError if a sample has no
    token.

    Args:
        policy: Settings that decide the plan.
        table: Measurements of the records; shape (num_records, num_columns).
        files: Data files, needed if *policy* plans a mix of them.
    """
    works = works_of_records(policy.work, table).flops if policy.uses_works and policy.work is not None else None
    lengths = column(table, "length").astype(np.int64)
    if (empty := np.flatnonzero((lengths == 0) & (column(table, "bad") == 0))).size:
        fact = f"{counted(empty.size, 'sample')} of {len(lengths):,} {verb_for(empty.size, 'has', 'have')} no token"
        raise DataSetError(f"{fact} (first: sample {empty[0]:,}): remove such records")
    if policy.part is not None:
        lengths = np.where(policy.part.selects(len(lengths)), lengths, 0)
    images = column(table, "images").astype(np.int64) if policy.max_images is not None else None
    sizes = tuple(size for _, size in source_sizes(files))
    return RecordLengths(lengths=lengths, sizes=sizes, works=works, images=images)


def plan_first_epoch(
    name: str,
    policy: PlanPolicy,
    samples: RecordLengths,
    *,
    recipe: EpochRecipe | None = None,
    quick_bound: bool = False,
    report: ReportProgress = lambda _: None,
) -> RawPlan:
    """
    Build the raw plan of epoch 0, which all epochs use unless each epoch has its own plan.

    Args:
        name: Name of the split, for messages.
        policy: Settings that decide the plan.
        samples: Lengths and work of all records.
        recipe: Samples of each epoch; None plans all samples.
        quick_bound: Whether to compute a faster, looser lower bound, which is enough to compare
            plans.
        report: Called with each progress message.
    """
    recipe = recipe or EpochRecipe()
    wait = 0 if policy.algorithm in SLOW_ALGORITHMS else BRIEF_S
    with progress(desc=f"planning {name}", bar_format=_BAR, miniters=1, delay=wait, leave=not wait) as bar:

        def show_progress(words: str) -> None:
            report(f"planning {name}: {words}")
            bar.set_postfix_str(words, refresh=False)
            bar.update()

        return plan_epoch(recipe, policy, samples, 0, quick_bound=quick_bound, report=show_progress).raw


@attrs.frozen(eq=False)
class EpochPlanner:
    """Planner of a split's epochs."""

    policy: PlanPolicy
    recipe: EpochRecipe
    samples: RecordLengths

    def plan(self, epoch: int) -> EpochPlan:
        """
        Return the plan of an epoch; ArgumentError if the plan drops too many tokens, or has no
        pack.
        """
        plan = plan_epoch(self.recipe, self.policy, self.samples, epoch, quick_bound=True)
        refuse_dropped(plan.raw, self.samples.lengths, self.policy)
        return plan

    def make_record(self, plan: EpochPlan) -> EpochRecord:
        """Return the record of a plan: its figures, and checksums of its samples and packs."""
        return record_epoch(plan, self.samples)


@attrs.frozen(eq=False)
class PlannedEpochs:
    """
    Records of all epochs of a run, and the packs of the current epoch.

    While an epoch is trained, a thread plans the next epoch. The thread shares no data with
    training, and takes part in no communication between ranks.
    """

    planner: EpochPlanner

    records: tuple[EpochRecord, ...]
    """Record of each epoch."""

    works: SampleWorks
    """Work of the records."""

    _held: dict[int, Future[PackStats]] = attrs.field(factory=dict, init=False, repr=False)

    def stats(self, epoch: int) -> PackStats:
        """
        Return the statistics of an epoch's packs, and start planning the next epoch.

        Raises:
            MismatchError: The plan differs from the plan that was made before the first step.
        """
        for old in self._held.keys() - {epoch, epoch + 1}:
            del self._held[old]
        found = self._future_stats(epoch).result()
        if epoch < self.records[-1].epoch:
            self._future_stats(epoch + 1)
        return found

    def _future_stats(self, epoch: int) -> Future[PackStats]:
        if epoch not in self._held:
            self._held[epoch] = future = Future[PackStats]()
            # A run that ends does not wait for a plan that it will not train.
            Thread(target=self._plan_into, args=(epoch, future), name=f"plan-epoch-{epoch}", daemon=True).start()
        return self._held[epoch]

    def _plan_into(self, epoch: int, future: Future[PackStats]) -> None:
        try:
            future.set_result(self._plan_and_verify(epoch))
        except Exception as error:  # noqa: BLE001  # raised where the plan is asked for
            future.set_exception(error)

    def _plan_and_verify(self, epoch: int) -> PackStats:
        planner, counted_before = self.planner, self.records[epoch]
        plan = planner.plan(epoch)
        if (found := planner.make_record(plan)) != counted_before:
            fact = f"epoch {epoch} had plan {counted_before.checksum} before the first step, and now has"
            raise MismatchError("ranks_disagree", f"{fact} {found.checksum}", {"epoch": epoch})
        return PackStats.from_plan(plan.raw, planner.samples.lengths, packed=planner.policy.packing, works=self.works)
