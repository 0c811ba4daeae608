"""
Train the same samples on packs, in padded batches, and in padded batches sorted by length.

Samples are text of real lengths, and images with text. A padded batch holds as many samples as a
pack does on average, so all ways take about the same number of optimizer steps. Each way trains in
a process of its own, one epoch in each round, and is compared with the others round by round.
Samples are encoded beforehand. Times are processor times, or on a GPU, wall-clock times.

"allowed" is the ratio of the operations of both ways, counted by `WorkModel`. This ratio would be
the speedup if only operations took time. Only wide models come near it: at a width of 64, most time
is spent in Python itself.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs

from benchmarks.child import Child, NotMeasuredError, run_in_child
from benchmarks.options import add_names, add_number
from benchmarks.table import Columns, show
from benchmarks.work import position_flops
from packplan.adapters.progress import progress
from packplan.app.cli.command import parse_positive
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.work.model import WorkModel

LIMIT_S = 3600.0
"""Seconds of a preparation or an epoch after which a process is ended."""

PADDED, SORTED = "padded", "padded-sorted"
"""Ways with which the others are compared."""

KINDS = ("text", "images")

DEFAULT_WAYS = ("packed", PADDED, SORTED)

WIDTH_STEP = 128
"""Divisor of every width: the vision tower has half of the width, in heads of 64 dimensions."""

ComputedBatch = Sequence[Sequence[int]]
"""Forward pass as rows, each of which lists the tokens of its samples."""


@attrs.frozen
class Way:
    """How samples become forward passes."""

    rows: Literal["packs", "padded", "sorted", "alone"]
    """
    Content of a forward pass: a pack, a padded batch of random samples, a padded batch of samples
    with similar lengths, or one sample.
    """

    attn_impl: str
    whole_rows: bool
    """Whether attention compares all positions of a row, because it takes a dense mask."""

    def positions_and_pairs(self, batch: ComputedBatch) -> tuple[int, float]:
        """
        Return the positions of a forward pass, and the pairs of positions that attention compares.

        >>> WAYS["padded"].positions_and_pairs([[2], [3]])
        (6, 18)
        >>> WAYS["packed"].positions_and_pairs([[2, 3]])
        (5, 9.0)
        """
        width = max(sum(row) for row in batch)
        positions = len(batch) * width
        if self.whole_rows:
            return positions, positions * width
        return positions, sum(tokens * (tokens + 1) / 2 for row in batch for tokens in row)


WAYS: Mapping[str, Way] = {
    "packed": Way("packs", "auto", whole_rows=False),
    "packed-dense": Way("packs", "sdpa", whole_rows=True),
    "packed-flex": Way("packs", "flex_attention", whole_rows=False),
    "packed-flash": Way("packs", "flash_attention_2", whole_rows=False),
    PADDED: Way("padded", "auto", whole_rows=True),
    SORTED: Way("sorted", "auto", whole_rows=True),
    "alone": Way("alone", "auto", whole_rows=False),
}
"""Name -> way."""


@attrs.frozen
class Setting:
    """Options that all cases share."""

    device: str
    width: int
    layers: int
    num_samples: int
    rounds: int


@attrs.frozen
class Ratio:
    """Speed of one way divided by the speed of another in the same rounds."""

    median: float
    low: float
    high: float
    allowed: float
    """Operations of the other way, divided by those of the first way."""

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@attrs.frozen(kw_only=True)
class TrainRow:
    """One kind of samples at one packing length, trained in one way."""

    kind: str
    budget: int
    """Packing length in tokens."""

    way: str
    attention: str
    batch_size: int
    num_steps: int
    padding_share: float
    """Share of padding among the positions of all forward passes."""

    flops: float
    """Forward operations of an epoch."""

    seconds: tuple[float, ...]
    """Processor seconds of a sample (on a GPU, wall-clock seconds), one value for each round."""

    tokens_per_sample: float
    peak_bytes: int
    """Memory beyond the loaded model and the encoded samples; on a GPU, all memory."""

    over_padded: Ratio | None = None
    over_sorted: Ratio | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of samples trained in a second; the median over rounds."""
        return self.tokens_per_sample / statistics.median(self.seconds)


def over(row: TrainRow, other: TrainRow) -> Ratio:
    """Return how many times as fast *row* is as *other*, round by round."""
    ratios = [theirs / mine for mine, theirs in zip(row.seconds, other.seconds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), other.flops / row.flops)


def compared(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Return the rows of one kind and packing length, each compared with the padded ways."""
    ways = {row.way: row for row in rows}
    return [
        attrs.evolve(
            row,
            over_padded=over(row, ways[PADDED]) if PADDED in ways and row.way != PADDED else None,
            over_sorted=over(row, ways[SORTED]) if SORTED in ways and row.way != SORTED else None,
        )
        for row in rows
    ]


def operations(way: Way, batches: Sequence[ComputedBatch], work: WorkModel, images: float) -> tuple[float, float]:
    """
    Return the forward operations of an epoch, and the share of padding in its positions.

    Args:
        way: Way in which the batches were made.
        batches: Forward passes of the epoch.
        work: Forward operations of the model.
        images: Forward operations of all images in the vision tower.
    """
    counts = [way.positions_and_pairs(batch) for batch in batches]
    positions, pairs = (sum(column) for column in zip(*counts, strict=True))
    useful = sum(tokens for batch in batches for row in batch for tokens in row)
    return float(position_flops(work, positions, pairs)) + images, 1 - useful / positions


COLUMNS: Columns = {
    "samples": lambda row: row.kind,
    "pack": lambda row: f"{row.budget:,}",
    "way": lambda row: row.way,
    "attention": lambda row: row.attention,
    "batch": lambda row: str(row.batch_size),
    "steps": lambda row: str(row.num_steps),
    "padding": lambda row: f"{row.padding_share:.1%}",
    "s/sample": lambda row: f"{statistics.median(row.seconds):.4f}",
    "tokens/s": lambda row: f"{row.tokens_per_s:,.0f}",
    "over padded": lambda row: "" if row.over_padded is None else str(row.over_padded),
    "allowed over padded": lambda row: "" if row.over_padded is None else f"{row.over_padded.allowed:.2f}",
    "over sorted": lambda row: "" if row.over_sorted is None else str(row.over_sorted),
    "allowed over sorted": lambda row: "" if row.over_sorted is None else f"{row.over_sorted.allowed:.2f}",
    "peak MB": lambda row: f"{row.peak_bytes / 1e6:,.0f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_number(parser, "--packs", [2048], "packing lengths", metavar="TOKENS")
    add_names(parser, "--kinds", KINDS, KINDS)
    add_names(
        parser, "--ways", WAYS, DEFAULT_WAYS,
        "; packed-flex and packed-flash need a GPU, where each way holds a model and an optimizer of its own",
    )  # fmt: skip
    add_number(parser, "--samples", 120, "samples of each kind")
    add_number(parser, "--rounds", 5, "rounds that count", metavar="R")
    parser.add_argument("--width", type=model_width, default=512, metavar="W", help="width of the model (default: 512)")
    add_number(parser, "--layers", 4, "layers of the model", metavar="L")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device that trains (default: cpu)")


def model_width(text: str) -> int:
    """Read the width of a model, for argparse."""
    width = parse_positive(text)
    if width % WIDTH_STEP:
        message = f"is {width}, but has to be a multiple of {WIDTH_STEP}"
        raise argparse.ArgumentTypeError(message)
    return width


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    setting = Setting(options.device, options.width, options.layers, options.samples, options.rounds)
    rows = measure_training(setting, kinds=options.kinds, budgets=options.packs, ways=options.ways)
    notes = [sentence for row in rows if row.way == "packed" for sentence in _sentences(row)]
    notes.append(
        f"Qwen2.5-VL of random weights, width {options.width}, {options.layers} layers; {options.device}; "
        f"{options.samples} samples of each kind; {options.rounds} rounds"
    )
    left, packages = {"samples", "way", "attention"}, ("torch", "transformers", "ms-swift")
    show(rows, COLUMNS, left=left, as_json=options.json, notes=notes, packages=packages)


def measure_training(
    setting: Setting, *, kinds: Sequence[str], budgets: Sequence[int], ways: Sequence[str]
) -> list[TrainRow]:
    """
    Train each kind of samples at each packing length in each way, the ways in turn.

    Args:
        setting: Options that all cases share.
        kinds: `text`, `images` or both.
        budgets: Packing lengths in tokens.
        ways: Names in `WAYS`.

    Raises:
        NotMeasuredError: A process failed, or there is no such device.
    """
    if setting.device == "cpu":
        import benchmarks.training  # noqa: F401  # libraries that take seconds, for all processes
    elif not run_in_child(_sees_gpu, limit_s=LIMIT_S):
        raise NotMeasuredError("--device cuda: torch sees no GPU on this machine")
    rows: list[TrainRow] = []
    epochs = len(kinds) * len(budgets) * len(ways) * (setting.rounds + 1)
    with TemporaryDirectory() as name, progress(total=epochs, desc="training", leave=False) as bar:
        folder = Path(name)
        run_in_child(partial(_write, folder, setting, kinds), limit_s=LIMIT_S)
        for kind, budget in product(kinds, budgets):
            config = _config(setting, folder, folder / f"{kind}.jsonl", budget)
            size = run_in_child(partial(_samples_of_a_pack, config), limit_s=LIMIT_S)
            epochs_of = {way: partial(_epochs, config, WAYS[way], size, setting.device) for way in ways}
            found = _in_turn(epochs_of, setting, bar.update)
            rows += compared([TrainRow(kind=kind, budget=budget, way=way, **one) for way, one in found.items()])
    return rows


def _in_turn(
    epochs_of: Mapping[str, Callable[[], Iterator[dict[str, Any]]]], setting: Setting, on_epoch: Callable[[], object]
) -> dict[str, dict[str, Any]]:
    rounds: list[dict[str, dict[str, Any]]] = []
    with ExitStack() as stack:
        children = {way: stack.enter_context(Child(epochs)) for way, epochs in epochs_of.items()}
        facts = {way: child.next(LIMIT_S) for way, child in children.items()}
        for _ in range(setting.rounds + 1):
            rounds.append({})
            for way, child in children.items():
                rounds[-1][way] = child.next(LIMIT_S)
                on_epoch()
    # The first round warms up; its memory counts, since it makes the optimizer's.
    return {
        way: {
            **facts[way],
            "seconds": tuple(one[way]["seconds"] / setting.num_samples for one in rounds[1:]),
            "peak_bytes": max(one[way]["peak_bytes"] for one in rounds),
        }
        for way in children
    }


def _config(setting: Setting, folder: Path, data: Path, budget: int) -> RunConfig:
    on_gpu = setting.device == "cuda"
    return RunConfig(
        model=ModelConfig(model=str(folder / "model"), torch_dtype="bfloat16" if on_gpu else None),
        template=TemplateConfig(max_length=budget),
        custom=CustomConfig(train_jsonl=(str(data),)),
        training=TrainingConfig(
            output_dir=str(folder / f"{data.stem}-{budget}"),
            packing_drop_last=False,
            effective_batch_size=1,
            num_train_epochs=1,
            trainer={
                "use_cpu": not on_gpu,
                "gradient_checkpointing": False,
                "save_strategy": "no",
                "report_to": [],
                "dataloader_num_workers": 0,
                "disable_tqdm": True,
                "logging_steps": 1000,
            },
        ),
    )


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _write(folder: Path, setting: Setting, kinds: Sequence[str]) -> None:
    from benchmarks.records import write_sized_model, write_training_data

    write_sized_model(folder / "model", setting.width, setting.layers)
    for kind in kinds:
        write_training_data(folder, kind, setting.num_samples)


def _samples_of_a_pack(config: RunConfig) -> int:
    from benchmarks.training import samples_of_a_pack

    return samples_of_a_pack(config)


def _epochs(config: RunConfig, way: Way, size: int, device: str) -> Iterator[dict[str, Any]]:
    from benchmarks.training import epochs

    yield from epochs(config, way, size, device)


def _sentences(row: TrainRow) -> list[str]:
    others = {"padding": row.over_padded, "sorted padding": row.over_sorted}
    return [
        f"{row.kind}, packs of {row.budget:,}: packing is {one.median:.2f} times as fast as {name}, where operations "
        f"allow {one.allowed:.2f} ({one.median / one.allowed:.2f} of it)"
        for name, one in others.items()
        if one is not None
    ]
