"""Last lines of a run, also after Ctrl-C: its steps, its last checkpoint, and how to use it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from packplan.core.config import RunConfig
from packplan.core.errors import agree, counted

if TYPE_CHECKING:
    from packplan.adapters.trainer.base import PackingTrainer

log = logging.getLogger(__name__)


@contextmanager
def interruption_logged(trainer: PackingTrainer) -> Iterator[None]:
    """
    Log on rank 0 how many steps training did, and its last checkpoint, when Ctrl-C ends it.
    """
    try:
        yield
    except KeyboardInterrupt:
        saved = "no checkpoint was saved" if trainer.saved is None else f"the last checkpoint is {trainer.saved}"
        if trainer.group.rank == 0:  # Ctrl-C reaches all ranks, which would say the same
            log.warning("interrupted after %s; %s", counted(trainer.state.global_step, "optimizer step"), saved)
        raise


def log_outcome(config: RunConfig, trainer: PackingTrainer) -> None:
    """
    Log the steps of a run that was not ended early, the checkpoint that has them, and the command
    that asks it. Every rank may call this; rank 0 is heard.
    """
    steps = trainer.state.global_step
    done = f"{counted(steps, 'optimizer step')} {agree(steps)} done"
    if trainer.saved is None:
        log.info("%s; no checkpoint was saved (training.save_strategy)", done)
        return
    usage = "" if trainer.is_sharded else f"; to ask it: {_command(config, trainer, str(trainer.saved))}"
    log.info("%s; the last checkpoint is %s%s", done, trainer.saved, usage)


def _command(config: RunConfig, trainer: PackingTrainer, checkpoint: str) -> str:
    """
    Return the command of ms-swift that loads a checkpoint, and is told what no folder of weights
    says.
    """
    words = ["swift", "infer", "--model", checkpoint]
    if config.training.adds_weights:
        words = ["swift", "infer", "--model", config.model.model, "--adapters", checkpoint]
    template = trainer.template
    kinds = {"model_type": template.model_meta.model_type, "template": template.template_meta.template_type}
    return shlex.join(words + [word for name, kind in kinds.items() if kind for word in (f"--{name}", kind)])
