"""
Two real ranks on packs of unequal images: whether the seconds of a step fall as its work does.

Each rank is a process of one thread that holds the same small model of Qwen2.5-VL's kind, with
random weights and our attention by sample. The same steps are computed twice in turn, once with
packs as they come and once assigned by work; ranks meet at the end of a step, where gradients are
summed. Work is what `core.work` counts by the model's own configuration.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.adapters.lifeline import end_with_parent
from packplan.core.errors import PackplanError
from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.shuffling import shuffled
from packplan.core.work import WorkModel, assign_steps, in_units

RANKS, PACKS_OF_A_RANK, PACKING_LENGTH = 2, 4, 384

LIMIT_S = 540.0
"""Seconds that the ranks have."""

_IMAGE, _VISION_START = 3, 4

SIZES: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters":
            {"rope_type": "default", "type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0},
    },
    "vision_config": {
        "depth": 6, "hidden_size": 192, "num_heads": 4, "intermediate_size": 576, "out_hidden_size": 256,
        "patch_size": 14, "fullatt_block_indexes": [2, 5], "window_size": 112,
    },
    "image_token_id": _IMAGE,
    "vision_start_token_id": _VISION_START,
}  # fmt: skip
"""An image's token costs about four times a text's."""


@attrs.frozen
class Task:
    """What every rank computes."""

    num_steps: int
    """Steps of a round."""

    num_rounds: int
    """How often, after a round that warms up."""

    seed: int
    """Seed that the samples are drawn with."""


@attrs.frozen
class Step:
    """Seconds of one step, computed in both orders."""

    as_they_come_s: float
    by_work_s: float
    as_they_come_cpu_s: float
    by_work_cpu_s: float
    """Processor time of the busier rank until it meets the other."""

    predicted: float
    """The busier rank's work as packs come, over that by work, of all steps together."""


@attrs.frozen
class Ratio:
    """How many times as long steps take as packs come, over the same assigned by work."""

    quickest: float
    """
    By the least that each step took in any round: what else the machine does only adds to it.
    """

    median: float
    """By all steps of a round together, the median over rounds."""

    least: float
    most: float
    """Over rounds."""


@attrs.frozen
class Fall:
    """What is predicted, and what rounds of the same steps took."""

    predicted: float
    """By the work of the busier rank, all steps together."""

    seconds: Ratio

    cpu: Ratio
    """The same of the busier rank's processor time, which other processes disturb less."""


def falls(rounds: Sequence[Sequence[Step]]) -> Fall:
    """
    Put together what the rounds say, at least one.

    >>> fall = falls([[Step(3.0, 2.0, 3.0, 2.0, 1.5)], [Step(2.8, 2.0, 3.0, 2.0, 1.5)]])
    >>> fall.seconds.quickest, fall.seconds.median, fall.cpu.most
    (1.4, 1.45, 1.5)
    """
    plain, by_work, plain_cpu, by_work_cpu = (
        np.array([[getattr(step, name) for step in steps] for steps in rounds])
        for name in ("as_they_come_s", "by_work_s", "as_they_come_cpu_s", "by_work_cpu_s")
    )
    return Fall(rounds[0][0].predicted, _ratio(plain, by_work), _ratio(plain_cpu, by_work_cpu))


def _ratio(plain: NDArray[np.float64], by_work: NDArray[np.float64]) -> Ratio:
    """Compare times of shape (rounds, steps)."""
    of_rounds = plain.sum(axis=1) / by_work.sum(axis=1)
    return Ratio(
        quickest=float(plain.min(axis=0).sum() / by_work.min(axis=0).sum()),
        median=float(np.median(of_rounds)), least=float(of_rounds.min()), most=float(of_rounds.max()),
    )  # fmt: skip


@attrs.frozen(eq=False)
class Mix:
    """Packed samples of text and images, and what they cost."""

    lengths: IntArray
    grids: list[list[tuple[int, int, int]]]
    packs: list[list[int]]
    works: IntArray
    """Work of each pack, in whole units."""


def drawn_mix(num_steps: int, *, seed: int) -> Mix:
    """
    Draw samples with no image, one, or two, and pack them by best fit.

    Args:
        num_steps: That the packs are enough for.

        seed: Of what is drawn, from 0.
    """
    rng = np.random.default_rng(seed)
    num = 8 * num_steps * RANKS * PACKS_OF_A_RANK
    text = np.clip(rng.lognormal(4.0, 0.8, num), 8, PACKING_LENGTH - 1).astype(np.int64)
    sides = (8, 16, 24, 32)
    grids = [
        [(1, sides[int(row)], sides[int(column)]) for row, column in rng.integers(0, len(sides), (int(images), 2))]
        for images in rng.choice([0, 0, 0, 1], num)
    ]
    shown = [sum(1 + rows * columns // 4 for _, rows, columns in sample) for sample in grids]
    lengths = text + np.array(shown)
    keep = np.flatnonzero(lengths < PACKING_LENGTH)
    lengths, grids = lengths[keep], [grids[index] for index in keep.tolist()]
    packs = pack(lengths, capacity=PACKING_LENGTH, algorithm="best_fit_decreasing")
    works = in_units(packs.sums(np.rint(WorkModel.from_config(SIZES).trained().of(lengths, grids))))
    chosen = shuffled(len(packs), seed=seed)[: num_steps * RANKS * PACKS_OF_A_RANK]
    return Mix(lengths, grids, packs.take(chosen).tolist(), works[chosen])


def measured_rounds(task: Task) -> list[list[Step]]:
    """
    Compute the same steps on two ranks, again and again, in both orders each time; PackplanError if
    a rank fails or takes too long.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=run_rank, args=(rank, folder, task, results), daemon=True) for rank in range(RANKS)
        ]
        for one in ranks:
            one.start()
        ended = time.monotonic() + LIMIT_S
        for one in ranks:
            one.join(max(0.0, ended - time.monotonic()))
        failed = [one for one in ranks if one.exitcode != 0]
        for one in failed:
            one.kill()
        if failed:
            message = f"{len(failed)} of {RANKS} ranks failed, or took more than {LIMIT_S:.0f} s"
            raise PackplanError(message)
        taken = dict(results.get() for _ in ranks)
    mix = drawn_mix(task.num_steps, seed=task.seed)
    return steps_of(np.array([taken[rank] for rank in range(RANKS)]), mix, task)


def orders(mix: Mix) -> tuple[IntArray, IntArray]:
    """Return the positions of packs as they come, and assigned by work."""
    options: dict[str, Any] = {"world_size": RANKS, "accumulation": PACKS_OF_A_RANK, "meeting": "step"}
    return np.arange(mix.works.size), assign_steps(mix.works, **options)


def steps_of(taken: NDArray[np.float64], mix: Mix, task: Task) -> list[list[Step]]:
    """
    Return each round's steps.

    Args:
        taken: Seconds and processor time; shape (ranks, rounds, steps, orders, 2).

        mix: What was computed.

        task: That the ranks computed.
    """
    busiest = [
        mix.works[order].reshape(task.num_steps, PACKS_OF_A_RANK, RANKS).sum(axis=1).max(axis=1)
        for order in orders(mix)
    ]
    predicted = busiest[0].sum() / busiest[1].sum()
    longest = taken.max(axis=0)
    return [
        [Step(plain[0], by_work[0], plain[1], by_work[1], float(predicted)) for plain, by_work in steps.tolist()]
        for steps in longest
    ]


def run_rank(rank: int, folder: str, task: Task, results: Any) -> None:
    """
    Compute all rounds as one rank, and put its times into *results*.

    Args:
        rank: Its number.

        folder: Where ranks find each other.

        task: What is computed.

        results: Takes the rank and its times.
    """
    import torch
    import torch.distributed as dist

    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'ranks'}", rank=rank, world_size=RANKS)
    mix = drawn_mix(task.num_steps, seed=task.seed)
    ways = orders(mix)
    model = _model()
    table = []
    for number in range(task.num_rounds + 1):
        times = []
        for step in range(task.num_steps):
            both = [(0.0, 0.0)] * 2
            # The one that comes first takes turns, so that neither has the warmer machine.
            for way in ((0, 1), (1, 0))[(number + step) % 2]:
                first = step * RANKS * PACKS_OF_A_RANK
                mine = ways[way][first : first + RANKS * PACKS_OF_A_RANK][rank::RANKS]
                both[way] = _computed(model, mix, mine.tolist())
            times.append(both)
        table.append(times)
    dist.destroy_process_group()
    results.put((rank, table[1:]))


def _computed(model: Any, mix: Mix, packs: list[int]) -> tuple[float, float]:
    """
    Compute a rank's packs of a step, and sum the gradients; return the seconds, and the processor
    time until the ranks meet.
    """
    import torch
    import torch.distributed as dist

    rows = [_row(mix, mix.packs[place]) for place in packs]
    dist.barrier()
    started, before = time.perf_counter(), time.process_time()
    for row in rows:
        logits = model(**row, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row["input_ids"][0, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
    cpu = time.process_time() - before
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    dist.all_reduce(gradients)
    model.zero_grad()
    return time.perf_counter() - started, cpu


def _model() -> Any:
    """Return the model, with random weights, alike on every rank."""
    from packplan.adapters import torchvision_shim  # noqa: F401, I001  # before transformers
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from packplan.adapters.attention import attend_by_varlen, project_patches

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "model_type"}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen2_5_vl", **sizes))
    project_patches(model)
    attend_by_varlen(model)
    return model.train()


def _row(mix: Mix, members: Sequence[int]) -> dict[str, Any]:
    """Return a pack as the model takes it: positions restart with each sample."""
    import torch

    lengths = mix.lengths[list(members)].tolist()
    ids = torch.full((1, sum(lengths)), 7)
    kinds = torch.zeros_like(ids)
    for start, index in zip(accumulate([0, *lengths[:-1]]), members, strict=True):
        place = start
        for _, rows, columns in mix.grids[index]:
            stop = place + 1 + rows * columns // 4
            ids[0, place], ids[0, place + 1 : stop], kinds[0, place + 1 : stop] = _VISION_START, _IMAGE, 1
            place = stop
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(4, 1, -1)
    row: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "mm_token_type_ids": kinds}
    if grids := [grid for index in members for grid in mix.grids[index]]:
        patches = sum(rows * columns for _, rows, columns in grids)
        width = 3 * 2 * SIZES["vision_config"]["patch_size"] ** 2
        row |= {"pixel_values": torch.randn(patches, width), "image_grid_thw": torch.tensor(grids)}
    return row
