"""
Reads and writes the state of transformers' trainer in a checkpoint, with a digest.

If DeepSpeed stores the optimizer in parts, the module also checks that no file of a part is
missing.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packplan.core.errors import CorruptArtefactError, counted
from packplan.core.fingerprint import json_digest
from packplan.core.schedule import DAMAGED_STATE_REMEDY

STATE = "trainer_state.json"
"""Name of the file that the trainer writes last into a checkpoint."""

COPY_AGAIN = "copy it again, or name another checkpoint"
"""Advice about a damaged file of a checkpoint."""

_DIGEST_KEY = "packplan_sha256"
"""Key of the digest in the state's `stateful_callbacks`."""


def name_older(checkpoint: Path) -> str:
    """
    Return ", such as PATH" for a message, where PATH is the latest earlier checkpoint.

    Without an earlier checkpoint in the same folder, "" is returned.

    Args:
        checkpoint: Folder of a checkpoint that cannot be resumed from.
    """
    folders = [checkpoint, *(path.parent for path in checkpoint.parent.glob(f"checkpoint-*/{STATE}"))]
    steps = {folder: int(re.sub(r".*\D", "", folder.name) or 0) for folder in folders}
    older = [folder for folder in folders if steps[folder] < steps[checkpoint]]
    return f", such as {max(older, key=steps.__getitem__)}" if older else ""


def lacks_optimizer(checkpoint: Path) -> bool:
    """
    Return whether a checkpoint has no state of the optimizer, or none of the learning rate.

    A checkpoint with a folder `global_step*` of DeepSpeed counts as having both.
    """
    whole = (checkpoint / "scheduler.pt").is_file() and any(checkpoint.glob("*optimizer*"))
    return not (whole or any(checkpoint.glob("global_step*")))


def add_digest_on_save(state: Any) -> None:
    """Change the `TrainerState` *state* so that its saved file always has a digest."""
    if getattr(type(state), "save_to_json", None) is not _save_with_digest:
        state.__class__ = type(f"Sealed{type(state).__name__}", (type(state),), {"save_to_json": _save_with_digest})


def _save_with_digest(state: Any, json_path: str) -> None:
    """Write a state in transformers' format, with a digest of the state."""
    values = json.loads(json.dumps(dataclasses.asdict(state)))
    values["stateful_callbacks"].pop(_DIGEST_KEY, None)  # the digest of the checkpoint that was resumed
    values["stateful_callbacks"][_DIGEST_KEY] = json_digest(values)
    Path(json_path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """
    Return the trainer's state in a checkpoint of Packplan or of another program.

    Raises:
        OSError: The file `trainer_state.json` cannot be read.
        CorruptArtefactError: The state is damaged, or Packplan wrote it and its digest is missing.
    """
    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        digest = state["stateful_callbacks"].pop(_DIGEST_KEY, None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it is not the state of a trainer ({error!r:.100}), or its writing was interrupted"
        raise CorruptArtefactError(str(path), reason, DAMAGED_STATE_REMEDY + name_older(folder)) from error
    ours = digest is not None or any("packplan" in name.lower() for name in state["stateful_callbacks"])
    if ours and digest != json_digest(state):
        reason = "differs from the saved one" if digest else "is missing: the file was edited"
        raise CorruptArtefactError(str(path), f"its digest {reason}", DAMAGED_STATE_REMEDY + name_older(folder))
    return state


def require_same_step(folder: Path, state: Mapping[str, Any], step: int) -> None:
    """
    Refuse a trainer's state if its optimizer step differs from Packplan's resume state.

    Args:
        folder: Folder of the checkpoint.
        state: State of the trainer.
        step: Optimizer step of Packplan's resume state.

    Raises:
        CorruptArtefactError: The steps differ.
    """
    if state.get("global_step") != step:
        reason = f"its global_step is {state.get('global_step')}, but Packplan's resume state is at step {step}"
        raise CorruptArtefactError(str(folder / STATE), reason, DAMAGED_STATE_REMEDY)


def find_other_parts(folder: Path, *, stage: int | None, num_ranks: int) -> str | None:
    """
    Return the reason why a run cannot load a checkpoint's optimizer; None if the run can load it.

    DeepSpeed's files may be missing, or may belong to another ZeRO stage or number of ranks. Only
    the names of files are checked, and the content of the short file `latest`.

    Args:
        folder: Folder of the checkpoint.
        stage: ZeRO stage of the run; None without DeepSpeed.
        num_ranks: Number of ranks in the run.
    """
    if missing := next(_yield_missing(folder), None):
        return missing
    names = " ".join(path.name for path in folder.glob("global_step*/*"))
    parts, is_third = names.count("optim_states.pt"), re.search(r"zero_pp_rank_\S+model_states.pt", names)
    then = None if not names else 3 if is_third else 2 if parts else 0
    # Each node may have the files of its own ranks only.
    count = num_ranks if parts == int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else parts
    kept, taken = _optimizer_text(then, count), _optimizer_text(stage, num_ranks)
    remedy = "resume on the same number of ranks, with the same DeepSpeed settings"
    return None if kept == taken else f"its optimizer is stored {kept}, but this run stores it {taken}: {remedy}"


def _yield_missing(folder: Path) -> Iterator[str]:
    """Yield a message about each DeepSpeed file that is missing."""
    files = {path.name.removeprefix("bf16_"): path for path in folder.glob("global_step*/*.pt")}
    if not files:
        return
    latest = folder / "latest"  # names the folder of these files
    if not latest.is_file() or latest.read_text().strip() not in {path.parent.name for path in files.values()}:
        yield f"its file latest is missing, or names none of its folders: {COPY_AGAIN}"
    ranks = [int(rank) for rank in re.findall(r"zero_pp_rank_(\d+)_", " ".join(files))] or [0]
    kinds = {name.partition("_mp_rank_")[2] for name in files if name.startswith("zero")}
    due = {f"zero_pp_rank_{rank}_mp_rank_{kind}" for rank in range(min(ranks), max(ranks) + 1) for kind in kinds}
    if "00_model_states.pt" not in kinds:
        due.add("mp_rank_00_model_states.pt")
    yield from (f"its {name} is missing: {COPY_AGAIN}" for name in sorted(due - files.keys()))


def _optimizer_text(stage: int | None, num_ranks: int) -> str:
    """Describe how an optimizer is stored: in parts under a ZeRO stage, or as a whole."""
    whole = "as a whole" if stage is None else "as a whole by DeepSpeed"
    return f"in {counted(num_ranks, 'part')} by ZeRO {'3' if stage == 3 else '1 or 2'}" if stage else whole
