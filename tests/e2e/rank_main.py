"""Runs `packplan sft` as a rank; a fault is `gradients`, or of `FAULTS`."""

import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import run_command

with loading_libraries():
    import deepspeed
    import torch
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from packplan.adapters.trainer import loader
    from packplan.app import rl
    from packplan.app.opening import ranks
    from packplan.app.opening.ranks import join_ranks, open_rank_group
    from packplan.app.opening.runs import read_config
    from packplan.app.planning import measure
    from packplan.app.sft import train as way
    from packplan.core.errors import RecordError
    from tests.e2e import plugin_run
    from tests.e2e.alone import Gradients, silence
    from tests.e2e.ready import train
    from tests.hosts.pages import own_callbacks


def main(config: str, out: str, fault: str = "") -> int:
    """Return the exit status; this process leads a group, with its workers."""
    if os.getpgrp() != os.getpid():  # what leads a session leads a group already
        os.setpgrp()
    fetched: list[int] = []
    samples: list[list[int]] = []
    plain = loader.PackedDataset.__getitem__

    def noted(dataset, position):
        if dataset.table is trained.get("table"):
            fetched.append(position)
            samples.append(list(dataset.packs[position]))
        return plain(dataset, position)

    trained: dict[str, object] = {}
    gradients = Gradients()
    built = way.build_trainer

    def build_trainer(config, arguments, splits, *args, **kwargs):
        trained["table"] = splits["train"].table
        trainer = built(config, arguments, splits, *args, **kwargs)
        if fault == "gradients":
            trainer.add_callback(gradients)
        if fault in FAULTS:
            FAULTS[fault](trainer)
        return trainer

    def command() -> bool:
        loader.PackedDataset.__getitem__ = noted
        measure.check_repeatability = encode_once
        way.build_trainer = build_trainer
        if fault == "gradients":
            silence()
        run = read_config(config)
        with join_ranks(run) as group:
            result = train(run, group)
        seen = {"rank": group.rank, "fetched": fetched, "samples": samples, **_told(result)}
        Path(out, f"rank{group.rank}.json").write_text(json.dumps(seen))
        if fault == "gradients":
            torch.save(gradients.steps, Path(out, f"gradients{group.rank}.pt"))
        return result.terminated

    return run_command(command, verbose=False)


def several(runs: list[tuple[str, str]], out: str, commands: Sequence[tuple[str, str, list[str]]] = ()) -> None:
    """
    Run commands of ms-swift, or `packplan sft` and `packplan rl`, in one process group.

    The commands have a group of their own, since ms-swift's GRPO changes the trainer of TRL.

    Args:
        runs: Name and YAML of each run. The names of those of `packplan rl` begin with `rl`; one
            whose name begins with `killed` is killed within its third step.
        out: Folder, in which each run writes what `main` writes into a folder of its name.
        commands: See `plugin_run.main`.
    """
    with open_rank_group({"use_cpu": True}) as group:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)  # on GPUs, accelerate does
        stop, group.stop_heartbeat = group.stop_heartbeat, lambda: None  # the next run needs it

        @contextmanager
        def joined(_: object) -> Iterator[Any]:
            yield group

        globals().update(join_ranks=joined)
        if commands:
            plugin_run.main(commands, out)
        for name, config in runs:
            Path(out, name).mkdir(exist_ok=True)
            forget_deepspeed()
            if "damaged" in name:
                whole = Path(out, name.replace("-damaged", ""), "checkpoint-2")
                plugin_run.copy_damaged(whole, Path(out, name, "checkpoint-2"))
            if name.startswith("rl"):
                with own_callbacks(), mock.patch.object(ranks, "open_rank_group", joined):
                    status = rl.main([config, "--quiet"])
            else:
                status = main(config, str(Path(out, name)), "killed" if name.startswith("killed") else "")
            Path(out, name, f"status{group.rank}").write_text(str(status))
        group.stop_heartbeat = stop


def forget_deepspeed() -> None:
    """Let the next run of this process share weights only if its own settings say so."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)


def ruin_a_loss(trainer: Any) -> None:
    """Make losses of the second rank infinite after the first step."""
    if trainer.group.rank == 1:
        loss = trainer.compute_loss
        trainer.compute_loss = lambda *a, **k: loss(*a, **k) + (math.inf if trainer.state.global_step else 0)


def kill_within_the_third_step(trainer: Any) -> None:
    """Kill all ranks together before a trainer's second batch of the step."""
    step, calls = trainer.training_step, count(1)

    def training_step(*args: Any, **options: Any) -> Any:
        if trainer.state.global_step == 2 and next(calls) == 2:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **options)

    trainer.training_step = training_step


def lose_a_file(trainer: Any) -> None:
    """Keep the second rank from reading a sample after the first step."""
    encode = trainer.train_dataset.encoder.encode_planned

    def encode_planned(index: int, table: Any) -> Any:
        if trainer.group.rank == 1 and trainer.state.global_step:
            raise RecordError("data.jsonl, line 7", "the image cannot be read", "mount its disk")
        return encode(index, table)

    trainer.train_dataset.encoder.encode_planned = encode_planned


FAULTS = {"infinite": ruin_a_loss, "killed": kill_within_the_third_step, "lost": lose_a_file}
"""Fault -> function that plants it in a trainer."""


def _told(result: Any) -> dict[str, Any]:
    """Return a result as JSON holds it; without a plan where each epoch has its own."""
    told = {
        "steps": result.num_steps, "planned_steps": result.schedule.total_steps, "history": result.history,
        "terminated": result.terminated, "epochs": [attrs.asdict(one) for one in result.epochs],
    }  # fmt: skip
    if hasattr(plan := result.planned["train"], "raw"):
        told |= {
            "raw": plan.raw_checksum, "aligned": plan.checksum, "num_aligned": len(plan.aligned.packs),
            "num_raw": len(plan.raw.packs), "raw_packs": plan.raw.packs.tolist(), "repeated": plan.aligned.repeated,
        }  # fmt: skip
    return told


def encode_once(_source: Any, _stored: Any) -> dict[str, Any]:
    """Encode nothing again: in this small data, that would take as long as measuring it."""
    return {}


def seen(out: Path, world_size: int) -> list[dict[str, Any]]:
    """Return what each rank wrote down."""
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
