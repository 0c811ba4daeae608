"""Checkpoints of a run of reinforcement learning: when to write them, and how to resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from packplan.app.wiring.stores import open_policy_folder
from packplan.core.config import RunConfig, changed_settings, resume_faults, resume_values
from packplan.core.errors import ConfigError, PackplanError
from packplan.core.ports import Workers

if TYPE_CHECKING:
    from packplan.adapters.policy_folder import PolicyFolder
    from packplan.adapters.samples.encoder import SwiftEncoder

log = logging.getLogger(__name__)

_KEPT = 2
"""Checkpoints that are kept by default: one may be damaged."""


def is_first_rank() -> bool:
    """Return whether this process is torchrun's first, or the only one: it logs, and writes."""
    return os.environ.get("RANK", "0") == "0"


@attrs.frozen
class Checkpoints:
    """Checkpoints of one run."""

    config: RunConfig
    workers: Workers
    folder: PolicyFolder

    settings: dict[str, str]
    """Settings that a resumed run is compared by; see `core.config.resume_values`."""

    @classmethod
    def from_run(
        cls, config: RunConfig, workers: Workers, samples: SwiftEncoder, prompts: Sequence[Sequence[int]]
    ) -> Checkpoints:
        """
        Describe a run for its checkpoints.

        Args:
            config: The run.
            workers: They hold the policy.
            samples: Records with the answers.
            prompts: Token ids of all prompts.
        """
        digest = hashlib.sha256()
        for index, prompt in enumerate(prompts):
            digest.update(f"{json.dumps([list(prompt), str(samples.answer(index))])}\n".encode())
        model = config.model.model
        model = str(Path(model).resolve()) if Path(model).exists() else model
        settings = resume_values(config, model=model, prompts=digest.hexdigest())
        return cls(config, workers, open_policy_folder(config), settings)

    def save(self, step: int) -> None:
        """Write a checkpoint after *step* steps if it is due, and remove old ones."""
        grpo = self.config.grpo
        if not grpo.save_every or (step % grpo.save_every and step != grpo.num_steps):
            return
        facts = json.dumps({"step": step, "settings": self.settings})
        self._on_all("save_checkpoint", self.folder.checkpoint(step), facts=facts)
        limit = self.config.training.trainer.get("save_total_limit", _KEPT)
        if limit and is_first_rank():
            self.folder.prune(max(1, int(limit)))

    def resume(self) -> int:
        """
        Load the checkpoint that `training.resume_from_checkpoint` names, and return its step.

        Raises:
            ConfigError: There is no whole one, or the run has other settings.
        """
        key, wanted = "training.resume_from_checkpoint", self.config.training.resume_from_checkpoint or "last"
        for folder, content in self.folder.candidates(wanted):
            if not all(result["whole"].all() for result in self._on_all("verify_checkpoint", folder)):
                if wanted != "last":
                    reason = f"is {wanted}, which has files with other digests than its manifest: name another, or last"
                    raise ConfigError.at(key, reason)
                log.warning("%s is passed over: its files have other digests than its manifest", folder)
                continue
            if faults := tuple(resume_faults(folder.name, content["settings"], self.settings)):
                raise ConfigError("the configuration", faults)
            step: int = content["step"]
            if step > (num_steps := self.config.grpo.num_steps):
                reason = f"is {num_steps:,}, but {folder.name} is of step {step:,}: raise it, or name an earlier one"
                raise ConfigError.at("grpo.num_steps", reason)
            self._on_all("load_checkpoint", folder)
            if is_first_rank():
                self.folder.go_back(step)
                if changed := changed_settings(content["settings"], self.settings):
                    log.warning("settings have changed since %s: %s", folder.name, ", ".join(changed))
                log.info("goes on after step %d, from %s", step, folder)
            return step
        reason = f"finds no whole checkpoint in {self.config.training.output_dir}: remove the key to begin at step 1"
        raise ConfigError.at(key, reason)

    def _on_all(self, method: str, folder: Path, **options: Any) -> list[Any]:
        shards = [str(folder)] * self.workers.num_workers
        return self.workers.run_all_workers_sharded_data(method, shards, **options)


@contextlib.contextmanager
def named_at_failure(config: RunConfig) -> Iterator[None]:
    """Log the newest checkpoint that was written inside, if that fails, and how to go on."""
    folder = open_policy_folder(config)
    before = folder.newest_checkpoint()
    try:
        yield
    except PackplanError:
        newest = folder.newest_checkpoint()
        if is_first_rank() and newest not in {None, before}:
            log.warning("the run ended, but training.resume_from_checkpoint=last goes on from %s", newest)
        raise
