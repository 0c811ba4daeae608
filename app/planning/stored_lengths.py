"""Stored lengths of a split, opened without its data, its model, torch or ms-swift."""

from collections.abc import Iterator

from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.core.config.identity import config_length_inputs
from packplan.core.config.run import RunConfig
from packplan.core.errors import ArgumentError, NotBuiltError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray, Lengths
from packplan.core.plan import RawPlan, refuse_dropped, refuse_longer, require_supervised
from packplan.core.policy import PlanPolicy
from packplan.core.ports import StoredLengths


def open_lengths(store: DiskLengthStore) -> StoredLengths:
    """
    Return the lengths of all records of a split.

    Raises:
        NotBuiltError: None are stored, or not all.
        CorruptArtefactError: A stored file is damaged.
    """
    lengths = store.inspect()
    if lengths is None:
        raise NotBuiltError(str(store.folder), "holds no lengths")
    measured = len(lengths.rows.table)
    if measured < lengths.origin.num_records:
        reason = (
            f"holds the lengths of {measured:,} of {counted(lengths.origin.num_records, 'record')}, since measuring "
            "was interrupted"
        )
        raise NotBuiltError(str(store.folder), reason)
    return lengths


def yield_refusals(
    plan: RawPlan | None, lengths: IntArray, policy: PlanPolicy, *, supervised: Lengths | None = None
) -> Iterator[str]:
    """
    Yield each reason why training would refuse stored lengths, or their plan.

    Args:
        plan: The stored plan; None skips the checks of it.
        lengths: Tokens of each sample; int64, shape (num_samples,).
        policy: Settings of planning.
        supervised: Tokens of each sample that the loss counts; None skips the checks of them.
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


def yield_stale_inputs(config: RunConfig, lengths: StoredLengths) -> Iterator[str]:
    """
    Yield a line for each setting that differs from the setting of the stored lengths.

    Only `verify` finds other data or another model.
    """
    inputs = lengths.origin.key.inputs
    asked = config_length_inputs(config)
    for difference in Fingerprint({key: inputs.get(key) for key in asked}).differences(Fingerprint(asked)):
        yield f"training would refuse the stored lengths, since a setting has changed: {difference}"
