"""State of a transformers trainer in a checkpoint, with a digest that is checked on reading."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packplan.core.errors import CorruptArtefactError
from packplan.core.fingerprint import json_digest
from packplan.core.schedule import DAMAGED_STATE_REMEDY

STATE = "trainer_state.json"
"""File that the trainer writes last into a checkpoint."""

_DIGEST_KEY = "packplan_sha256"
"""Key of the state's digest in its `stateful_callbacks`."""


def add_digest_on_save(state: Any) -> None:
    """Have the `TrainerState` *state* add a digest to its file whenever it is saved."""
    if getattr(type(state), "save_to_json", None) is not _save_with_digest:
        state.__class__ = type(f"Sealed{type(state).__name__}", (type(state),), {"save_to_json": _save_with_digest})


def _save_with_digest(state: Any, json_path: str) -> None:
    """Write a state as transformers does, with its digest."""
    values = json.loads(json.dumps(dataclasses.asdict(state)))
    values["stateful_callbacks"].pop(_DIGEST_KEY, None)  # that of the checkpoint which was resumed from
    values["stateful_callbacks"][_DIGEST_KEY] = json_digest(values)
    Path(json_path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """
    Return the trainer's state in a checkpoint, of Packplan or of another program.

    Raises:
        OSError: The file of the state is missing.
        CorruptArtefactError: The state is damaged, or Packplan's digest is missing.
    """
    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        digest = state["stateful_callbacks"].pop(_DIGEST_KEY, None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it is no state of a trainer ({error!r:.100}), or was being written when the run ended"
        raise CorruptArtefactError(str(path), reason, DAMAGED_STATE_REMEDY) from error
    ours = digest is not None or any("packplan" in name.lower() for name in state["stateful_callbacks"])
    if ours and digest != json_digest(state):
        reason = "differs from the saved one" if digest else "is missing: the file was edited"
        raise CorruptArtefactError(str(path), f"its digest {reason}", DAMAGED_STATE_REMEDY)
    return state


def require_same_step(folder: Path, state: Mapping[str, Any], step: int) -> None:
    """
    Refuse a trainer's state of another optimizer step than Packplan's state in the checkpoint.

    Args:
        folder: Folder of the checkpoint.
        state: State of the trainer.
        step: Optimizer step of Packplan's state.

    Raises:
        CorruptArtefactError: The steps differ.
    """
    if state.get("global_step") != step:
        reason = f"its global_step is {state.get('global_step')}, but that of its plan is {step}"
        raise CorruptArtefactError(str(folder / STATE), reason, DAMAGED_STATE_REMEDY)
