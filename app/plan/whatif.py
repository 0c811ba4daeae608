"""
Plan the stored lengths again with other packing lengths and on other numbers of ranks.

Where a calibration fits (packplan plan time --calibrate), times are predicted, and for each number
of ranks the best is marked: the least time per planned token.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from rich.table import Table

from packplan.adapters.progress import progress
from packplan.app.cli.command import add_config_arguments, positive_numbers, world_sizes
from packplan.app.cli.console import plain_console
from packplan.app.cli.forecasts import add_price, cost, duration, time_document
from packplan.app.plan.stored import measured_recipe, splits_of
from packplan.app.planning.schedule import split_schedule
from packplan.app.planning.split import alignment, plan_samples, samples_of
from packplan.app.planning.stored_lengths import open_lengths, stale_inputs
from packplan.app.wiring import stores
from packplan.app.wiring.commands import ranks_of, read_run
from packplan.app.wiring.forecasts import attention_name, find_full_peaks, find_timing, run_forecast
from packplan.app.wiring.works import policy_of, work_of
from packplan.core.align import align_plan
from packplan.core.config import RunConfig, with_remedy
from packplan.core.epochs import EpochRecipe
from packplan.core.errors import ConfigError, counted
from packplan.core.forecast import RunForecast, Timing
from packplan.core.inspection import Alternative, PlanSummary, ScheduleSummary, best_of, what_if
from packplan.core.memory import MARGIN, peak_of_full, with_margin, written_bytes
from packplan.core.plan import RawPlan, refuse_dropped, refuse_longer
from packplan.core.ports import StoredLengths
from packplan.core.schedule import EpochSchedule, PackStats

RULE = "predicted hours per planned token"

COLUMNS: Mapping[str, Callable[[PlanSummary, ScheduleSummary], str]] = MappingProxyType(
    {
        "packs": lambda plan, _: f"{plan.num_packs:,}",
        "fill": lambda plan, _: f"{plan.fill_mean:.4f}",
        "long": lambda plan, _: f"{plan.long_samples + plan.skipped_samples:,}",
        "longest": lambda plan, _: f"{plan.longest_pack:,}",
        "over 110 %": lambda plan, _: f"{plan.oversized_packs:,}",
        "dropped tokens": lambda plan, _: f"{plan.dropped_tokens + plan.skipped_tokens:,}",
        "steps": lambda _, schedule: f"{schedule.total_steps:,}",
        "work a step": lambda _, schedule: f"{schedule.work_per_step:.3g}",
        "imbalance": lambda _, schedule: f"{schedule.work_imbalance:.3f}",
    }
)
"""Column of the table -> text of a planned alternative."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "eval"], default="train", help="(default: %(default)s)")
    parser.add_argument(
        "--max-length", type=positive_numbers, metavar="N,N", help="template.max_length (default: the run's)"
    )
    parser.add_argument(
        "--world-size", type=world_sizes, metavar="N,N", help="ranks (default: 1, or those of a command)"
    )
    add_price(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Plan every combination, then print."""
    config = read_run(options.config, options.overrides, world_size=(options.world_size or [None])[0])
    (split,) = splits_of(config, options.split)
    if not policy_of(config, split).packing:
        raise ConfigError.at(
            "training.packing", f"is false for {split}: nothing is packed, so there is nothing to vary"
        )
    kept = stores.open_stores(config, split)
    lengths = open_lengths(kept.lengths)
    recipe = measured_recipe(config, split, lengths, where=kept.plans.where)
    if recipe is not None:
        print(f"{split}: figures and steps are as if all epochs had the plan of the first", file=sys.stderr)
    for line in stale_inputs(config, lengths):
        print(f"warning: {split}: {line}", file=sys.stderr)
    ranks = options.world_size or [ranks_of(config) or 1]
    packing_lengths = options.max_length or [config.packing_length]
    _refuse_other_cuts(lengths, packing_lengths)
    attention = attention_name(config)
    timings: dict[int, Timing | None] = {}
    for number in ranks:
        timings[number], unused = find_timing(config, world_size=number, attention=attention)
        if unused:
            print(f"warning: a stored calibration is not used: {unused}", file=sys.stderr)
    alternatives = list(
        progress(
            _alternatives(config, split, lengths, packing_lengths, timings, recipe=recipe),
            total=len(packing_lengths) * len(ranks), desc="planning", unit=" combinations",
        )
    )  # fmt: skip
    best = best_of(alternatives)
    if options.json:
        rows = [_document(one, best, options.price) for one in alternatives]
        print(json.dumps({"split": split, "rule": RULE, "alternatives": rows}, indent=2))
    else:
        _print(alternatives, best, options.price)


def _refuse_other_cuts(lengths: StoredLengths, packing_lengths: list[int]) -> None:
    """Refuse packing lengths that samples were not truncated to: their lengths would differ."""
    cut_to = lengths.origin.key.inputs.get("packing_length")
    if cut_to is not None and packing_lengths != [cut_to]:
        reason = (
            f"truncates samples to the packing length, so the stored lengths are of {cut_to:,} alone: build a run with "
            "another template.max_length in a training.output_dir of its own, or remove the strategy"
        )
        raise ConfigError.at("template.truncation_strategy", reason)


def _alternatives(
    config: RunConfig,
    split: str,
    stored: StoredLengths,
    packing_lengths: list[int],
    timings: Mapping[int, Timing | None],
    *,
    recipe: EpochRecipe | None,
) -> Iterator[Alternative]:
    lengths, filled = stored.tokens, alignment(config, split)
    flops, world_sizes = work_of(config, stored.rows.table).samples, list(timings)

    def plan(packing_length: int) -> RawPlan:
        other = attrs.evolve(config, template=attrs.evolve(config.template, max_length=packing_length))
        policy = policy_of(other, split)
        refuse_longer(lengths, policy)
        name, table = f"packs of {packing_length:,}", stored.rows.table
        raw = plan_samples(
            name, policy, samples_of(policy, table, stored.origin.files), recipe=recipe, quick_bound=True
        )
        refuse_dropped(raw, lengths, policy)
        return raw

    peaks = {
        ranks: find_full_peaks(config, world_size=ranks, data_digest=stored.origin.data_digest)
        if split == "train" else {} for ranks in world_sizes
    }  # fmt: skip

    def schedule(raw: RawPlan, world_size: int) -> EpochSchedule:
        aligned = align_plan(raw, world_size=world_size, **filled)
        return split_schedule(config, split, aligned, raw.packs.sums(flops.flops))

    def forecast(raw: RawPlan, trained: EpochSchedule) -> RunForecast | None:
        stats, timing = PackStats.from_plan(raw, lengths, works=flops), timings[trained.world_size]
        return None if timing is None else run_forecast(config, timing, stats, trained, flops)

    return what_if(
        lengths, packing_lengths=packing_lengths, world_sizes=world_sizes, plan=plan, schedule=schedule,
        forecast=forecast, peak=lambda tokens, ranks: peak_of_full(peaks[ranks], tokens), works=flops,
        explain=with_remedy,
    )  # fmt: skip


def _document(one: Alternative, best: dict[int, Alternative], price: float | None) -> dict[str, Any]:
    """Return an alternative for programs."""
    forecast = one.forecast
    return {
        **attrs.asdict(one, filter=lambda field, _: field.name != "forecast"),
        "time": None if forecast is None else time_document(forecast, world_size=one.world_size, price=price),
        "best": best.get(one.world_size) is one,
    }


def _print(alternatives: list[Alternative], best: dict[int, Alternative], price: float | None) -> None:
    table = Table()
    times = (*(("time", "tokens/s", *(["cost"] if price else [])) if best else ()), "memory")
    for name in ("max_length", "ranks", *COLUMNS, *times, ""):
        table.add_column(name, justify="right" if name else "left")
    for one in alternatives:
        cells = ["-"] * (len(COLUMNS) + len(times))
        if one.plan is not None and one.schedule is not None:
            cells[: len(COLUMNS)] = [text(one.plan, one.schedule) for text in COLUMNS.values()]
        if one.forecast is not None:
            spent = cost(one.forecast, world_size=one.world_size, price=price)
            told = duration(one.forecast.seconds), f"{one.forecast.tokens_per_second:,.0f}"
            cells[len(COLUMNS) : -1] = [*told, *([] if spent is None else [f"{spent:,.2f}"])]
        if one.peak is not None:
            cells[-1] = written_bytes(with_margin(one.peak))
        mark = "best" if best.get(one.world_size) is one else ""
        table.add_row(f"{one.packing_length:,}", f"{one.world_size:,}", *cells, mark)
    console = plain_console()
    # A terminal that is too narrow wraps the lines, but all digits are there.
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table, soft_wrap=False)
    for line in _notes(alternatives, best):
        console.print(line)


def _notes(alternatives: list[Alternative], best: dict[int, Alternative]) -> Iterator[str]:
    """Yield what the table's columns mean, and what was not planned."""
    if best:
        yield f"best, for each number of ranks: the least {RULE}"
    else:
        yield "time, and which is best: packplan plan time --calibrate measures it"
    for ranks, one in best.items():
        if one.forecast is not None:
            yield f"time on {counted(ranks, 'rank')}: {one.forecast.timing.basis}"
    if any(one.peak for one in alternatives):
        yield f"memory: of each rank, for full packs, with a margin of {MARGIN:.0%}; by packplan plan fit"
    if any(one.plan and one.peak is None for one in alternatives):
        yield "memory: packplan plan fit --world-size N says it for N ranks, and keeps it"
    if any(one.plan and one.plan.oversized_packs for one in alternatives):
        yield (
            "over 110 %: packs that exceed max_length by more than 10 %, each a long sample; "
            "training.packing_allow_single_long: false skips long samples"
        )
    for one in alternatives:
        if one.problem:
            where = f"max_length {one.packing_length:,}, {counted(one.world_size, 'rank')}"
            yield f"not planned: {where}: {one.problem}"
