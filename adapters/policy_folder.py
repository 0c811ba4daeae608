"""Output folder of a reinforcement learning run: its log, and the policies that it saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packplan.adapters.files import writing
from packplan.core.errors import ConfigError

_LOG, _POLICY, _ENGINE = "rl.jsonl", "policy", "engine"


class PolicyFolder:
    """Log with one line per step, policies `policy-<step>`, and the final policy."""

    def __init__(self, output_dir: str) -> None:
        self._folder = Path(output_dir)

    @property
    def log(self) -> Path:
        """Path of the log."""
        return self._folder / _LOG

    def policy(self, step: int | None = None) -> Path:
        """Return the folder of the policy after *step* steps; None for the final policy."""
        return self._folder / (_POLICY if step is None else f"{_POLICY}-{step}")

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
            path for path in folder.glob("*") if path.name == _LOG or path.name.partition("-")[0] in {_POLICY, _ENGINE}
        )
        if left and not overwrite:
            names = ", ".join(path.name for path in left)
            reason = (
                f"is {folder}, which holds {names} of an earlier run: name another folder, or start with --overwrite"
            )
            raise ConfigError.at("training.output_dir", reason)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the log; OutputError if it cannot be written."""
        with writing(self.log), self.log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry) + "\n")
