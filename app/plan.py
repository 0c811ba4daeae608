"""
Measure and plan a run before it: `python -m app.plan build run.yaml`; `app.sft run.yaml` then starts training at once.

Under torchrun every rank measures a slice of the samples, into an output folder that all ranks see; the result is the
same, byte for byte. `python -m app.plan materialise mix.yaml -o mix.jsonl` writes a mix of data sets for it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from app import materialise as materialising
from app import wiring
from app.command import positive_number, run_command
from app.describe import describe
from app.measuring import failures
from app.planning import Knobs, plan_split, usable_folders
from app.slices import measure_slices
from core.config import RunConfig
from core.errors import ConfigError, DataSetError
from core.ports import LengthSource, RankGroup

log = logging.getLogger("app.plan")


def build(config: RunConfig, group: RankGroup, *, splits: list[str], world_size: int | None) -> None:
    """
    Measure and plan as training would.

    Args:
        config: The run.

        group: The ranks that measure.

        splits: Which of `train` and `eval`.

        world_size: Ranks to align for; None takes those that measure.

    Raises:
        PackplanError: Something the user can mend, or something stored that is damaged.
    """
    wiring.require_static(config)
    training = config.training
    timeout_s = training.packing_wait_timeout_s
    samples = _chosen(wiring.open_samples(config, measuring_ranks=wiring.local_ranks()), splits)
    folders = [wiring.split_folder(training.output_dir, split) for split in samples]
    group.from_rank_zero(lambda _: usable_folders(folders), timeout_s=timeout_s)
    for split, source in samples.items():
        stores, knobs = wiring.open_stores(config, split), Knobs.of(config, split)
        flush_every = training.packing_length_cache_persist_every
        if group.world_size > 1:
            open_slice = partial(wiring.open_slice, config, split)
            measure_slices(
                split, source, stores.lengths, stores.lock, open_slice,
                group=group, flush_every=flush_every, timeout_s=timeout_s,
            )  # fmt: skip
        planned = plan_split(
            split, knobs, source=source, stores=stores, group=group,
            flush_every=flush_every, timeout_s=timeout_s, world_size=world_size,
        )  # fmt: skip
        if group.rank == 0:
            wiring.remove_slices(config, split)
            for level, line in describe(planned, knobs, world_size=world_size or group.world_size):
                log.log(level, line)


def _chosen(samples: Mapping[str, LengthSource], splits: list[str]) -> dict[str, LengthSource]:
    chosen = {split: source for split, source in samples.items() if split in splits}
    if not chosen:
        raise ConfigError.of("custom.val_jsonl", "is not set, so there is no eval split")
    return chosen


def list_failures(samples: Mapping[str, LengthSource]) -> None:
    """Print every record that cannot become a sample; DataSetError if there is one."""
    found = 0
    for split, source in samples.items():
        for error in failures(split, source):
            print(error)
            found += 1
    if found:
        message = f"{found:,} of {sum(map(len, samples.values())):,} records cannot become samples: mend or remove them"
        raise DataSetError(message)
    log.info("all records can become samples")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m app.plan", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="also show what ms-swift and transformers log")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    building = commands.add_parser("build", help="measure and plan", description=__doc__)
    building.add_argument("config", metavar="run.yaml", help="the run; see docs/configuration.md")
    building.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that the run has)")
    building.add_argument(
        "--world-size", type=positive_number, metavar="N", help="ranks to align for (default: those that build)"
    )
    building.add_argument(
        "--list-failures", action="store_true",
        help="encode every record in full, list all that cannot become samples, and store nothing",
    )  # fmt: skip
    mixing = commands.add_parser(
        "materialise", help="write a mix of data sets as one file", description=materialising.__doc__
    )
    mixing.add_argument("mix", metavar="mix.yaml", help="sources and their shares; see docs/mixing.md")
    mixing.add_argument("-o", "--output", type=Path, required=True, metavar="mix.jsonl", help="what to write")
    mixing.add_argument("--seed", type=int, default=42, metavar="N", help="of draw and order (default: %(default)s)")
    mixing.add_argument("--epoch", type=int, default=0, metavar="N", help="from 0; each is mixed anew (default: 0)")
    options = parser.parse_args(arguments)

    def command() -> None:
        if options.command == "materialise":
            for name in ("seed", "epoch"):
                if getattr(options, name) < 0:
                    raise ConfigError.of(f"--{name}", f"is {getattr(options, name)}, but has to be at least 0")
            materialising.materialise(options.mix, options.output, seed=options.seed, epoch=options.epoch)
            return
        config = wiring.read_config(options.config)
        splits = [options.split] if options.split else ["train", "eval"]
        if options.list_failures:
            list_failures(_chosen(wiring.open_samples(config), splits))
            return
        with wiring.joined_ranks({"use_cpu": True}) as group:
            build(config, group, splits=splits, world_size=options.world_size)

    return run_command(command, verbose=options.verbose)


if __name__ == "__main__":
    raise SystemExit(main())
