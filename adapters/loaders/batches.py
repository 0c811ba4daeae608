"""
Batch samplers that yield one rank's packs. `PackBatches` follows a schedule and records the
progress. `EvalBatches` follows the order of an evaluation plan.

    batches = PackBatches(schedule, rank, world_size)
    loader = DataLoader(RowsOfPacks(rows, plan), batch_sampler=batches, collate_fn=PackInputs())
"""

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np

from packplan.adapters.trainer_state import COPY_AGAIN, STATE, name_older, read_trainer_state, require_same_step
from packplan.core.align import aligned_positions, lay_out_slots
from packplan.core.errors import ArgumentError, CorruptArtefactError, Difference, MismatchError, StaleError, counted
from packplan.core.fingerprint import NO_IDENTITY, RunIdentity, from_plain, seal, to_plain, unseal
from packplan.core.lengths import IntArray, as_whole_number
from packplan.core.schedule import EpochSchedule, ResumeState

_SAVED, _LOAD_ANOTHER = "the saved progress", "load the dict that state_dict() returned, or that of another checkpoint"
"""Words for a state of `PackBatches` in error messages."""

_BEGUN = "packplan/begun"
"""Key in the store of torch.distributed, under which the first rank writes what it trains."""

PROGRESS = "PackplanProgress"
"""
Key in `stateful_callbacks` of a trainer's state, under which the progress of a plan is stored.
"""

TRAINER = "trainer"
"""
Key beside the progress, under which the name of the trainer's class in its library is stored. Older
checkpoints lack this key.
"""


class PackBatches:
    """
    Batch sampler that yields the pack indices of one rank, epoch by epoch, as a schedule orders
    them.

    Each iteration yields the batches of `epoch`, and then increases `epoch` by 1. After a state is
    loaded, the first iteration yields only the remaining batches of its epoch. After an iteration
    that stopped early, `set_epoch` or `load_state_dict` has to be called before the next iteration.
    `state_dict` returns the progress at any batch. `load_state_dict` continues from a state that
    `state_dict` returned, also on another number of ranks.

    Attributes:
        changes: Changeable settings of the run that differ from those of the loaded state.
    """

    _compared_in: ClassVar[weakref.ref[Any] | None] = None
    """
    Store of the process group in which this process was compared with the other ranks. A strong
    reference would keep the store's server alive.
    """

    def __init__(
        self,
        schedule: EpochSchedule,
        rank: int = 0,
        world_size: int = 1,
        *,
        plan: str = "",
        data: str = "",
        identity: RunIdentity = NO_IDENTITY,
        state: ResumeState | None = None,
    ) -> None:
        """
        Prepare the batches of a schedule.

        Args:
            schedule: Schedule of the packs.
            rank: This rank, from 0.
            world_size: Number of ranks; the schedule has to have the same number.
            plan: Checksum of the plan; empty takes the schedule's. A state stores *plan*, *data*
                and *identity*, and only a state with the same values can be loaded.
            data: Digest of the rows: `digest` of the facts that `RowsOfPacks.inspect` returns.
            identity: Model, loss and settings of the run.
            state: Resume state of the run at its start, passed instead of *plan*, *data* and
                *identity*.

        Raises:
            ArgumentError: *schedule* is not a schedule or has another number of ranks. *rank* is
                not from 0 to *world_size* - 1, or *plan* or *data* is not text.
        """
        if not isinstance(schedule, EpochSchedule):
            fact = f"PackBatches takes a schedule, not a {type(schedule).__name__}: pass plan.schedule(world_size=…)"
            raise ArgumentError("host", fact)
        if world_size != schedule.world_size or as_whole_number("rank", rank, least=0) >= world_size:
            fact = (
                f"the schedule is made for {counted(schedule.world_size, 'rank')}, but PackBatches was given rank "
                f"{rank} of {world_size}: make another schedule with plan.schedule(world_size={world_size})"
            )
            raise ArgumentError("ranks", fact, {"planned": schedule.world_size, "world_size": world_size, "rank": rank})
        for name, value, text in (("plan", plan, "plan.checksum"), ("data", data, "packs.inspect().digest")):
            if not isinstance(value, str):
                raise ArgumentError("host", f"{name} is a {type(value).__name__}, but has to be text: pass {text}")
        self.rank = int(rank)
        self.changes: tuple[Difference, ...] = ()
        facts: dict[str, Any] = {"plan": plan or schedule.plan, "data": data, "identity": identity}
        self.state = state or ResumeState.from_schedule(schedule, **facts)
        self.reschedule(schedule)

    def reschedule(self, schedule: EpochSchedule) -> None:
        """
        Switch to another schedule of the same plan and ranks. The next iteration begins at the
        schedule's start.
        """
        self._given = self.schedule = schedule
        self.set_epoch(schedule.start.epoch)

    def restart(self) -> None:
        """
        Discard the progress, even if it was loaded, and begin again at the start of the schedule.
        """
        self.changes = ()
        self.reschedule(self._given)

    def set_epoch(self, epoch: int) -> None:
        """
        Select the epoch of the next iteration, which begins at the epoch's start, or at the loaded
        progress within the epoch. ArgumentError is raised if *epoch* is not a whole number from 0.
        """
        self.epoch, self._served = as_whole_number("epoch", epoch, least=0), 0

    def __len__(self) -> int:
        """Return the number of this rank's batches in a whole epoch; a resumed epoch has fewer."""
        return self.schedule.num_epoch_batches(self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        if self.epoch >= (number := self.schedule.num_epochs):
            fact = f"the schedule ends after {counted(number, 'epoch')}, but the loader asks for epoch {self.epoch}"
            raise ArgumentError("host", f"{fact}, counted from 0: make a schedule with more epochs, or call restart()")
        self._refuse_other_ranks()
        left = self.schedule.batches(self.epoch, rank=self.rank)
        if self._served:
            fact = f"the last iteration stopped after batch {self._served} of {len(left):,} in epoch {self.epoch}"
            raise ArgumentError("host", f"{fact}: call set_epoch(epoch) with the next epoch, or load_state_dict(state)")
        if not left:
            self.set_epoch(self.epoch + 1)
        for number, batch in enumerate(left, start=1):
            self._served += 1
            if number == len(left):  # before the batch is served: a loop that counts batches asks for no more
                self.set_epoch(self.epoch + 1)
            yield batch

    def _refuse_other_ranks(self) -> None:
        """
        Raise MismatchError if another rank has begun with another plan, rows or order of packs.

        Only the first iteration in a process group is compared, with that of the rank that began
        first. So no rank waits for another one. The last rank removes what was compared, since a
        store may serve another process group later, for example after torchrun's restart.
        """
        import torch.distributed as dist  # commands that read a checkpoint's progress need no torch
        from torch.distributed.distributed_c10d import _get_default_store
        from torch.utils.data import get_worker_info

        from packplan.adapters.models import has_ranks

        if get_worker_info() is not None or not has_ranks() or self.schedule.world_size != dist.get_world_size():
            return
        store = _get_default_store()
        if PackBatches._compared_in is not None and PackBatches._compared_in() is store:
            return
        key = f"{_BEGUN}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        order = blake2b(self.schedule.order(self.epoch).tobytes()).hexdigest()
        mine = {"rank": self.rank, "plan": self.state.plan, "rows": self.state.data, "order of packs": order}
        first = json.loads(store.compare_set(key, "", json.dumps(mine)))
        if first["rank"] == self.rank:  # of an earlier process group, in which other ranks did not begin
            store.set(key, json.dumps(mine))
            store.delete_key(f"{key}/ranks")
            first = mine
        if store.add(f"{key}/ranks", 1) == self.schedule.world_size:
            store.delete_key(key)
            store.delete_key(f"{key}/ranks")
        if other := [name for name, value in mine.items() if first[name] != value and name != "rank"]:
            fact = f"rank {mine['rank']} begins with another {' and another '.join(other)} than rank {first['rank']}"
            remedy = "give all ranks the same rows in the same order, the same schedule, and the same resume state"
            raise MismatchError("ranks_disagree", f"{fact}: {remedy}")
        PackBatches._compared_in = weakref.ref(store)

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """
        Return the progress as a dict that JSON can represent.

        Args:
            step: Number of optimizer steps done, needed if a loader reads ahead of training. None
                counts the batches that were yielded.

        Raises:
            ArgumentError: The schedule has no such step.
        """
        schedule = self.schedule
        first, last = schedule.start.step, max(schedule.start.step, schedule.total_steps)
        done = None if step is None else as_whole_number("step", step, least=first, most=last)
        progress = schedule.progress_after(self.epoch, self._served) if done is None else schedule.progress_at(done)
        return seal(to_plain(attrs.evolve(self.state, progress=progress)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Continue from a state that `state_dict` has returned, also on another number of ranks.

        Raises:
            StaleError: The state belongs to another plan, data, seed, order or run.
            CorruptArtefactError: The state was changed, or its numbers contradict each other.
        """
        try:
            then = from_plain(ResumeState, unseal(state))
        except ValueError as error:
            raise CorruptArtefactError(_SAVED, str(error), _LOAD_ANOTHER) from error
        then = attrs.evolve(then, plan=then.plan or self.state.plan)  # earlier releases stored it only if it was given
        if differences := then.differences(self.state):
            raise StaleError.for_plan(_SAVED, differences)
        resumed = attrs.evolve(self._given, start=then.progress)
        if (fault := resumed.start_fault()) is not None:
            raise CorruptArtefactError(_SAVED, fault, _LOAD_ANOTHER)
        before, now = then.identity.changeable, self.state.identity.changeable
        self.changes = before.differences(now) if before.inputs else ()  # earlier releases stored none
        self.schedule = resumed
        self.set_epoch(resumed.start.epoch)


class EvalBatches:
    """
    Batch sampler for evaluation, in the order of the plan.

    Rank b % world_size evaluates batch b. If ranks share packs, `lay_out_slots` decides the ranks
    of each batch.

    Every rank has the same number of batches; if needed, the first batches are repeated at the end.

    Attributes:
        shares: Whether several ranks may share a pack.
    """

    def __init__(
        self, num_packs: int, batch_size: int, *, rank: int, world_size: int, degrees: IntArray | None = None
    ) -> None:
        """
        Prepare the batches of an evaluation plan.

        Args:
            num_packs: Number of packs in the plan.
            batch_size: Number of packs in a batch.
            rank: This rank, from 0.
            world_size: Number of ranks.
            degrees: Number of ranks that share each pack; shape (num_packs,). Degrees need a
                *batch_size* of 1. None if no pack is shared.
        """
        self._num_packs, self._size, self.shares = num_packs, batch_size, degrees is not None
        degrees = np.ones(-(-num_packs // batch_size), dtype=np.int64) if degrees is None else degrees
        batches = aligned_positions(degrees, world_size, drop_last=False)
        places = lay_out_slots(degrees[batches], world_size)
        _, first = np.unique(batches, return_index=True)
        self._own = batches[places][rank::world_size].tolist()
        self._counted = np.isin(places, first)[rank::world_size].tolist()

    def __len__(self) -> int:
        return len(self._own)

    def is_counted(self, number: int) -> bool:
        """
        Return whether batch *number* of this rank counts in the evaluation; a repeated batch does
        not.

        The result is the same on all ranks that share the batch.
        """
        return bool(self._counted[number])

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._own:
            yield list(range(batch * self._size, min((batch + 1) * self._size, self._num_packs)))


def find_progress(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the progress that a trainer's state stores, or None."""
    entry = state["stateful_callbacks"].get(PROGRESS)
    return None if entry is None else entry["attributes"]["progress"]


def read_saved_progress(folder: Path) -> Mapping[str, Any]:
    """
    Return the progress that a trainer's checkpoint stores, for `PackBatches.load_state_dict`.

    Raises:
        ArgumentError: There is no such checkpoint, or it was not trained from a plan.
        CorruptArtefactError: The trainer's state in the checkpoint is damaged.
    """
    try:
        state = read_trainer_state(folder)
        step = (progress := find_progress(state) or {})["progress"]["step"]
    except (OSError, KeyError, TypeError) as error:
        fact = "has no progress of a plan, so training cannot resume from it: leave out resume_from_checkpoint"
        if folder.is_dir() and not (folder / STATE).is_file():
            fact = f"has no {STATE}, which is written last into a checkpoint: {COPY_AGAIN}{name_older(folder)}"
        elif not folder.is_dir():
            fact = f"{'is a file' if folder.exists() else 'does not exist'}: name the folder of a checkpoint"
            fact += ", or pass True for the last one (only packplan sft and rl take last)" * (folder.name == "last")
        raise ArgumentError("host", f"{folder} {fact}", {"folder": str(folder)}) from error
    require_same_step(folder, state, step)
    return progress


def read_saved_trainer(folder: Path) -> str | None:
    """
    Return the name of the trainer whose progress a checkpoint stores; None if no name is stored.

    Errors are those of `read_saved_progress`.
    """
    read_saved_progress(folder)
    trainer: str | None = read_trainer_state(folder)["stateful_callbacks"][PROGRESS]["attributes"].get(TRAINER)
    return trainer
