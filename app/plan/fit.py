"""
Predict how much memory a training step needs on each rank, and the longest template.max_length that
fits, without the training hardware.

The command traces the run's model on packs of its plan. The trace reads no weights of the model,
and computes no values. If no plan is stored, the command measures and plans the run first, as
`packplan plan build` does.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from rich.table import Table

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, parse_ranks, plain_console
from packplan.app.opening.commands import read_run_or_command, require_traceable
from packplan.app.opening.runs import require_inputs
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.schedule import accumulation_of, refuse_stream, zero_stage
from packplan.app.planning.split import PlannedSplit
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, MismatchError, counted
from packplan.core.forecast import (
    MARGIN,
    MEMORY_KINDS,
    LongestFit,
    ModelSharding,
    PeakMemory,
    add_margin,
    bytes_text,
    longest_fit,
    parse_bytes,
    peak_candidates,
)
from packplan.core.samples.tables import column


@attrs.frozen
class PackMemory:
    """Peak memory of a training step on one pack."""

    name: str
    tokens: int
    peak: PeakMemory


@attrs.frozen
class MemoryFit:
    """Memory of a run's training step on one rank, and whether the device has enough."""

    world_size: int
    sharding: ModelSharding
    memory: int | None
    """Bytes of memory of each rank's device; None if not given."""

    packs: tuple[PackMemory, ...]
    """Heaviest pack of the plan, and a full pack with the same proportions."""

    longest: LongestFit | None
    """Longest packing length that fits; None if no memory is given."""

    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether `needed_bytes` fit into the given memory; None if no memory is given."""
        return None if self.memory is None else self.needed_bytes <= self.memory

    @property
    def needed_bytes(self) -> int:
        """Bytes that a step on the heaviest of `packs` needs on a rank, including the margin."""
        return add_margin(max(one.peak.total for one in self.packs))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--memory", type=parse_memory, metavar="80GiB", help="memory of each rank's device")
    parser.add_argument("--world-size", type=parse_ranks, metavar="N", help="number of ranks that train (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def parse_memory(text: str) -> int:
    """Parse an amount of memory such as `80GiB` into bytes, for argparse."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> None:
    """Plan the run, trace a training step, and print the memory of the step."""
    config = read_run_or_command(options.config, options.overrides, world_size=options.world_size)
    refuse_stream(config)
    if not config.training.packing:
        reason = "is false, but only the memory of packs can be predicted: set it to true"
        raise ConfigError.for_key("training.packing", reason)
    if config.training.row_ranks > 1:
        reason = "splits rows over ranks, but only the memory of whole rows can be predicted: set it to 1"
        raise ConfigError.for_key("training.sequence_parallel_size", reason)
    require_traceable(config)
    require_inputs(config)
    ranks = config.count_ranks(options.world_size) or 1
    accumulation_of(config, world_size=ranks)
    found = forecast_memory(config, memory=options.memory, ranks=ranks)
    if options.json:
        document = attrs.asdict(found) | {"fits": found.fits, "margin": MARGIN}
        for pack, one in zip(document["packs"], found.packs, strict=True):
            pack["total"] = one.peak.total
        print(json.dumps(document, indent=2))
    else:
        _print(found)
    if found.fits is False:
        raise MismatchError("too_large", excess_message(found))


def _sharding_of(config: RunConfig) -> ModelSharding:
    """Return the sharding of a run's model over its ranks; ConfigError under DeepSpeed ZeRO."""
    settings = config.training.trainer
    if stage := zero_stage(settings.get("deepspeed")):
        reason = f"is ZeRO of stage {stage}, whose memory cannot be traced: set training.fsdp instead"
        raise ConfigError.for_key("training.deepspeed", reason)
    return "fsdp2" if settings.get("fsdp") else "ddp"


def forecast_memory(config: RunConfig, *, memory: int | None, ranks: int) -> MemoryFit:
    """
    Plan a run if no plan is stored, and return the memory of its training step.

    Args:
        config: The run.
        memory: Bytes of memory of each rank's device; None skips the search for the longest packing
            length.
        ranks: Number of ranks.

    Raises:
        PackplanError: The run has a fault, or a stored file is damaged.
        ModelError: The model cannot be traced.
    """
    sharding: ModelSharding = "ddp" if ranks == 1 else _sharding_of(config)
    with loading_libraries():
        from packplan.app.opening.forecasts import config_to_trace, open_step_tracer
        from packplan.app.opening.ranks import join_ranks
        from packplan.app.opening.splits import open_splits
        from packplan.app.opening.verdicts import decide_attention

    attention = decide_attention(config_to_trace(config), isolated=True)
    opened, length = open_splits(config)["train"], config.packing_length
    with join_ranks(config) as group:
        waits = Ranks(group, timeout_s=config.training.packing_wait_timeout_s)
        train = measure_and_plan(opened, waits, world_size=ranks, is_forecast=True)
    encoded, ranks_of = _packs_to_trace(train), train.aligned.shared_by
    sizes = {pack: sum(one["length"] for one in samples) for pack, samples in encoded.items()}
    accumulates = accumulation_of(config, world_size=ranks).gradient_accumulation_steps > 1
    fused = bool(config.training.trainer.get("use_liger_kernel"))
    with open_step_tracer(
        config, train.encoder, attention=attention, sharding=sharding, world_size=ranks, accumulates=accumulates
    ) as tracer:
        if ranks_of is not None:  # a rank's share is traced
            sizes = {pack: -(-tokens // int(ranks_of[pack])) for pack, tokens in sizes.items()}
            encoded = {pack: tracer.pack_of_length(samples, sizes[pack]) for pack, samples in encoded.items()}
        peaks = {pack: tracer.trace_step(samples).peak(fused_loss=fused) for pack, samples in encoded.items()}
        pack = max(peaks, key=lambda one: peaks[one].total)
        heaviest = PackMemory(f"pack {pack}", sizes[pack], peaks[pack])
        full = {heaviest.tokens: heaviest.peak}

        def full_pack_peak(tokens: int) -> int:
            if tokens not in full:
                full[tokens] = tracer.trace_step(tracer.pack_of_length(encoded[pack], tokens)).peak(fused_loss=fused)
            return full[tokens].total

        longest = (
            None if memory is None else longest_fit(full_pack_peak, start=length, limit=memory, most=tracer.max_tokens)
        )
        full_pack_peak(length)
    return MemoryFit(
        ranks, sharding, memory, (heaviest, PackMemory("full pack", length, full[length])),
        longest, tuple(_assumptions(config)),
    )  # fmt: skip


def _assumptions(config: RunConfig) -> list[str]:
    """Return the assumptions behind the figures, one sentence for each."""
    on_gpu = not config.training.trainer.get("use_cpu")
    others = ", and for CUDA and NCCL (assumed, not measured on a GPU)" if on_gpu else " (assumed)"
    notes = [f"the margin adds {MARGIN:.0%} for rounding and fragmentation of blocks{others}"]
    if config.training.trainer.get("use_liger_kernel"):
        notes.append("fused losses are assumed to store no logits, which was never compared with a measured peak")
    if on_gpu:
        notes.append("buffers that GPU kernels allocate and free within one call are not counted")
    if config.training.shares_by_degree:
        notes.append("for a pack that ranks share, a rank's share is traced, without the embeddings of the whole row")
    if config.model.quant_method is not None:
        notes.append("weights count as not quantised: model.quant_method is ignored")
    return notes


def _packs_to_trace(train: PlannedSplit) -> dict[int, list[Any]]:
    """Return the encoded samples of the packs that may need the most memory, by pack index."""
    table, packs = train.table, train.raw.packs
    names = ("length", "supervised", "patches", "video_patches")
    tokens, supervised, images, videos = (packs.sums(column(table, name).astype(np.int64)) for name in names)
    if train.aligned.shared_by is not None:
        tokens, supervised = tokens // train.aligned.shared_by, supervised // train.aligned.shared_by
    chosen = peak_candidates(tokens, supervised, images + videos)
    return {pack: [train.encoder.encode_planned(index, table) for index in packs[pack]] for pack in chosen}


def _print(found: MemoryFit) -> None:
    console = plain_console()
    ranks = counted(found.world_size, "rank")
    console.print(
        f"memory of a training step on each rank ({ranks}{f', {found.sharding}' if found.world_size > 1 else ''})"
    )
    table = Table()
    for name in ("", "tokens", *MEMORY_KINDS, "peak", "with margin"):
        table.add_column(name, justify="right" if name else "left")
    for one in found.packs:
        kinds = (bytes_text(getattr(one.peak, kind)) for kind in MEMORY_KINDS)
        totals = bytes_text(one.peak.total), bytes_text(add_margin(one.peak.total))
        table.add_row(one.name, f"{one.tokens:,}", *kinds, *totals)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table, soft_wrap=False)
    if found.memory is not None and found.fits:
        console.print(f"the plan fits into {bytes_text(found.memory)}")
    if found.longest is not None:
        _print_longest(found.longest, console.print)
    for note in found.notes:
        console.print(f"note: {note}")


def excess_message(found: MemoryFit) -> str:
    """
    Return an error message with the memory that the plan needs, and the packing length that would
    fit.
    """
    needed, memory = bytes_text(found.needed_bytes), bytes_text(found.memory or 0)
    need = f"a step of the plan needs up to {needed} on each rank, which has {memory}"
    if found.longest is None or not found.longest.tokens:
        return f"{need}; no packing length fits"
    heaviest, full = found.packs
    if heaviest.tokens > full.tokens:
        return (
            f"{need}, since a sample of {heaviest.tokens:,} tokens is longer than a pack. Packs of up to "
            f"{counted(found.longest.tokens, 'token')} fit: training.packing_allow_single_long: false leaves longer "
            "samples out, and template.truncation_strategy truncates them"
        )
    return f"{need}; the longest template.max_length that fits is {found.longest.tokens:,}"


def _print_longest(longest: LongestFit, report: Callable[[str], None]) -> None:
    if not longest.tokens:
        report("no packing length fits: shard the model over more ranks, or use gradient checkpointing or adapters")
        return
    end = ", the last position of the model" if longest.limited else ""
    report(f"longest packing length that fits: {longest.tokens:,}{end} (peak {bytes_text(longest.peak)})")
