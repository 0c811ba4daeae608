"""Checkpoints: which one to resume from, and the bookmark in it that says how far the plan was trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cattrs
from cattrs.errors import BaseValidationError

from core.course import Bookmark
from core.errors import ConfigError

log = logging.getLogger(__name__)

STATE = "trainer_state.json"
"""What the trainer writes last into a checkpoint."""

_BOOKMARK = "packplan"
"""Where the bookmark is, among the states that the trainer keeps for its callbacks."""

_ATTENTION = "packplan_attention"
"""Where the attention backend is that trained the checkpoint."""

_FILES = "packplan_files"
"""Where the sizes of the checkpoint's files are: weights, optimizer, generators of all ranks."""


def find_checkpoint(wanted: str, output_dir: str) -> Path:
    """
    Return the folder of the checkpoint to resume from.

    Args:
        wanted: A checkpoint's folder, or `last` for the newest whole one of *output_dir*.

        output_dir: Of the run.

    Raises:
        ConfigError: There is no such checkpoint, or it is torn, or it holds no bookmark.
    """
    candidates = _newest_first(Path(output_dir)) if wanted == "last" else iter([Path(wanted)])
    for folder in candidates:
        reason = _why_not(folder)
        if reason is None:
            return folder
        if wanted != "last":
            raise ConfigError.of("training.resume_from_checkpoint", f"is {wanted}, {reason}")
        log.warning("%s is passed over: it is a folder %s", folder, reason)
    reason = f"is {wanted}, but there is no whole checkpoint in {output_dir}: remove it to start anew"
    raise ConfigError.of("training.resume_from_checkpoint", reason)


def read_bookmark(folder: Path) -> Bookmark:
    """Return the bookmark of a checkpoint that `find_checkpoint` found."""
    return cattrs.structure(_state(folder)["stateful_callbacks"][_BOOKMARK], Bookmark)


def read_attention(folder: Path) -> str | None:
    """Return the attention backend that trained a checkpoint that `find_checkpoint` found; None if it does not say."""
    name: str | None = _state(folder)["stateful_callbacks"].get(_ATTENTION, {}).get("attn_impl")
    return name


def to_state(bookmark: Bookmark, *, attn_impl: str) -> dict[str, Any]:
    """Return what the trainer's state has to keep, so that `read_bookmark` and `read_attention` find what they look for."""
    return {_BOOKMARK: cattrs.unstructure(bookmark), _ATTENTION: {"attn_impl": attn_impl}, _FILES: {}}


def files_to_state(folder: Path) -> dict[str, Any]:
    """Return what the trainer's state has to keep of the checkpoint's other files, so that a torn one is found."""
    return {
        _FILES: {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    }


def _state(folder: Path) -> Any:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def _why_not(folder: Path) -> str | None:
    """Return why a folder is no checkpoint to resume from, or None if it is one."""
    if not (folder / STATE).is_file():
        return f"but it has no {STATE}: it is no checkpoint, or was being written when the run ended"
    try:
        read_bookmark(folder)
    except KeyError:
        return (
            "but it does not say how far a plan was trained: it was not written by this program; to start anew from "
            "its weights, set model.model to it"
        )
    except (ValueError, TypeError, BaseValidationError):
        return f"but its {STATE} is damaged, or was being written when the run ended"
    files = _state(folder)["stateful_callbacks"].get(_FILES)
    if not files:
        return "but it holds weights alone (save_only_model): to start anew from them, set model.model to it"
    for name, size in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"but its {name} is missing or torn"
    return None


def _newest_first(output_dir: Path) -> Iterator[Path]:
    folders = [folder for folder in output_dir.glob("checkpoint-*") if folder.name.split("-")[-1].isdecimal()]
    yield from sorted(folders, key=lambda folder: int(folder.name.split("-")[-1]), reverse=True)
