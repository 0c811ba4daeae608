"""Trains epochs in one way, in one process, for `benchmarks.train`; loads torch and ms-swift."""

import copy
import time
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
from transformers import TrainerCallback

from benchmarks.child import NotMeasuredError, peak_bytes, reset_peak
from benchmarks.train import ComputedBatch, Way, operations
from benchmarks.work import image_flops
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.app.sft.train import prepare
from packplan.core.config.run import RunConfig
from packplan.core.lengths import IntArray
from packplan.core.samples.tables import Table
from packplan.core.schedule import EpochSchedule
from packplan.core.shuffling import seeded_permutation
from packplan.core.work.model import WorkModel


@attrs.frozen(kw_only=True, eq=False)
class SortedSchedule(EpochSchedule):
    """
    Schedule of batches whose samples have similar lengths, in random order.

    transformers' `group_by_length` sorts only parts of the data, so its batches have more padding.
    """

    lengths: IntArray
    """Tokens of each sample; shape (num_packs,)."""

    def order(self, epoch: int) -> IntArray:
        """Return the samples of *epoch*, batch after batch; the smaller batch comes last."""
        ascending = np.argsort(self.lengths, kind="stable")
        # The shortest samples remain, so that the smaller batch is the cheapest too.
        rest, full = np.split(ascending, [ascending.size % self.batch_size])
        batches = full.reshape(-1, self.batch_size)
        return np.concatenate([batches[seeded_permutation(len(batches), seed=(self.seed, epoch))].ravel(), rest])


class Encoded:
    """Samples that were encoded beforehand; each is compared with the plan when it is fetched."""

    def __init__(self, samples: SwiftEncoder) -> None:
        self._encoded = [samples.encode(index) for index in range(len(samples))]
        self.num_fetched = 0
        """Number of samples fetched so far."""

        kept: Any = copy.copy(samples)
        kept.encode = lambda index: dict(self._encoded[index])  # the collator adds to a sample
        self._samples = kept

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample["input_ids"]) for sample in self._encoded]

    @property
    def grids(self) -> list[list[int]]:
        """Grid of patches of each image: frames, rows, columns."""
        found = (sample.get("image_grid_thw") for sample in self._encoded)
        return [grid for grids in found if grids is not None for grid in grids.tolist()]

    def encode_planned(self, index: int, planned: Table) -> dict[str, Any]:
        """Return sample *index*; StaleError if it is not the planned one."""
        self.num_fetched += 1
        found: dict[str, Any] = self._samples.encode_planned(index, planned)
        return found


class EpochClock(TrainerCallback):
    """Callback that times each epoch: by processor time, or on a GPU by wall-clock time."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu, self._start, self.seconds = on_gpu, 0.0, 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._start = self._now()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        self.seconds = self._now() - self._start

    def _now(self) -> float:
        if not self._on_gpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def samples_of_a_pack(config: RunConfig) -> int:
    """Plan and store the packs for all ways; return the mean number of samples in a pack."""
    packs = prepare(config, OneRank())[1]["train"].raw.packs
    return max(1, round(packs.indices.size / len(packs)))


def epochs(config: RunConfig, way: Way, size: int, device: str) -> Iterator[dict[str, Any]]:
    """
    Yield facts about the batches, then seconds and peak bytes of one epoch after the other.

    Args:
        config: The run.
        way: How samples become forward passes.
        size: Number of samples in a padded batch.
        device: Device that trains.
    """
    on_gpu = device == "cuda"
    config = attrs.evolve(config, model=attrs.evolve(config.model, attn_impl=way.attn_impl))
    if way.rows != "packs":
        batch = 1 if way.rows == "alone" else size
        unpacked: dict[str, Any] = {
            "packing": False,
            "per_device_train_batch_size": batch,
            "effective_batch_size": size,
        }
        config = attrs.evolve(config, training=attrs.evolve(config.training, **unpacked))
    trainer, splits = prepare(config, OneRank())
    encoded = Encoded(splits["train"].encoder)
    trainer.train_dataset.encoder = encoded
    if way.rows == "sorted":
        fields = attrs.asdict(trainer.schedule, recurse=False, filter=lambda field, _: field.init)
        trainer.pack_batches.reschedule(SortedSchedule(**fields, lengths=np.array(encoded.lengths)))
    yield _facts(trainer, encoded, way)
    clock = EpochClock(on_gpu=on_gpu)
    trainer.add_callback(clock)
    while True:
        before, encoded.num_fetched = reset_peak(), 0
        trainer.train()
        if encoded.num_fetched < len(encoded.lengths):
            raise NotMeasuredError(
                f"only {encoded.num_fetched} of {len(encoded.lengths)} samples were read from the encoded ones"
            )
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_bytes() - before
        if on_gpu:
            torch.cuda.empty_cache()  # the other ways come next, on the same GPU
        yield {"seconds": clock.seconds, "peak_bytes": peak}


def _facts(trainer: Any, encoded: Encoded, way: Way) -> dict[str, Any]:
    lengths = encoded.lengths
    packs, schedule = trainer.train_dataset.packs, trainer.schedule
    batches: list[ComputedBatch] = [
        [[lengths[index] for index in packs[pack]] for pack in batch] for batch in schedule.batches(0, rank=0)
    ]
    work = WorkModel.from_config(trainer.model.config.to_dict())
    flops, padding = operations(way, batches, work, float(image_flops(work.vision, encoded.grids).sum()))
    return {
        "attention": trainer.attention.name,
        "batch_size": schedule.batch_size,
        "num_steps": schedule.num_remaining_steps(0),
        "padding_share": padding,
        "flops": flops,
        "tokens_per_sample": sum(lengths) / len(lengths),
    }
