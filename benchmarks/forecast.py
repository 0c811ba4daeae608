"""
Predict the seconds of optimizer steps from a calibration, for packs that the calibration leaves
out.

The calibration leaves out half of each setting's packs. The steps of these packs are trained in
turn with the calibration's steps and with one repeated step. So a slow phase of the machine affects
all of these steps. The error of a step compares its predicted seconds with its median seconds over
three repeats. The interquartile range of the repeated step shows how much equal steps differ. This
range is not subtracted from the errors.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from benchmarks.child import Child, run_in_child
from benchmarks.options import add_names, add_number
from benchmarks.table import Columns, show
from packplan.adapters.progress import progress
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.forecast import REPEATS, Calibration, MeasuredStep, calibration_packs

if TYPE_CHECKING:
    from packplan.app.planning.split import PlannedSplit

LIMIT_S = 1800.0
"""Seconds of a setting after which its processes are ended."""

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}

_REPEATED = 7
"""Number of repeats of one step in each of `REPEATS` rounds."""


@attrs.frozen
class Case:
    """One setting of training: samples, ranks, tuner and gradient checkpointing."""

    kind: str
    """Samples: `text`, or `images` with text."""

    ranks: int = 1
    tuner: str = "full"
    checkpointing: bool = False


CASES: Mapping[str, Case] = {
    "text": Case("text"),
    "text, checkpointing": Case("text", checkpointing=True),
    "images": Case("images"),
    "images, LoRA": Case("images", tuner="lora"),
    "images, 2 ranks": Case("images", ranks=2),
}
"""Name -> setting."""


@attrs.frozen(kw_only=True)
class ForecastRow:
    """Errors of the predictions of one setting, or of all settings together."""

    name: str
    num_fitted: int
    errors: tuple[float, ...]
    """Relative error of each predicted step, which the fit did not use."""

    stated: float | None
    """Relative error that 95 % of steps stay below, as estimated by the calibration itself."""

    step_s: float
    """Median seconds of the repeated step."""

    spread: float
    """Interquartile range of the repeated step, divided by its median."""


COLUMNS: Columns = {
    "setting": lambda row: row.name,
    "fitted steps": lambda row: str(row.num_fitted),
    "unseen steps": lambda row: str(len(row.errors)),
    "median error": lambda row: f"{statistics.median(row.errors):.1%}",
    "95 %": lambda row: f"{np.quantile(row.errors, 0.95):.1%}",
    "stated": lambda row: "" if row.stated is None else f"{row.stated:.1%}",
    "repeated step, s": lambda row: f"{row.step_s:.3f}",
    "interquartile range": lambda row: f"{row.spread:.1%}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_names(parser, "--settings", CASES, CASES)
    add_number(parser, "--samples", 400, "samples of each kind")
    add_number(parser, "--unseen", 10, "predicted steps of each setting, which the fit does not use")
    add_number(parser, "--width", 256, "width of the model, a multiple of 128", metavar="W")
    add_number(parser, "--layers", 4, "layers of the model", metavar="L")
    add_number(parser, "--pack", 1024, "packing length", metavar="TOKENS")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall",
        help="clock to use; other programs affect processor time less, but waits are not counted (default: wall)",
    )  # fmt: skip
    add_number(parser, "--seed", 1, "seed that selects the packs to leave out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device that trains (default: cpu)")


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    with TemporaryDirectory() as name:
        settings = progress(options.settings, desc="measuring", unit=" settings")
        rows = [_measured(Path(name), setting, options) for setting in settings]
    if len(rows) > 1:
        together = tuple(error for row in rows for error in row.errors)
        steps, spread = statistics.median(row.step_s for row in rows), statistics.median(row.spread for row in rows)
        fitted = sum(row.num_fitted for row in rows)
        rows.append(
            ForecastRow(name="all", num_fitted=fitted, errors=together, stated=None, step_s=steps, spread=spread)
        )
    note = (
        f"Qwen2.5-VL of random weights, width {options.width}, {options.layers} layers; packs of {options.pack:,}; "
        f"{options.samples} samples of each kind; {options.device}; seed {options.seed}; "
        f"load {os.getloadavg()[0]:.1f}; {options.clock} time"
    )
    packages = ("torch", "transformers", "ms-swift")
    show(rows, COLUMNS, left={"setting"}, as_json=options.json, notes=[note], packages=packages)


def _measured(folder: Path, name: str, options: argparse.Namespace) -> ForecastRow:
    """Return the errors of one setting, whose ranks are processes of their own."""
    import benchmarks.training  # noqa: F401  # libraries that take seconds, for all processes
    from benchmarks.records import write_sized_model, write_training_data

    run_in_child(partial(write_sized_model, folder / "model", options.width, options.layers), limit_s=LIMIT_S)
    case = CASES[name]
    data = write_training_data(folder, case.kind, options.samples)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = _config(case, folder, data, options)
    with ExitStack() as stack, ThreadPoolExecutor(case.ranks) as pool:
        ranks = [
            stack.enter_context(Child(partial(_rank, config, case, rank, port, options))) for rank in range(case.ranks)
        ]
        found, *_ = pool.map(lambda child: child.next(LIMIT_S), ranks)
    return _row(name, found, options.unseen)


def _row(name: str, found: Mapping[str, Any], unseen: int) -> ForecastRow:
    """Return the errors of predictions; *found* has the steps of each round in training order."""
    rounds = [[None if one is None else MeasuredStep(**one) for one in steps] for steps in found["rounds"]]
    places = range(len(rounds[0]))
    fitted = [*range(found["fitted"]), *places[found["fitted"] + unseen + _REPEATED :]]
    calibration = Calibration(tuple(one for steps in rounds for place in fitted if (one := steps[place])))
    timing = calibration.fit_timing()
    errors = []
    for place in places[found["fitted"] : found["fitted"] + unseen]:
        repeats = [one for steps in rounds if (one := steps[place])]
        seconds = statistics.median(one.seconds for one in repeats)
        errors.append(abs(repeats[0].predict_seconds(timing.step_time) / seconds - 1))
    first = found["fitted"] + unseen
    repeated = [one.seconds for steps in rounds for one in steps[first : first + _REPEATED] if one]
    low, middle, high = statistics.quantiles(repeated, n=4)
    return ForecastRow(
        name=name, num_fitted=len(calibration.steps), errors=tuple(errors), stated=timing.step_error, step_s=middle,
        spread=(high - low) / middle,
    )  # fmt: skip


def _config(case: Case, folder: Path, data: Path, options: argparse.Namespace) -> RunConfig:
    return RunConfig(
        model=ModelConfig(model=str(folder / "model")),
        template=TemplateConfig(max_length=options.pack),
        custom=CustomConfig(train_jsonl=(str(data),)),
        training=TrainingConfig(
            output_dir=str(folder / f"{data.stem}-{case.ranks}-{case.tuner}-{case.checkpointing}"),
            packing_drop_last=False,
            effective_batch_size=4,
            tuner_type=case.tuner,  # type: ignore[arg-type]  # one of the names
            trainer={
                "use_cpu": options.device == "cpu",
                "gradient_checkpointing": case.checkpointing,
                "save_strategy": "no",
                "report_to": [],
                "dataloader_num_workers": 0,
                "disable_tqdm": True,
            },
        ),
    )


def _rank(config: RunConfig, case: Case, rank: int, port: int, options: argparse.Namespace) -> Iterator[Any]:
    """Measure on one rank, and yield the steps of each round."""
    import torch

    from packplan.app.opening.forecasts import config_to_time, time_packs
    from packplan.app.opening.ranks import join_ranks
    from packplan.app.sft.train import prepare

    if case.ranks > 1:
        local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
        os.environ |= {name: str(value) for name, value in local.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.ranks))
    config = config_to_time(config)
    with join_ranks(config) as group:
        trainer, splits = prepare(config, group)
        batches = trainer.schedule.gradient_accumulation_steps
        packs, fitted = _packs(splits["train"], batches, group.world_size, options)
        steps = time_packs(config, trainer, splits, group, packs, clock=CLOCKS[options.clock]).steps
        per_round = -(-len(packs) // (group.world_size * batches))
        # Steps that warm up are not counted.
        whole = [*[None] * (REPEATS * per_round - len(steps)), *(attrs.asdict(one) for one in steps)]
        rounds = iter(whole)
        yield {"fitted": fitted, "rounds": [list(islice(rounds, per_round)) for _ in range(REPEATS)]}


def _packs(
    train: PlannedSplit, batches: int, world_size: int, options: argparse.Namespace
) -> tuple[list[Sequence[int]], int]:
    """
    Return the packs of a round, and the number of steps at its start that are fitted. A last step
    with fewer packs is fitted, too.
    """
    raw = train.raw.packs
    each, shuffled = world_size * batches, np.random.default_rng(options.seed).permutation(len(raw))
    seen, left = np.sort(shuffled[::2]), shuffled[1::2]
    stats = train.stats_of(train.raw)
    images = stats.works.scaled(0, 0, 1) if stats.works is not None else None
    vision = stats.packs.sums(images.flops) if images is not None else stats.work
    chosen: list[Sequence[int]] = list(
        calibration_packs(
            raw.__class__.from_lists([raw[pack] for pack in seen.tolist()]), stats.work[seen], vision[seen],
            np.arange(len(seen)), world_size=world_size, batches=batches,
        )
    )  # fmt: skip
    fitted, short = divmod(len(chosen), each)
    unseen = [raw[pack] for pack in np.resize(left, options.unseen * each).tolist()]
    repeated = [raw[pack] for pack in left[:each].tolist()] * _REPEATED
    return [*chosen[: fitted * each], *unseen, *repeated, *chosen[fitted * each : fitted * each + short]], fitted
