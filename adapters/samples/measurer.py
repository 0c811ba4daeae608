"""Measures all samples of an encoder in several processes, as the input of plans."""

import gc
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from packplan.adapters.model_folder import PROCESSING_FILES
from packplan.adapters.processes import end_with_parent, keep_ctrl_c, name_lost_processes, open_pool
from packplan.adapters.samples.data_set import absolute_folder
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.media import without_truncation
from packplan.adapters.samples.shortcut import ShortcutMeasurer
from packplan.adapters.samples.template import swift_types
from packplan.adapters.versions import installed_version
from packplan.core.config.identity import configured_inputs
from packplan.core.errors import RecordError
from packplan.core.fingerprint import Fingerprint, Value
from packplan.core.samples.identity import DIGEST_BYTES
from packplan.core.samples.tables import NOTHING, MeasuredSample, Measurement, MediaFacts, RecordOutcome

MeasuredBatch = tuple[range, list[RecordOutcome], bytes]
"""Indices of records, outcomes of their samples, and joined digests of records (0: unknown)."""

_PROCESSING_PACKAGES = ("ms-swift", "transformers", "tokenizers", "qwen_vl_utils", "pillow", "torchvision")

PROCESSING_VARIABLES = (
    "MAX_PIXELS",
    "MIN_PIXELS",
    "IMAGE_FACTOR",
    "IMAGE_MAX_TOKEN_NUM",
    "IMAGE_MIN_TOKEN_NUM",
    "MAX_RATIO",
    "SPATIAL_MERGE_SIZE",
    "INPUT_SIZE",
    "MAX_NUM",
    "MAX_SLICE_NUMS",
    "DOWNSAMPLE_MODE",
    "QWENVL_BBOX_FORMAT",
    "ENABLE_THINKING",
    "PRESERVE_THINKING",
    "FPS",
    "FPS_MIN_FRAMES",
    "FPS_MAX_FRAMES",
    "FRAME_FACTOR",
    "VIDEO_MIN_PIXELS",
    "VIDEO_MAX_PIXELS",
    "VIDEO_TOTAL_PIXELS",
    "VIDEO_MIN_TOKEN_NUM",
    "VIDEO_MAX_TOKEN_NUM",
    "MODEL_SEQ_LEN",
    "FORCE_QWENVL_VIDEO_READER",
)
"""Environment variables that ms-swift and qwen_vl_utils read while encoding text and media."""

MEASURING_VERSION = 4
"""
Version of this project's rules that decide lengths, from records to messages and from image
headers to patches. Raise it with each change of a length.
"""

AT_ONCE = 32
"""Samples that a process measures at once."""

_TRIED = 16
"""Samples that this process measures at once while it decides whether a pool would be faster."""

_AHEAD = 4
"""Batches for each process that are queued ahead."""

_LOADER_TIMEOUT_S = 600.0
"""Seconds after which a loader's worker that returns no sample counts as stuck."""


class SwiftMeasurer:
    """
    A `core.ports.LengthSource` over the samples of an encoder. A sample of several records, such as
    a pair, is measured as their sum.
    """

    pool_start_s = 1.0
    """
    Seconds that a pool of processes takes to start. No pool is started if it would save less.
    """

    def __init__(self, encoder: SwiftEncoder, *, workers: int = 1) -> None:
        """
        Measure the samples of an encoder.

        Args:
            encoder: Encoder of the samples.
            workers: Processes that measure, limited to the number of cores; with 1, the calling
                process measures.
        """
        self._encoder = encoder
        self.shortcut = ShortcutMeasurer(encoder, in_full=self._measure_record)
        self._workers = min(workers, os.cpu_count() or 1)

    def __len__(self) -> int:
        return len(self._encoder) // self._encoder.records_per_sample

    def fingerprint(self) -> Fingerprint:
        """Return all inputs that the measurements depend on, except the data."""
        config = self._encoder.config
        model_type, template_type = swift_types(config.model, config.template)
        inputs: dict[str, Value] = {
            **configured_inputs(config.template, config.custom, packing_length=config.packing_length),
            "model.model_type": model_type,
            "template.template": template_type,
            **({} if config.command is None else config.command.length_inputs()),
        }
        folder = Path(config.model.model)
        for file in sorted({file for pattern in PROCESSING_FILES for file in folder.glob(pattern)}):
            inputs[f"model.{file.name}.sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        inputs["version.measuring"] = MEASURING_VERSION
        for package in _PROCESSING_PACKAGES:
            inputs[f"version.{package}"] = installed_version(package)
        for variable in PROCESSING_VARIABLES:
            inputs[f"environment.{variable}"] = os.environ.get(variable)
        return Fingerprint(inputs)

    def data_digest(self, count: int, *, without: Sequence[int] = ()) -> str:
        """Return the digest of the first *count* samples except those at the indices *without*."""
        left = [part for index in without for part in self._record_indices(index)]
        return self._encoder.records.digest(count * self._encoder.records_per_sample, without=left)

    def identity(self, index: int) -> tuple[str, str]:
        """Return the digest of sample *index*, and the absolute folder of its relative media."""
        first = index * self._encoder.records_per_sample
        return self._encoder.records.record_digest(first), absolute_folder(self._encoder.records.folder(first))

    def _record_indices(self, index: int, number: int = 1) -> range:
        """Return the indices of the records of *number* samples from *index* on."""
        size = self._encoder.records_per_sample
        return range(index * size, (index + number) * size)

    def record_lengths(self, index: int) -> list[int]:
        """Return the tokens of each record of sample *index*; no record of it may be bad."""
        outcomes, _ = self.shortcut.measure(self._record_indices(index))
        return [one.measurement.length for one in outcomes if isinstance(one, MeasuredSample)]

    def measure(self, index: int) -> Measurement:
        """Encode and measure sample *index*; see `core.ports`."""
        return sum(map(self._measure_record, self._record_indices(index)), NOTHING)

    def _measure_record(self, index: int) -> Measurement:
        # Whether a sample is truncated, or happens to fit exactly, shows only without the limit.
        with without_truncation(self._encoder.template):
            whole = self._measure_encoded(index)
        limit = self._encoder.template.max_length
        if limit is None or whole.length <= limit:
            return whole
        found = self._measure_encoded(index)  # a row of several sequences may be longer than each may be
        return attrs.evolve(found, cut=found.length < whole.length)

    def _measure_encoded(self, index: int) -> Measurement:
        return self._encoder.measure_sample(index, self._encoder.encode(index))

    def measure_many(
        self, indices: Sequence[int], *, in_full: bool, epoch: int | None = None
    ) -> Generator[RecordOutcome, None, None]:
        """
        Yield the outcome of each sample, in the order of *indices*, measured in several processes
        where that is faster; see `core.ports`.
        """
        if epoch is not None or not isinstance(indices, range):
            yield from self.measure_in_loader(indices, epoch=epoch or 0)
            return
        self._encoder.fetch_media(self._record_indices(indices.start, len(indices)))
        size, started = (_TRIED if self._workers > 1 else AT_ONCE), time.perf_counter()
        for done in range(0, len(indices), size):
            if done and self._workers > 1:
                left_s = (time.perf_counter() - started) / done * (len(indices) - done)
                if left_s * (1 - 1 / self._workers) > self.pool_start_s:
                    yield from self._measure_in_pool(indices[done:], in_full=in_full)
                    return
            yield from self._keep_digests(self.measure_batch(indices[done : done + size], in_full=in_full))

    def _measure_in_pool(self, indices: range, *, in_full: bool) -> Generator[RecordOutcome, None, None]:
        """Yield the outcomes of samples measured in worker processes, a few batches ahead."""
        size = min(AT_ONCE, -(-len(indices) // (2 * self._workers)))
        parts = (indices[start : start + size] for start in range(0, len(indices), size))
        waiting: deque[Any] = deque()
        # All are forked with the first part, and share with this process what neither changes. The
        # garbage collector writes into each object that it looks at: it is kept from what is here.
        kept_before = gc.get_freeze_count()
        gc.collect()
        gc.freeze()
        pool = open_pool(self._workers, _open_worker, self, in_full)
        try:
            workers = f"lower training.packing_length_precompute_workers (now {self._workers:,}; "
            with name_lost_processes("measuring samples", f"{workers}1 measures in the main process)"):
                with keep_ctrl_c():
                    waiting.append(pool.submit(_measure_in_worker, next(parts)))
                for part in parts:
                    waiting.append(pool.submit(_measure_in_worker, part))
                    if len(waiting) > _AHEAD * self._workers:
                        yield from self._keep_digests(waiting.popleft().result())
                while waiting:
                    yield from self._keep_digests(waiting.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)
            if not kept_before:
                gc.unfreeze()

    def _keep_digests(self, batch: MeasuredBatch) -> list[RecordOutcome]:
        """Store the digests of a batch's records, and return its outcomes."""
        indices, outcomes, digests = batch
        self._encoder.records.add_digests(indices, np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES))
        return outcomes

    def measure_batch(self, indices: range, *, in_full: bool) -> MeasuredBatch:
        """
        Measure consecutive samples in this process.

        Args:
            indices: Indices of the samples.
            in_full: Encode each sample in full, without the shortcut.

        Raises:
            ShortcutError: A sample encodes to another measurement than the shortcut gives.
        """
        if in_full:
            return indices, [self.measure_in_full(index) for index in indices], b""
        parts, size = self._record_indices(indices.start, len(indices)), self._encoder.records_per_sample
        outcomes, digests = self.shortcut.measure(parts)
        joined = [_join_outcomes(outcomes[place : place + size]) for place in range(0, len(outcomes), size)]
        return parts, joined, digests

    def measure_in_loader(self, indices: Sequence[int], *, epoch: int) -> list[RecordOutcome]:
        """
        Measure samples by full encodes in a worker of a torch DataLoader that *epoch* seeds.
        """
        loader = DataLoader(
            _LoaderSamples(self),
            sampler=list(indices),
            batch_size=None,
            num_workers=1,
            timeout=_LOADER_TIMEOUT_S,
            generator=torch.Generator().manual_seed(epoch),
            multiprocessing_context="fork",
            worker_init_fn=lambda _: end_with_parent(),
        )
        with name_lost_processes("encoding samples again, in another process,", "end what else runs on it"):
            with keep_ctrl_c():
                outcomes = iter(loader)
            return list(outcomes)

    def media_facts(self, index: int, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """Return the size and digest of each media file of sample *index*; see `LengthSource`."""
        return tuple(fact for part in self._record_indices(index) for fact in self._record_facts(part, decode=decode))

    def _record_facts(self, index: int, *, decode: bool) -> tuple[MediaFacts, ...]:
        sample = self._encoder.read(index)
        facts = self._encoder.image_facts(index, sample.get("images", ()), decode=decode)
        videos = sample.get("videos", ())
        if decode:
            for video in videos:
                self._encoder.decode_video(index, video)
        found = (self._encoder.video_facts(index, video) for video in videos)
        return (*facts, *map(self._encoder.to_media_facts, found))

    def measure_in_full(self, index: int) -> RecordOutcome:
        """Measure sample *index* by a full encode; a bad record's error is returned, not raised."""
        try:
            return MeasuredSample(self.measure(index), self.media_facts(index))
        except RecordError as error:
            return error


def _join_outcomes(parts: Sequence[RecordOutcome]) -> RecordOutcome:
    """Return the summed measurement of a sample's records, or the error of its first bad record."""
    samples = [one for one in parts if isinstance(one, MeasuredSample)]
    if len(samples) < len(parts):
        return next(one for one in parts if isinstance(one, RecordError))
    facts = tuple(fact for one in samples for fact in one.media)
    return MeasuredSample(sum((one.measurement for one in samples), NOTHING), facts)


class _LoaderSamples(Dataset[RecordOutcome]):
    """Data set whose items are outcomes of full encodes."""

    def __init__(self, samples: SwiftMeasurer) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> RecordOutcome:
        return self._samples.measure_in_full(index)


_measure: Callable[[range], MeasuredBatch] | None = None


def _open_worker(samples: SwiftMeasurer, in_full: bool) -> None:  # noqa: FBT001  # pools pass arguments by place
    global _measure  # noqa: PLW0603  # the one thing a worker process holds
    torch.set_num_threads(1)
    _measure = partial(samples.measure_batch, in_full=in_full)


def _measure_in_worker(indices: range) -> MeasuredBatch:
    assert _measure is not None  # noqa: S101  # the pool's initializer made it
    return _measure(indices)
