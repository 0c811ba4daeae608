"""
Say how much memory a training step takes on each rank, and the longest template.max_length that
fits, without the hardware.

The run's own model, of its config.json alone, is traced on packs of its plan: nothing is computed.
Without a stored plan, the run is measured and planned as `packplan plan build` does.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import numpy as np
from rich.table import Table

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, world_size
from packplan.app.cli.console import plain_console
from packplan.app.planning.schedule import batch_of, require_static, zero_stage
from packplan.app.planning.split import Ranks, Split, plan_split
from packplan.app.wiring import stores
from packplan.app.wiring.commands import ranks_of, read_run, require_inputs, require_traceable
from packplan.app.wiring.forecasts import memory_key, open_peaks
from packplan.core.config import RunConfig
from packplan.core.errors import ConfigError, Fault, MismatchError, ModelError, counted
from packplan.core.memory import (
    KINDS,
    MARGIN,
    SHARDINGS,
    UNMEASURED,
    Longest,
    PeakMemory,
    RankParts,
    Sharding,
    candidate_packs,
    estimated_activations,
    longest_fitting,
    optimizer_bytes,
    other_length,
    parse_bytes,
    rank_parts,
    with_margin,
    written_bytes,
)
from packplan.core.samples import column

log = logging.getLogger(__name__)


@attrs.frozen
class PackMemory:
    """Peak of a step on one pack."""

    name: str
    tokens: int
    peak: PeakMemory


@attrs.frozen
class Fit:
    """Memory of a run's step on one rank."""

    world_size: int
    sharding: Sharding
    memory: int | None
    """Bytes of each rank's device; None if not said."""

    parts: RankParts
    """Bytes that a rank holds throughout, by sizes alone."""

    packs: tuple[PackMemory, ...] = ()

    is_traced: bool = True
    """Whether peaks are traced, and not estimated from sizes."""

    full: Mapping[int, int] = attrs.field(factory=dict)
    """Packing length -> peak of a full pack in bytes, of all that were traced."""

    longest: Longest | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits, with the margin; None if the memory is not said."""
        return None if self.memory is None else self.needed <= self.memory

    @property
    def needed(self) -> int:
        """Bytes that a step takes on a rank's device, with the margin."""
        return with_margin(max([one.peak.total for one in self.packs] or [self.parts.total]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--memory", type=amount, metavar="80GiB", help="memory of each rank's device")
    parser.add_argument("--world-size", type=world_size, metavar="N", help="ranks that train (default: 1)")
    parser.add_argument(
        "--sharding", choices=SHARDINGS, help="how ranks share the model (default: by training.fsdp and deepspeed)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.set_defaults(run=run)


def amount(text: str) -> int:
    """Read an amount of memory, for argparse."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> None:
    """Plan, trace, and print."""
    started = time.monotonic()
    config = read_run(options.config, options.overrides, world_size=options.world_size)
    require_static(config)
    if not config.training.packing:
        raise ConfigError.at("training.packing", "is false: what is forecast is the memory of packs")
    if (started_ranks := stores.require_ranks()) > 1:
        raise ConfigError("torchrun", (Fault("", f"starts {started_ranks} ranks: use --world-size instead"),))
    require_inputs(config)
    ranks = options.world_size or ranks_of(config) or 1
    sharding: Sharding = options.sharding or _sharding_of(config, ranks)
    found = forecast(config, memory=options.memory, ranks=ranks, sharding=sharding if ranks > 1 else "ddp")
    if options.json:
        document = attrs.asdict(found) | {"fits": found.fits, "margin": MARGIN, "seconds": time.monotonic() - started}
        for pack, one in zip(document["packs"], found.packs, strict=True):
            pack["total"] = one.peak.total
        print(json.dumps(document, indent=2))
    else:
        _print(found)
    if found.fits is False:
        raise MismatchError("too_large", told_excess(found))


def _sharding_of(config: RunConfig, ranks: int) -> Sharding:
    """Return how so many ranks of a run share its model, by its settings."""
    if ranks == 1:
        return "ddp"
    settings = config.training.trainer
    stages: Mapping[int, Sharding] = {2: "zero2", 3: "zero3"}
    return "fsdp2" if settings.get("fsdp") else stages.get(zero_stage(settings.get("deepspeed")), "ddp")


def forecast(config: RunConfig, *, memory: int | None, ranks: int, sharding: Sharding) -> Fit:
    """
    Return the memory of a run's step.

    Args:
        config: The run.
        memory: Bytes of each rank's device; None looks for no longest length.
        ranks: Number of ranks.
        sharding: How ranks share the model.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    with loading_libraries():
        from packplan.app.wiring import training
        from packplan.app.wiring.splits import open_splits

    require_traceable(config)
    traced = training.as_traced(config)
    model = training.open_outline(traced, training.decide_attention(traced, isolated=config.training.packing))
    parts = _parts(config, training.weights_of(model), training.weights_of(model, trained=True), sharding, ranks)
    found = Fit(ranks, sharding, memory, parts, notes=tuple(_notes(config, sharding)))
    if found.fits is False:
        log.warning("nothing is traced: what each rank holds throughout exceeds the memory at any packing length")
        return found
    train = open_splits(config)["train"]
    with training.joined_ranks(config) as group:
        plan_split(train, Ranks(group, timeout_s=config.training.packing_wait_timeout_s), world_size=ranks)
    sizes = model.config.to_dict()
    encoded = _packs_to_trace(train, _rough_activations(config, sizes))
    accumulates = batch_of(config, world_size=ranks).accumulation.gradient_accumulation_steps > 1
    search = partial(
        _search, encoded=encoded, of_length=training.of_length, length=config.packing_length, most=_positions(sizes)
    )
    try:
        with training.ranks_in_name(ranks) if sharding == "fsdp2" else nullcontext():
            tracer = training.open_step_tracer(
                traced, model, train.encoder, sharding=sharding, world_size=ranks,
                accumulates=accumulates, on_gpu=not config.training.trainer.get("use_cpu"),
            )  # fmt: skip
            fused = bool(config.training.trainer.get("use_liger_kernel"))
            traced_fit = search(found, peak_of=lambda samples: tracer.step(samples).peak(fused_loss=fused))
    except ModelError as error:
        if error.kind != "trace":
            raise
        note = f"{error.fact}: estimated from sizes, without experts; never compared with a measured peak"
        rough = attrs.evolve(found, is_traced=False, notes=(note, *found.notes))
        return search(rough, peak_of=_estimator(_rough_activations(config, sizes), parts))
    if sharding == _sharding_of(config, ranks):
        for peaks, of in (
            ({one.tokens: one.peak.total for one in traced_fit.packs}, {"plan": train.key.digest}),
            (traced_fit.full, {"data": train.data_digest}),
        ):
            key = memory_key(config, world_size=ranks, **of)
            open_peaks(config).save(key, {str(tokens): peak for tokens, peak in peaks.items()})
    return traced_fit


def _parts(
    config: RunConfig, whole: tuple[int, int, int], trained: tuple[int, int, int], sharding: Sharding, ranks: int
) -> RankParts:
    number, size, itemsize = trained
    name = str(config.training.trainer.get("optim", "adamw"))
    optimizer = optimizer_bytes(name, num_trained=number, itemsize=itemsize)
    return rank_parts(whole[1], size, optimizer, sharding=sharding, world_size=ranks, itemsize=itemsize)


def _notes(config: RunConfig, sharding: Sharding) -> list[str]:
    on_gpu = not config.training.trainer.get("use_cpu")
    others = ", and for CUDA and NCCL: an assumption, not measured on a GPU" if on_gpu else ": an assumption"
    notes = [f"{MARGIN:.0%} are added for rounding and fragmentation of blocks{others}"]
    if sharding in UNMEASURED:
        notes.append(f"{sharding} is computed from sizes, and was never compared with a measured peak")
    if config.training.trainer.get("use_liger_kernel"):
        notes.append("fused losses are computed by leaving logits out, and were never compared with a measured peak")
    if on_gpu:
        notes.append("buffers that a GPU's kernels take and free within one call are not counted")
    if config.model.quant_method is not None:
        notes.append("weights are traced unquantised: model.quant_method is not counted")
    return notes


def _rough_activations(config: RunConfig, sizes: Mapping[str, Any]) -> Callable[..., int]:
    """Return `estimated_activations` of a run's settings, for numbers of tokens and patches."""
    settings = config.training.trainer
    return partial(
        estimated_activations, sizes, itemsize=2 if settings.get("bf16") or settings.get("fp16") else 4,
        checkpointing=bool(settings.get("gradient_checkpointing", True)),
    )  # fmt: skip


def _packs_to_trace(train: Split, roughly: Callable[..., int]) -> dict[int, list[Any]]:
    """Return the packs that may need the most memory, by their index, as encoded samples."""
    table, packs = train.table, train.raw.packs
    names = ("length", "supervised", "patches", "video_patches")
    tokens, supervised, images, videos = (packs.sums(column(table, name).astype(np.int64)) for name in names)
    chosen = candidate_packs(
        tokens, supervised, images + videos, per_token=roughly(tokens=1, supervised=0, patches=0),
        per_supervised=roughly(tokens=0, supervised=1, patches=0),
        per_patch=roughly(tokens=0, supervised=0, patches=1),
    )  # fmt: skip
    return {pack: [train.encoder.fetch(index, table) for index in packs[pack]] for pack in chosen}


def _search(
    found: Fit,
    *,
    encoded: Mapping[int, list[Any]],
    peak_of: Callable[[list[Any]], PeakMemory],
    of_length: Callable[[list[Any], int], list[Any]],
    length: int,
    most: int,
) -> Fit:
    """Return a forecast with the heaviest pack, a full one, and the longest length that fits."""
    measured = [
        PackMemory(f"pack {pack}", sum(one["length"] for one in samples), peak_of(samples))
        for pack, samples in encoded.items()
    ]
    heaviest = max(measured, key=lambda one: one.peak.total)
    samples = encoded[int(heaviest.name.split()[1])]

    traced: dict[int, PeakMemory] = {}

    def full(tokens: int) -> int:
        if tokens not in traced:
            is_heaviest = tokens == heaviest.tokens
            traced[tokens] = heaviest.peak if is_heaviest else peak_of(of_length(samples, tokens))
        return traced[tokens].total

    longest = None
    if found.memory is None:
        full(other_length(length, most))
    else:
        longest = longest_fitting(full, start=length, limit=found.memory, most=most)
    full(length)
    packs = (heaviest, PackMemory("full pack", length, traced[length]))
    peaks = {tokens: peak.total for tokens, peak in sorted(traced.items())}
    return attrs.evolve(found, packs=packs, full=peaks, longest=longest)


def _positions(sizes: Mapping[str, Any]) -> int:
    """Return the most tokens that a model has positions for."""
    text = sizes.get("text_config")
    text = text if isinstance(text, Mapping) else sizes
    return int(text.get("max_position_embeddings") or _MOST_TOKENS)


_MOST_TOKENS = 131_072
"""Longest packing length that is looked at where a model says none."""


def _estimator(roughly: Callable[..., int], parts: RankParts) -> Callable[[list[Any]], PeakMemory]:
    """Return a function that estimates the peak of a pack from sizes alone."""

    def estimate(samples: list[Any]) -> PeakMemory:
        activations = roughly(
            tokens=sum(one["length"] for one in samples),
            supervised=sum(label != -100 for one in samples for label in one["labels"]),
            patches=sum(len(one.get(name, ())) for one in samples for name in ("pixel_values", "pixel_values_videos")),
        )
        return PeakMemory(parts.weights, parts.gradients, parts.optimizer, activations, parts.buckets)

    return estimate


def _print(found: Fit) -> None:
    console = plain_console()
    ranks = counted(found.world_size, "rank")
    console.print(
        f"memory of a training step on each rank ({ranks}{f', {found.sharding}' if found.world_size > 1 else ''})"
    )
    if found.packs:
        table = Table()
        for name in ("", "tokens", *KINDS, "peak", "with margin"):
            table.add_column(name, justify="right" if name else "left")
        for one in found.packs:
            kinds = (written_bytes(getattr(one.peak, kind)) for kind in KINDS)
            totals = written_bytes(one.peak.total), written_bytes(with_margin(one.peak.total))
            table.add_row(one.name, f"{one.tokens:,}", *kinds, *totals)
        console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
        console.print(table, soft_wrap=False)
    else:
        held = written_bytes(found.parts.total)
        console.print(f"weights, gradients and optimizer alone take {held} on each rank; no packing length fits")
    if found.memory is not None and found.fits:
        console.print(f"the plan fits into {written_bytes(found.memory)}")
    if found.longest is not None:
        _print_longest(found.longest, console.print)
    for note in found.notes:
        console.print(f"note: {note}")


def told_excess(found: Fit) -> str:
    """Return in words that a plan does not fit, and the length that would."""
    needed, memory = written_bytes(found.needed), written_bytes(found.memory or 0)
    need = f"a step of the plan takes up to {needed} on each rank, of {memory}"
    if found.longest is None or not found.longest.tokens:
        return f"{need}; no packing length fits"
    heaviest, full = found.packs
    if heaviest.tokens > full.tokens:
        return (
            f"{need}, by a sample of {heaviest.tokens:,} tokens that is longer than a pack; packs of up to "
            f"{found.longest.tokens:,} fit: training.packing_allow_single_long: false leaves longer samples out, and "
            "template.truncation_strategy truncates them"
        )
    return f"{need}; the longest template.max_length that fits is {found.longest.tokens:,}"


def _print_longest(longest: Longest, report: Callable[[str], None]) -> None:
    if not longest.tokens:
        report("no packing length fits: add ranks that share the model, checkpointing, or adapters")
        return
    end = ", at which the model's positions end" if longest.limited else ""
    report(
        f"longest template.max_length that fits: {longest.tokens:,}{end} (peak {written_bytes(longest.peak)}; a line "
        f"through two shorter packs was off by {longest.error:+.1%} there)"
    )
