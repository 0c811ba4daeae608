"""
Measure the peak memory and the processor time of ranks that share a row of packed samples.

Each number of ranks trains a step of the same Qwen2 on the same row, forward and backward. Every
rank is a process on this machine. The peak counts the tensors of a step, without the weights.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs

from benchmarks.options import add_number
from benchmarks.table import show
from packplan.adapters.processes import end_with_parent


@attrs.frozen
class RowsResult:
    """Memory and time of a step on a number of ranks that share a row."""

    ranks: int

    peak: int
    """Peak bytes of a step without the weights, on the rank with the largest peak."""

    seconds: float
    """Processor seconds of a step, on the slowest rank."""

    loss: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_number(parser, "--ranks", [1, 2, 4], "ranks that share the row")
    add_number(parser, "--tokens", 4096, "tokens of the row, which has eight samples")
    add_number(parser, "--width", 256, "width of the model")
    add_number(parser, "--vocabulary", 8192, "size of the vocabulary")


def run(options: argparse.Namespace) -> None:
    """Measure with each number of ranks, and print a table."""
    rows = [measure(ranks, options) for ranks in options.ranks]
    first = rows[0]
    columns = {
        "ranks": lambda one: str(one.ranks),
        "peak (MB)": lambda one: f"{one.peak / 1e6:,.0f}",
        "of the first": lambda one: f"{one.peak / first.peak:.2f}",
        "processor (s)": lambda one: f"{one.seconds:.2f}",
        "loss": lambda one: f"{one.loss:.6f}",
    }
    show(rows, columns, left=(), as_json=options.json, packages=("torch", "transformers"))


def measure(ranks: int, options: argparse.Namespace) -> RowsResult:
    """Return the memory and time of a step on *ranks* ranks."""
    return RowsResult(ranks, *(max(values) for values in zip(*run_ranks(ranks, _measure_rank, options), strict=True)))


def run_ranks(ranks: int, function: Callable[..., Any], options: argparse.Namespace) -> list[Any]:
    """
    Call a function on each rank of a gloo group, in a process of its own; return the results.

    Args:
        ranks: Number of ranks.
        function: Function at the top level of a module; its only argument is *options*.
        options: Options of the benchmark.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    started = [
        context.Process(target=_be_rank, args=(rank, ranks, store.port, function, options, told), daemon=True)
        for rank in range(ranks)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join()
    return [told.get() for one in started if not one.exitcode]


def _be_rank(  # noqa: PLR0917  # of a process
    rank: int, ranks: int, port: int, function: Callable[..., Any], options: argparse.Namespace, told: Any
) -> None:
    """Join the group, call the function, and send its result to the parent process."""
    import torch
    import torch.distributed as dist

    end_with_parent()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    told.put(function(options))
    dist.barrier()


def build_qwen2(tokens: int, options: argparse.Namespace) -> Any:
    """Return a Qwen2 for rows of *tokens*, with attention that can share rows over ranks."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from packplan.adapters.attention import set_attention
    from packplan.adapters.attention.shared_rows import attention_for_shared_rows
    from packplan.core.equality import VARLEN, AttentionChoice

    torch.manual_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "vocab_size": options.vocabulary}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, max_position_embeddings=tokens)).train()
    set_attention(model, attention_for_shared_rows(AttentionChoice(VARLEN)))
    return model


def _measure_rank(options: argparse.Namespace) -> tuple[int, float, float]:
    """Train three steps; return the second step's peak bytes, and the third's seconds and loss."""
    import torch
    import torch.distributed as dist

    from benchmarks.memory import allocator_peak
    from packplan.adapters.attention.shared_rows import RowGroups, share_rows

    model, ranks = build_qwen2(options.tokens, options), dist.get_world_size()
    if (groups := RowGroups.make([ranks], timedelta(minutes=10))) is not None:
        share_rows(model, groups)
    positions = torch.arange(options.tokens)[None] % -(-options.tokens // 8)
    ids = torch.randint(0, options.vocabulary, positions.shape)
    batch = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    losses, weights = [], (*model.parameters(), *model.buffers())

    def step() -> None:
        for weight in model.parameters():
            weight.grad = None
        loss = model(**batch, labels=ids.masked_fill(positions == 0, -100)).loss
        loss.backward()
        losses.append(float(loss))

    step()
    for weight in model.parameters():
        weight.grad = None
    held = sum(one.untyped_storage().nbytes() for one in weights)
    peak = allocator_peak(weights, step) - held
    started = time.process_time()
    step()
    return peak, time.process_time() - started, losses[-1]
