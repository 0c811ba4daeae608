"""Choice of the checkpoint that a run resumes from, and its resume state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs

from packplan.adapters.hf.saving import find_damage, has_digests
from packplan.adapters.loaders.batches import PROGRESS, find_progress
from packplan.adapters.trainer_state import COPY_AGAIN, STATE, read_trainer_state, require_same_step
from packplan.core.errors import ConfigError, CorruptArtefactError, Difference, StaleError, verb_for
from packplan.core.fingerprint import from_plain, seal, to_plain, unseal
from packplan.core.ports import RankGroup
from packplan.core.schedule import ResumeState
from packplan.core.stream import StreamState

log = logging.getLogger(__name__)

State = TypeVar("State", ResumeState, StreamState)
"""Resume state of a plan, or of a stream."""

_ATTENTION = "packplan_attention"
"""
Key of a trainer's state, under which a checkpoint stores the attention that it was trained with.
"""

_AGAIN = f"{COPY_AGAIN} (last takes the newest complete checkpoint)"
"""Advice about a damaged file of a checkpoint that the run names."""

_FRESH = "to start again from its weights, set model.model to this folder"
"""Advice about a checkpoint that this run cannot resume from."""

_OTHER_VARIANT = f"but another custom.trainer_variant made it: restore that variant; {_FRESH}"
"""Reason why a run of a plan cannot resume from the checkpoint of a stream, or the reverse."""

_FOREIGN = f"but it has no progress of a plan, since Packplan did not write it; {_FRESH}"
"""Reason why no run can resume from a checkpoint that has no resume state."""

CHECKPOINT_KEY = "training.resume_from_checkpoint"

_MOST_NAMED = 3
"""Largest number of differences from another run that a message names."""


@attrs.frozen
class Checkpoint(Generic[State]):
    """Checkpoint to resume from, with its resume state."""

    folder: str

    resume_state: State
    """Identity of the plan or stream that was trained, and the progress in it."""

    attention: str
    """Attention backend with which the checkpoint was trained."""


def find_checkpoint(
    checkpoint: str,
    output_dir: str,
    *,
    group: RankGroup,
    state_class: type = ResumeState,
    differences: Callable[[Any], tuple[Difference, ...]] | None = None,
) -> Checkpoint[Any]:
    """
    Return the checkpoint that a run resumes from.

    Every rank has to call this function, and reads a share of the checkpoint's files.

    Args:
        checkpoint: Folder of a checkpoint, or `last` for this run's newest intact checkpoint in
            *output_dir*.
        output_dir: Output folder of the run.
        group: Ranks of the run, which all resume from the same checkpoint.
        state_class: Class of the checkpoint's resume state.
        differences: Function that returns the differences of a resume state from this run; None
            accepts any run.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, or it has no resume state.
        StaleError: The checkpoint is from another run. With `last`, all intact checkpoints are from
            other runs.
    """
    stale: StaleError | None = None
    passed = dict[str, list[Path]]()  # reason -> folders
    for folder in _candidates(checkpoint, output_dir):
        found = _read_checkpoint(folder, state_class)
        reason = found if isinstance(found, str) else None
        if isinstance(found, Checkpoint) and differences and (others := differences(found.resume_state)):
            other = StaleError.for_plan(str(folder), others)
            stale = stale or other
            causes = other.fact.split("\n  ")[1:]
            reason = f"of another run: {'; '.join(causes[:_MOST_NAMED])}"
        reason = reason or _find_damage(folder, group, "copy it again" if checkpoint == "last" else _AGAIN)
        reasons = group.gather(reason or "")
        if not any(reasons) and isinstance(found, Checkpoint):
            _warn_of_passed(passed)
            return found
        if stale is not None and checkpoint != "last":
            raise stale
        elsewhere = (f"but on rank {rank}, {text.removeprefix('but ')}" for rank, text in enumerate(reasons) if text)
        reason = reason or next(elsewhere)
        if checkpoint != "last":
            raise ConfigError.for_key(CHECKPOINT_KEY, f"is {checkpoint}, {reason}")
        passed.setdefault(reason, []).append(folder)
    _warn_of_passed(passed)
    if stale is not None:
        raise stale
    remedy = "repair a checkpoint that was passed over, or remove the key" if passed else "remove the key"
    effect = "the run then starts at step 0, and overwrites checkpoints of the same steps"
    raise ConfigError.for_key(CHECKPOINT_KEY, f"finds no complete checkpoint in {output_dir}: {remedy}; {effect}")


def saved_plans(checkpoint: str, output_dir: str) -> frozenset[str]:
    """
    Return the plan checksums stored in the checkpoints from which `find_checkpoint` chooses.

    Args:
        checkpoint: Folder of a checkpoint, or `last`.
        output_dir: Output folder of the run.
    """
    found = (_read_checkpoint(folder, ResumeState) for folder in _candidates(checkpoint, output_dir))
    return frozenset(one.resume_state.plan for one in found if isinstance(one, Checkpoint))


def _candidates(checkpoint: str, output_dir: str) -> Iterator[Path]:
    return _list_newest_first(Path(output_dir)) if checkpoint == "last" else iter([Path(checkpoint)])


def _warn_of_passed(passed: Mapping[str, list[Path]]) -> None:
    """Log one warning that names, for each reason, the newest checkpoint that `last` skips."""
    changes = (
        f"{folders[0]}{f' and {len(folders) - 1:,} older' * (len(folders) > 1)} "
        f"{verb_for(len(folders), 'is', 'are')} passed over: {reason.removeprefix('but ')}"
        for reason, folders in passed.items()
    )
    if line := "; ".join(changes):
        log.warning("%s", line)


def progress_entry(state: ResumeState | StreamState) -> dict[str, Any]:
    """Return the entry of the trainer's state that stores a resume state."""
    return {PROGRESS: {"args": {}, "attributes": {"progress": seal(to_plain(state))}}}


def attention_entry(attn_impl: str) -> dict[str, Any]:
    """Return the entry of the trainer's state that stores the name of the attention."""
    return {_ATTENTION: {"attn_impl": attn_impl}}


def _find_damage(folder: Path, group: RankGroup, remedy: str) -> str | None:
    """
    Verify this rank's share of a checkpoint's files; return a clause about any damage and its
    *remedy*, or None.
    """
    started = time.perf_counter()
    if fact := find_damage(folder, share=group.rank, num_shares=group.world_size, remedy=remedy):
        return f"but {fact}"
    if group.rank == 0:
        log.info("%s is complete: its files were read in %.1f s", folder, time.perf_counter() - started)
    return None


def _read_checkpoint(folder: Path, state_class: type) -> Checkpoint[Any] | str:
    """
    Return a checkpoint without loading its weights, or the reason why no run can resume from it.
    """
    if not (folder / STATE).is_file():
        return _explain_missing_state(folder)
    try:
        state = read_trainer_state(folder)
        progress, attention = find_progress(state), state["stateful_callbacks"].get(_ATTENTION)
        if progress is None or attention is None:
            return _FOREIGN
        if ("plan" in progress) != (state_class is ResumeState):
            return _OTHER_VARIANT
        resume_state: Any = from_plain(state_class, unseal(progress))
        require_same_step(folder, state, resume_state.progress.step)
    except (CorruptArtefactError, OSError, ValueError) as error:
        return f"but its {STATE} is damaged: {getattr(error, 'reason', error)}"
    if not has_digests(folder):
        return "but it holds only weights (save_only_model): to start again from them, set model.model to this folder"
    return Checkpoint(str(folder), resume_state, attention["attn_impl"])


def _explain_missing_state(folder: Path) -> str:
    """Return the reason why a path without a trainer's state is no checkpoint."""
    if (newest := newest_checkpoint(str(folder))) is not None:
        return f"but that is no checkpoint: name {newest}, the newest in it, or set last"
    if folder.is_dir():
        return f"but it has no {STATE}: name another, since this is no checkpoint, or was not written to its end"
    found = "is a file" if folder.is_file() else "does not exist"
    return f"but that {found}: name the folder of a checkpoint, or set last"


def newest_checkpoint(output_dir: str) -> Path | None:
    """Return the checkpoint folder of the last step, complete or not; None if there is none."""
    return next(_list_newest_first(Path(output_dir)), None)


def _list_newest_first(output_dir: Path) -> Iterator[Path]:
    folders = [folder for folder in output_dir.glob("checkpoint-*") if folder.name.split("-")[-1].isdecimal()]
    yield from sorted(folders, key=lambda folder: int(folder.name.split("-")[-1]), reverse=True)
