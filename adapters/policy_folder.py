"""Output folder of a reinforcement learning run: its log, checkpoints, and final policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packplan.adapters.files import append_bytes, read_manifest, write_bytes, writing
from packplan.core.errors import ConfigError, CorruptArtefactError

_LOG, _POLICY, _ENGINE, _CHECKPOINT = "rl.jsonl", "policy", "engine", "checkpoint-"

CHECKPOINT_SCHEMA, MANIFEST = "packplan_rl_1", "manifest.json"
"""Schema and file name of a checkpoint's manifest, with which it is whole."""

_KEY = "training.resume_from_checkpoint"


class PolicyFolder:
    """Log with one line per step, checkpoints `checkpoint-<step>`, and the final policy."""

    def __init__(self, output_dir: str) -> None:
        self._folder = Path(output_dir)

    @property
    def log(self) -> Path:
        """Path of the log."""
        return self._folder / _LOG

    @property
    def policy(self) -> Path:
        """Folder of the final policy."""
        return self._folder / _POLICY

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after *step* steps."""
        return self._folder / f"{_CHECKPOINT}{step}"

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint of the latest step; None if there is none."""
        return next(iter(self._checkpoints()), None)

    def candidates(self, wanted: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """
        Yield checkpoints that a run may resume from, newest first, with their manifests.

        Args:
            wanted: Folder of a checkpoint, or `last` for those of this folder.

        Raises:
            ConfigError: The named folder is no whole checkpoint.
        """
        for folder in self._checkpoints() if wanted == "last" else [Path(wanted)]:
            try:
                content = read_manifest(folder / MANIFEST, CHECKPOINT_SCHEMA)
            except CorruptArtefactError as error:
                content, reason = None, f"is damaged: {error.reason}"
            else:
                reason = f"has no {MANIFEST}, with which a checkpoint of packplan rl is whole"
            if content is not None:
                yield folder, content
            elif wanted != "last":
                raise ConfigError.at(_KEY, f"is {wanted}, which {reason}: name another, or last")

    def go_back(self, step: int) -> None:
        """
        Remove what was written after *step* steps: lines of the log, checkpoints, and what a killed
        run left of one.

        Raises:
            ConfigError: The log lacks lines of earlier steps.
        """
        lines = self.log.read_bytes().splitlines(keepends=True)[:step] if self.log.is_file() else []
        if len(lines) < step or (lines and not lines[-1].endswith(b"\n")):
            reason = f"goes on after step {step:,}, but {self.log} has no lines of all steps until then: restore it"
            raise ConfigError.at(_KEY, reason)
        write_bytes(self.log, b"".join(lines))
        with writing(self._folder):
            for folder in self._checkpoints():
                if _step(folder) > step:
                    shutil.rmtree(folder)
            for draft in self._folder.glob(f".{_CHECKPOINT}*"):
                shutil.rmtree(draft)

    def prune(self, limit: int) -> None:
        """Remove all checkpoints but the *limit* newest."""
        with writing(self._folder):
            for folder in self._checkpoints()[limit:]:
                shutil.rmtree(folder)

    def _checkpoints(self) -> list[Path]:
        """Return the folders of checkpoints, those of later steps first."""
        found = [
            folder for folder in self._folder.glob(f"{_CHECKPOINT}*") if folder.name[len(_CHECKPOINT) :].isdecimal()
        ]
        return sorted(found, key=_step, reverse=True)

    def engine(self, version: int) -> Path:
        """Return the folder of the weights that an engine gets after *version* steps."""
        return self._folder / f"{_ENGINE}-{version}"

    def remove_engines(self, *, but: int | None = None) -> None:
        """Delete the folders of engines, but that of one version."""
        for folder in self._folder.glob(f"{_ENGINE}-*"):
            if but is None or folder != self.engine(but):
                shutil.rmtree(folder, ignore_errors=True)

    def make_room(self, *, overwrite: bool) -> None:
        """
        Make the folder, without files of an earlier run.

        Raises:
            ConfigError: It holds an earlier run, and *overwrite* is false.
            OutputError: It cannot be written.
        """
        folder = self._folder
        left = sorted(
            path for path in folder.glob("*")
            if path.name in {_LOG, _POLICY} or path.name.lstrip(".").startswith((_CHECKPOINT, f"{_ENGINE}-"))
        )  # fmt: skip
        if left and not overwrite:
            names = ", ".join(path.name for path in left)
            reason = (
                f"is {folder}, which holds {names} of an earlier run: name another folder, start with --overwrite, or "
                f"resume with {_KEY}=last"
            )
            raise ConfigError.at("training.output_dir", reason)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the log; OutputError if it cannot be written."""
        append_bytes(self.log, f"{json.dumps(entry)}\n".encode())


def _step(folder: Path) -> int:
    return int(folder.name[len(_CHECKPOINT) :])
