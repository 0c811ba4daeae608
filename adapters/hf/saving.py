"""
Protection of checkpoints from damaged files, ruined weights and SIGTERM.

`KeepsCheckpoints` makes a trainer check its weights before each save, save digests of all files,
and save on SIGTERM. `find_damage` verifies a checkpoint before a resumed run loads it.
"""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from packplan.adapters.files import hash_file, wrap_load_errors, wrap_save_errors
from packplan.adapters.finite import not_finite_error
from packplan.adapters.models import is_ruined, load_by_model_class, root_mean_square
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.proof.steps import failing_together
from packplan.adapters.trainer_state import COPY_AGAIN, STATE, add_digest_on_save, lacks_optimizer, read_trainer_state

log = logging.getLogger(__name__)

_DIGESTS = "packplan_digests_*.json"
"""
Pattern of the names of digest files in a checkpoint, one file per rank. Each digest file stores
the number of digest files, and the SHA-256 of each file in its rank's share of the other files.
"""

_MARK = "packplan_digests"
"""Key in a trainer's state, which is present if the checkpoint was saved with digests."""

_RESTORE = "restore the settings that it was trained with, or name another checkpoint"
"""Advice if a checkpoint belongs to another model or optimizer."""

_RESTARTS = (
    "%s has no state of the optimizer (save_only_model), so the optimizer and the learning-rate schedule start again, "
    "and losses will differ from those of a run that was not interrupted"
)
"""Warning about a checkpoint that holds only weights."""


class SaveOnSigterm(TrainerCallback):
    """
    Callback that on SIGTERM saves one checkpoint after the current step of all ranks, and ends
    training.
    """

    def __init__(self, any_rank: Callable[[bool], bool], *, replaces: bool) -> None:
        """
        Prepare the callback.

        Args:
            any_rank: Function that returns whether a flag is set on any rank.
            replaces: Whether to replace a signal handler that the program itself has installed.
        """
        self.any_rank, self.replaces, self.stopped = any_rank, replaces, False

    @contextmanager
    def handling(self) -> Iterator[None]:
        """
        Inside this context, record SIGTERM instead of ending the process. Outside of the main
        thread, where Python allows no signal handler, the context does nothing. The program's own
        handler stays in place unless `replaces` is set.
        """
        self.received = self.stopped = False  # as an earlier call of `train` may have left them
        before, process = signal.getsignal(signal.SIGTERM), os.getpid()
        if threading.current_thread() is not threading.main_thread() or not (self.replaces or before == signal.SIG_DFL):
            yield
            return

        def note_signal(number: int, _: FrameType | None) -> None:
            self.received = True
            if os.getpid() != process:  # a fork, such as a worker of `multiprocessing.Pool`, ends as usual
                signal.signal(number, before or signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, note_signal)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) == note_signal:  # not one that a callback has installed since
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def on_step_end(self, _args: Any, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """
        If any rank received SIGTERM, request a save and the end of training. An evaluation is
        cancelled, since it would delay the save.
        """
        if self.any_rank(self.received):
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, _args: Any, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Neither evaluate nor overwrite the checkpoint after SIGTERM has ended the epoch."""
        if self.stopped:
            control.should_evaluate = control.should_save = False


class WeightSize(TrainerCallback):
    """Callback that records the root mean square of the trained weights before the first step."""

    before: float | None = None

    def on_train_begin(self, args: Any, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        """
        Record the root mean square of the weights, which are loaded and sharded at this point.
        """
        self.before = weight_size(model, args)


def weight_size(model: torch.nn.Module, args: Any) -> float:
    """Return the root mean square of a model's trained weights, over all ranks of a trainer."""
    return root_mean_square(model.parameters(), device=args.device if args.world_size > 1 else None)


class KeepsCheckpoints:
    """
    Mixin that makes a trainer check its weights before each save, and save digests of all files.

    Attributes:
        last_save: Folder of the last checkpoint that this run saved or resumes from, or None.
    """

    checkpoint_key = "resume_from_checkpoint"
    """Key that names the checkpoint in messages."""

    loads_by_class = False
    """Whether the class of a model loads its weights, unless they are sharded."""

    accelerator: Any
    args: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    model: Any
    state: Any
    last_save: str | None = None

    def keep_checkpoints(
        self, *, any_rank: Callable[[bool], bool] | None = None, replaces_handler: bool = False, **entries: Any
    ) -> None:
        """
        Make the trainer save on SIGTERM, and check weights before each save.

        Args:
            any_rank: See `SaveOnSigterm`; None asks the trainer's own process group.
            replaces_handler: See `SaveOnSigterm`.
            **entries: Entries of the trainer's state in each checkpoint.
        """
        self._any_rank, self._entries = any_rank or self._reduce_flag, entries
        self._sigterm, self._weights = SaveOnSigterm(self._any_rank, replaces=replaces_handler), WeightSize()
        for own in (self._sigterm, self._weights):
            self.add_callback(own)  # type: ignore[attr-defined]  # of the trainer's class

    @property
    def was_terminated(self) -> bool:
        """Whether SIGTERM ended training before its last step."""
        return self._sigterm.stopped and self.state.global_step < self.state.max_steps

    def wait_for_all(self) -> None:
        """Wait until every rank has called this method."""
        self._any_rank(False)  # noqa: FBT003  # only its arrival counts

    def reading_together(self) -> AbstractContextManager[None]:
        """Return the context of reading a batch, in which an error of one rank ends all ranks."""
        return failing_together(self._any_rank)

    @contextmanager
    def loading_together(self, part: str) -> Iterator[None]:
        """
        Inside this context, an error of one rank that loads *part* of `last_save` ends all ranks.
        """
        fact = f"is {self.last_save}, whose {part} this run cannot load"
        # Ranks of FSDP load together, so that one could not tell the others.
        told = nullcontext() if self.is_fsdp_enabled else failing_together()
        with told, wrap_load_errors(self.checkpoint_key, fact, _RESTORE):
            yield

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        plain = self.accelerator.unwrap_model(model or self.model)
        by_class = self.loads_by_class and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        with self.loading_together("weights"):
            if not (by_class and load_by_model_class(plain, resume_from_checkpoint)):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, *arguments: Any, **options: Any) -> None:
        with self.loading_together("optimizer state"):
            super()._load_optimizer_and_scheduler(*arguments, **options)  # type: ignore[misc]

    def _reduce_flag(self, flag: bool) -> bool:  # noqa: FBT001  # as in `RankGroup`
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.args.device)))

    def _inner_training_loop(self, *arguments: Any, **options: Any) -> Any:
        """Train; after SIGTERM, end once the current step is saved."""
        with self._sigterm.handling():
            return super()._inner_training_loop(*arguments, **options)  # type: ignore[misc]  # of the trainer's class

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        before, size = self._weights.before, weight_size(self.model, self.args)
        if before is not None and is_ruined(size, before=before):
            what = f"the root mean square of the trained weights after optimizer step {self.state.global_step:,}"
            raise not_finite_error(f"{what} ({before:.3g} before the first)", size)
        add_digest_on_save(self.state)
        self.state.stateful_callbacks.pop(_MARK, None)  # of the checkpoint that was resumed
        self.state.stateful_callbacks |= self._entries
        with wrap_save_errors(Path(self.args.output_dir)):
            super()._save_checkpoint(*arguments, **options)  # type: ignore[misc]  # of the trainer's class
        self.last_save = str(Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]  # of the trainer's class
        folder, args = Path(output_dir), self.args
        if args.should_save:
            remove_digests(folder)
        # Each rank reads files of other ranks. The trainer's state comes next, and makes the
        # checkpoint whole.
        self.wait_for_all()
        # If every node writes its own checkpoint, the node's ranks share it.
        on_node = args.local_process_index, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share, num_shares = on_node if args.save_on_each_node else (args.process_index, args.world_size)
        write_digests(folder, share=share, num_shares=num_shares)
        self.state.stateful_callbacks[_MARK] = {}
        self.wait_for_all()


def remove_digests(folder: Path) -> None:
    """Remove the digest files of a checkpoint folder, before its other files are overwritten."""
    for file in folder.glob(_DIGESTS):
        file.unlink()


def has_digests(folder: Path) -> bool:
    """Return whether a checkpoint has digests; a checkpoint that holds only weights has none."""
    return any(folder.glob(_DIGESTS))


def write_digests(folder: Path, *, share: int, num_shares: int) -> None:
    """
    Write the digests of a share of the files in a checkpoint.

    Args:
        folder: Folder of the checkpoint, complete except for the trainer's state.
        share: Index of this rank's share, from 0.
        num_shares: Number of ranks that write to the folder.
    """
    # The trainer's state is written last; an existing one belongs to an overwritten checkpoint.
    files = [file for file in folder.rglob("*") if file.is_file() and file != folder / STATE]
    names = [str(file.relative_to(folder)) for file in files if not fnmatch(file.name, _DIGESTS)]
    digests = _hash_files(folder, names, share=share, num_shares=num_shares)
    written = json.dumps({"files": num_shares, "digests": digests})
    (folder / _DIGESTS.replace("*", str(share))).write_text(written, encoding="utf-8")


def find_damage(folder: Path, *, share: int, num_shares: int, remedy: str = COPY_AGAIN) -> str | None:
    """
    Verify a share of a checkpoint's files; return a clause that describes damage, or None.

    Args:
        folder: Folder of the checkpoint. A warning is logged if it was saved without digests, and
            another one if it has no state of the optimizer.
        share: Index of this rank's share, from 0.
        num_shares: Number of ranks that verify the checkpoint.
        remedy: Advice that is added to the clause.

    Raises:
        CorruptArtefactError: The trainer's state is damaged.
    """
    stored: dict[str, str] = {}
    try:
        state = read_trainer_state(folder)  # refuses a damaged one
        if not (has_digests(folder) or _MARK in state["stateful_callbacks"]):
            log.warning("%s has no digests, so damaged files in it would not be found", folder)
            if lacks_optimizer(folder):
                log.warning(_RESTARTS, folder)
            return None
        shares = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob(_DIGESTS)]
        for one in shares:
            stored |= one["digests"]
        if not shares or len(shares) != shares[0]["files"]:
            count = f" ({len(shares)} of {shares[0]['files']} found)" if shares else ""
            return f"its files of digests, {_DIGESTS}, are missing{count}: {remedy}"
        found = _hash_files(folder, stored, share=share, num_shares=num_shares)
    except OSError as error:
        fact = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        return f"its {Path(error.filename or folder).name} {fact}: {remedy}"
    except (LookupError, ValueError, TypeError) as error:
        return f"its digests are damaged ({error}): {remedy}"
    damaged = [name for name, digest in found.items() if digest != stored[name]]
    return f"its {damaged[0]} is damaged, since its digest differs from the saved digest: {remedy}" if damaged else None


def _hash_files(folder: Path, names: Iterable[str], *, share: int, num_shares: int) -> dict[str, str]:
    """Return the digest of each file in a share of *names*, and show a progress bar meanwhile."""
    # From the largest file to the smallest, so that shares have about equally many bytes.
    sizes = {name: (folder / name).stat().st_size for name in names}
    mine = sorted(sizes, key=lambda name: (-sizes[name], name))[share::num_shares]
    total = sum(sizes[name] for name in mine)
    with progress(total=total, desc=f"hashing {folder.name}", unit=" bytes", leave=False, delay=BRIEF_S) as bar:
        return {name: hash_file(folder / name, bar) for name in mine}
