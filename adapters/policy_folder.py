"""The output folder of a run of reinforcement learning: its log, and the policies that it saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packplan.adapters.files import writing
from packplan.core.errors import ConfigError

_LOG, _POLICY = "rl.jsonl", "policy"


class PolicyFolder:
    """A line of the log for each step, and the policy at the end; before it, `policy-<step>`."""

    def __init__(self, output_dir: str) -> None:
        self._folder = Path(output_dir)

    @property
    def log(self) -> Path:
        """File of the log."""
        return self._folder / _LOG

    def policy(self, step: int | None = None) -> Path:
        """Return the folder of the policy after so many steps; None means at the end."""
        return self._folder / (_POLICY if step is None else f"{_POLICY}-{step}")

    def make_room(self, *, overwrite: bool) -> None:
        """
        Make the folder of a run that holds nothing of an earlier one.

        Raises:
            ConfigError: It does, and that is not to be overwritten.
            OutputError: It cannot be written.
        """
        folder = self._folder
        left = sorted(path for path in folder.glob("*") if path.name == _LOG or path.name.partition("-")[0] == _POLICY)
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
        """Add a line to the log; OutputError if it cannot be written."""
        with writing(self.log), self.log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry) + "\n")
