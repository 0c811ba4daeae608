"""
A split of a run, `train` or `eval`: its samples, its lengths and its plan.

A `Split` has samples and settings. A `MeasuredSplit` also has lengths, and a `PlannedSplit` also
has packs.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.planning.epochs import PlannedEpochs, works_of_records
from packplan.core.align import AlignedPlan, align_plan
from packplan.core.batch import largest_degree, pack_degrees
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecipe, plan_fingerprint
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray
from packplan.core.packs import plan_checksum
from packplan.core.plan import RawPlan, unsupervised_samples
from packplan.core.policy import PlanPolicy
from packplan.core.ports import LengthSource, Lock
from packplan.core.samples.tables import KnownLengths, Table, column
from packplan.core.schedule import PackStats
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.vision import FLOPs

if TYPE_CHECKING:
    from packplan.adapters.samples.encoder import SwiftEncoder  # loads ms-swift


@attrs.frozen
class Stores:
    """Stores of a split's lengths and plans, and the lock that guards their folder."""

    lengths: DiskLengthStore
    plans: DiskPlanStore
    lock: Lock


@attrs.frozen
class KnownTable:
    """Path of a table of known lengths, and the function that reads the table."""

    where: str
    """Path of the table, for messages."""

    read: Callable[[], KnownLengths]
    """Function that reads the table; it is called when the table is first needed."""


def align_options(config: RunConfig, split: str) -> dict[str, Any]:
    """Return the arguments of `align_measured` for a split; evaluation drops no packs."""
    training, packed = config.training, config.training.packing if split == "train" else config.eval_packing
    shares: dict[str, Any] = {"shares": True, "most": training.max_sequence_parallel_size}
    shares = shares if training.shares_by_degree and packed else {}
    if split == "eval":
        size = 1 if config.eval_packing else training.per_device_eval_batch_size
        return {"dataloader_drop_last": False, "batch_size": size, **shares}
    return {"dataloader_drop_last": training.dataloader_drop_last, "batch_size": config.batch_size, **shares}


def align_measured(
    raw: RawPlan, lengths: IntArray, *, world_size: int, shares: bool = False, most: int | None = None, **options: Any
) -> AlignedPlan:
    """
    Return the aligned plan of measured records for a number of ranks.

    Args:
        raw: Raw plan of the split.
        lengths: Tokens of each record; int64, shape (num_records,).
        world_size: Number of ranks to align for, which may differ from the number that trains.
        shares: Whether ranks share a pack that is longer than the packing length.
        most: Maximum number of ranks that share a pack, lowered to the largest number that
            *world_size* allows. None sets no limit.
        **options: Other options of `align_plan`.

    Raises:
        ArgumentError: There are too few packs to give every rank a batch.
    """
    if shares:
        most = min(most or world_size, largest_degree(world_size))
        tokens = raw.packs.loads(lengths)
        options |= {"degrees": pack_degrees(tokens, raw.packing_length), "max_degree": most, "tokens": tokens}
    return align_plan(raw, world_size=world_size, **options)


@attrs.frozen(eq=False)
class Split:
    """Samples of a split, with the settings and stores for measuring and planning."""

    name: str
    policy: PlanPolicy

    align_options: Mapping[str, Any] = MappingProxyType({"dataloader_drop_last": False, "batch_size": 1})
    """Options of `align_measured`."""

    work_model: WorkModel = WorkModel.estimated({})  # noqa: RUF009  # frozen
    """Work of the trained model, in forward and backward pass."""

    recipe: EpochRecipe | None = None
    """
    Recipe for the samples of each epoch, if each epoch has its own plan; None plans all samples
    once.
    """

    max_bad_share: Decimal | None = None
    """
    Largest share of records that may be bad; None, the default, raises an error for the first bad
    record.
    """

    flush_every: int | None = None
    """
    Number of samples between two writes of measurements; None sets it by the number of all samples.
    """

    stores: Stores = attrs.field(default=None)

    encoder: "SwiftEncoder" = attrs.field(default=None)
    """Encoder of the samples, for measuring and training."""

    source: LengthSource = attrs.field(default=None)
    """Measurer of the same samples: a `SwiftMeasurer`, or a command's `DatasetRowsMeasurer`."""

    known: KnownTable | None = None
    """
    Table of known lengths, if `custom.lengths` names a table; None, the default, measures all
    records.
    """

    def plan_key(self, lengths_digest: str) -> Fingerprint:
        """Return the fingerprint of the plan, or of all epochs' plans, for these lengths."""
        return plan_fingerprint(self.recipe, self.policy, lengths_digest)

    def plan_name(self, key: Fingerprint, raw: RawPlan) -> str:
        """Return the digest by which checkpoints identify a plan, or the plans of all epochs."""
        return key.digest if self.recipe else plan_checksum(raw.packs)

    def measured(self, table: Table, data_digest: str) -> "MeasuredSplit":
        """
        Return the split with its measurements.

        Args:
            table: Measurements of all records.
            data_digest: Digest of all records except bad ones.
        """
        return MeasuredSplit(**_values(self, Split), table=table, data_digest=data_digest)


@attrs.frozen(eq=False, kw_only=True)
class MeasuredSplit(Split):
    """A split with the measurements of its records."""

    table: Table = attrs.field(repr=False)
    """Measurements of all records; int32, shape (num_records, num_columns)."""

    data_digest: str
    """Digest of all records except bad ones."""

    epochs: PlannedEpochs | None = None
    """
    Plans of the epochs; None if all epochs have the same plan, or if epochs are not planned yet.
    """

    @property
    def lengths(self) -> IntArray:
        """Tokens of each record; int64, shape (num_records,)."""
        return column(self.table, "length").astype(np.int64)

    @cached_property
    def works(self) -> SampleWorks:
        """Work of each record of a measured split, by which ranks are balanced."""
        return works_of_records(self.work_model, self.table)

    def stats_of(self, plan: RawPlan) -> PackStats:
        """Return the statistics of the packs in a plan of this split."""
        return PackStats.from_plan(plan, self.lengths, packed=self.policy.packing, works=self.works)

    def planned(self, key: Fingerprint, raw: RawPlan, *, world_size: int) -> "PlannedSplit":
        """
        Return the split with a plan, aligned for a number of ranks.

        Args:
            key: Inputs of the plan.
            raw: Raw plan of the split.
            world_size: Number of ranks.

        Raises:
            ArgumentError: There are too few packs to give every rank a batch.
        """
        aligned = align_measured(raw, self.lengths, world_size=world_size, **self.align_options)
        return PlannedSplit(**_values(self, MeasuredSplit), key=key, raw=raw, aligned=aligned)


@attrs.frozen(eq=False, kw_only=True)
class PlannedSplit(MeasuredSplit):
    """
    A measured split with its plan. If each epoch has its own plan, this is the plan of the first
    epoch.
    """

    key: Fingerprint
    """Inputs of the plan."""

    raw: RawPlan

    aligned: AlignedPlan

    def without_plan(self) -> MeasuredSplit:
        """Return the split without its plan."""
        return MeasuredSplit(**_values(self, MeasuredSplit))

    @property
    def pack_stats(self) -> Callable[[int], PackStats]:
        """
        Function that returns the statistics of an epoch's packs. The function keeps no plans of
        earlier epochs.
        """
        if self.epochs is not None:
            return self.epochs.stats
        stats = self.stats_of(self.raw)
        return lambda _: stats

    @property
    def pack_works(self) -> FLOPs:
        """Work of each pack of the raw plan; shape (num_packs,)."""
        return self.raw.packs.sums(self.works.flops)

    @property
    def unsupervised(self) -> IntArray:
        """Planned samples without supervised tokens, ascending."""
        return unsupervised_samples(self.raw, column(self.table, "supervised"))

    @property
    def is_supervised(self) -> bool:
        """Whether any planned sample has a supervised token."""
        return self.unsupervised.size < self.raw.planned_samples

    @property
    def raw_checksum(self) -> str:
        """Checksum of the raw plan."""
        return plan_checksum(self.raw.packs)

    @property
    def checksum(self) -> str:
        """Checksum of the aligned plan."""
        return plan_checksum(self.aligned.packs)


def _values(split: Split, kind: type[Split]) -> dict[str, Any]:
    """Return the values of those fields of *split* that the class *kind* also has, by name."""
    return {name: getattr(split, name) for name in attrs.fields_dict(kind)}
