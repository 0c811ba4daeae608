"""
Measures the samples of an encoder; plans are made from these measurements.

The methods after `measure_many` are in the order in which they measure a batch of samples. First
each sample is read, and its texts are split into pieces. Then the tokens in all pieces of the batch
are counted in one call (`shortcut.py`). The remaining samples are encoded in full. Batches are
measured in this process, in other processes, on a cluster, or in the worker of a torch DataLoader.
"""

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cache, cached_property, partial
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, Dataset

from packplan.adapters.processes import ForkedProcesses, end_with_parent, hold_ctrl_c, wrap_process_errors
from packplan.adapters.samples.data_set import absolute_folder
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.media_files import VideoFacts
from packplan.adapters.samples.media_lengths import ImageCosts, find_image_costs
from packplan.adapters.samples.shortcut import PieceCounter, SplitSample, find_piece_counter
from packplan.adapters.samples.template import length_inputs
from packplan.core.errors import RecordError, RunError
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray
from packplan.core.ports import BlockExecutor, MeasuredBlock
from packplan.core.samples.tables import (
    NOTHING,
    MeasuredSample,
    Measurement,
    MediaFacts,
    RecordOutcome,
    ShortcutError,
    to_row,
)

log = logging.getLogger(__name__)

_log_info_once = cache(log.info)

AUDITED_ONE_IN = 512
"""One in this many samples is also encoded in full, to check the shortcut."""

_MAX_AUDITED_KINDS = 64
"""Largest number of kinds whose first sample is also encoded in full, in each process."""

_TEMPLATE_MARKS = re.compile(r"<\|\w+\|>|</?think>|<(?:image|video|audio|bbox|ref-object|cot-process|start-image)>")
"""Pattern of texts that a template may treat specially: special tokens, thoughts, media tags."""

AT_ONCE = ForkedProcesses.block_size
"""Largest number of samples that a process measures in one batch."""

_TRIED = 16
"""Number of samples in a batch while this process estimates whether a pool would be faster."""

_AHEAD = 4
"""Largest number of blocks that are queued ahead for each process."""

_LOADER_TIMEOUT_S = 600.0
"""Seconds after which a DataLoader worker that has returned no sample counts as stuck."""


@attrs.frozen
class _ReadSample:
    """Sample that is read but not yet measured, with the facts of its media."""

    index: int
    sample: dict[str, Any]

    facts: tuple[MediaFacts, ...]
    """Facts of the sample's images, followed by those of its videos."""

    split: SplitSample | None
    """Pieces of the sample's texts; None if the sample has to be encoded in full."""


class SwiftMeasurer:
    """
    A `core.ports.LengthSource` over the samples of an encoder.

    The shortcut measures samples from their texts and the headers of their media. Samples that the
    shortcut does not support are encoded in full. To check the shortcut, each process also encodes
    the first sample of each kind in full. Of all samples without videos, one in `AUDITED_ONE_IN` is
    also encoded in full. Other samples with videos are not checked, since decoding one video takes
    as long as counting the tokens of hundreds of samples. The first sample of each kind is also
    compared, token by token, with ms-swift's own encode of its record.
    """

    pool_start_s = 1.0
    """
    Seconds that a pool of processes takes to start. A pool is started only if it saves more time.
    """

    def __init__(
        self, encoder: SwiftEncoder, *, workers: int = 1, join_cluster: Callable[[bool], BlockExecutor] | None = None
    ) -> None:
        """
        Prepare to measure the samples of an encoder.

        Args:
            encoder: Encoder of the samples.
            workers: Largest number of processes that measure at once, limited to the number of
                cores. With 1, the calling process measures.
            join_cluster: Function that joins a cluster, which then measures in place of local
                processes. The function's argument says whether each sample is encoded in full. None
                measures on this machine.
        """
        self._encoder = encoder
        self._workers, self._join_cluster = min(workers, os.cpu_count() or 1), join_cluster
        self._audited_kinds: set[object] = set()
        self._compared_kinds: set[object] = set()

    def __len__(self) -> int:
        return len(self._encoder)

    def fingerprint(self) -> Fingerprint:
        """Return everything that the measurements depend on, except the data."""
        return length_inputs(self._encoder.config, self._encoder.template)

    def data_digest(self, count: int, *, without: Sequence[int] = ()) -> str:
        """Return the digest of the first *count* samples, except those at indices in *without*."""
        return self._encoder.records.digest(count, without=without)

    def digest_and_folder(self, index: int) -> tuple[str, str]:
        """Return sample *index*'s digest, and the absolute folder where its media paths start."""
        return self._encoder.records.record_digest(index), absolute_folder(self._encoder.records.media_folder(index))

    def record_heads(self) -> IntArray:
        """Return the first eight bytes of each record's digest; see `LengthSource`."""
        records = self._encoder.records
        records.digest(len(records))  # reads records whose digest is unknown
        return records.known_heads()[:: self._encoder.records_per_sample]

    def location(self, index: int) -> str:
        """Return the file and the line of sample *index*."""
        return str(self._encoder.records.location(index * self._encoder.records_per_sample))

    def measure_in_full(self, index: int) -> Measurement:
        """
        Encode sample *index* in full and measure it; see `LengthSource`.

        The first sample of each kind is compared with ms-swift's own encode; DataSetError is raised
        if the two encodes differ.
        """
        sample = self._encoder.read_sample(index)
        return self._encoder.encode_and_measure(index, sample, compared=_is_new_kind(sample, self._compared_kinds))

    def media_facts(self, index: int, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """Return the size and digest of each media file of sample *index*; see `LengthSource`."""
        sample = self._encoder.read_sample(index)
        facts = self._encoder.image_facts(index, sample.get("images", ()), decode=decode)
        videos = sample.get("videos", ())
        if decode:
            for video in videos:
                self._encoder.require_decodable_video(index, video)
        found = (self._encoder.video_facts(index, video) for video in videos)
        return (*facts, *map(self._encoder.to_media_facts, found))

    def measure_many(
        self, indices: Sequence[int], *, in_full: bool, epoch: int | None = None
    ) -> Generator[RecordOutcome, None, None]:
        """
        Yield the outcome of each sample in the order of *indices*; see `LengthSource`.

        Several processes measure if that is faster.
        """
        if epoch is not None or not isinstance(indices, range):
            yield from self._measure_in_loader(indices, epoch=epoch or 0)
            return
        if self._join_cluster is not None and indices:  # its machines fetch media themselves
            yield from self._measure_in_blocks(indices, self._join_cluster(in_full), in_full=in_full)
            return
        self._encoder.fetch_media(indices)
        size, started = (_TRIED if self._workers > 1 else AT_ONCE), time.perf_counter()
        for done in range(0, len(indices), size):
            if done and self._workers > 1:
                left_s = (time.perf_counter() - started) / done * (len(indices) - done)
                if left_s * (1 - 1 / self._workers) > self.pool_start_s:
                    compute = partial(self.measure_block, in_full=in_full)
                    pool = ForkedProcesses(self._workers, partial(torch.set_num_threads, 1), compute)
                    yield from self._measure_in_blocks(indices[done:], pool, in_full=in_full)
                    return
            yield from self.measure_batch(indices[done : done + size], in_full=in_full)

    def measure_batch(self, indices: range, *, in_full: bool) -> list[RecordOutcome]:
        """
        Measure consecutive samples in this process.

        Args:
            indices: Indices of the samples.
            in_full: Whether to encode each sample in full, without the shortcut.

        Raises:
            ShortcutError: The full encode of a checked sample differs from the shortcut's result.
            DataSetError: ms-swift's own encode of the first sample of a kind differs.
        """
        read: list[_ReadSample | RecordError] = []
        for index in indices:
            try:
                read.append(self._read_and_split(index, in_full=in_full))
            except RecordError as error:
                read.append(error)
        split = [one.split for one in read if isinstance(one, _ReadSample) and one.split is not None]
        counted = iter(self._piece_counter.count(split) if split and self._piece_counter is not None else ())
        return [
            one if isinstance(one, RecordError) else self._finish_measuring(one, next(counted) if one.split else None)
            for one in read
        ]

    def _read_and_split(self, index: int, *, in_full: bool) -> _ReadSample:
        """
        Read a sample and the headers of its media; split its texts into pieces unless *in_full*.

        RecordError is raised if the record cannot become a sample.
        """
        encoder = self._encoder
        sample = encoder.read_sample(index)
        images = encoder.image_facts(index, sample.get("images", ()))
        videos = [encoder.video_facts(index, video) for video in sample.get("videos", ())]
        facts = (*images, *map(encoder.to_media_facts, videos))
        return _ReadSample(index, sample, facts, None if in_full else self._split(index, sample, images, videos))

    def _split(
        self, index: int, sample: dict[str, Any], images: Sequence[MediaFacts], videos: Sequence[VideoFacts]
    ) -> SplitSample | None:
        """
        Split a sample into pieces, with stand-ins for its media.

        The result also has the cost of the media beyond the cost of their stand-ins. None is
        returned if the sample has to be encoded in full.
        """
        of_images = self.image_costs if images else None
        of_videos = self._encoder.video_costs if videos else None
        is_doubtful = any(one.doubt for one in videos)
        if is_doubtful or (images and of_images is None) or (videos and of_videos is None):
            return None
        with self._encoder.records.wrap_errors(index, "an image cannot be encoded: "):
            costs = [of_images.extra_cost(one.width, one.height) for one in images] if of_images else []
        costs += [of_videos.extra_cost(one) for one in videos] if of_videos else []
        counter, media = self._piece_counter, {"image": len(images), "video": len(videos)}
        if counter is None or any(number and kind not in counter.stand_ins for kind, number in media.items()):
            return None
        try:
            return counter.split(sample, sum(costs, NOTHING), **media)
        except Exception:  # noqa: BLE001  # a full encode reports any error of the template with the record's file and line
            return None

    def _finish_measuring(self, one: _ReadSample, shortcut: Measurement | None) -> RecordOutcome:
        """
        Return a sample's measurement, from the shortcut or from a full encode, or its error.

        Args:
            one: Sample to measure.
            shortcut: Measurement from the shortcut; None to encode the sample in full.

        Raises:
            ShortcutError: The sample is encoded as a check, and the shortcut's result differs.
            DataSetError: The sample is the first of its kind, and ms-swift encodes it differently.
        """
        limit = self._encoder.truncation_limit
        if shortcut is not None and limit is not None and shortcut.length > limit:
            shortcut = None  # only the template knows which tokens a truncated sample keeps
        is_new = _is_new_kind(one.sample, self._audited_kinds)
        is_drawn = is_new or (one.index % AUDITED_ONE_IN == 0 and "videos" not in one.sample)
        if shortcut is not None and not is_drawn:
            return MeasuredSample(shortcut, one.facts)
        try:
            encoded = self._encoder.encode_and_measure(one.index, one.sample, compared=is_new)
        except RecordError as error:
            # For example, an image has a valid header but damaged pixels. Whether this is found
            # must not depend on whether the sample is drawn for a check.
            return error if shortcut is None else MeasuredSample(shortcut, one.facts)
        if shortcut is not None and encoded != shortcut:
            raise ShortcutError(str(self._encoder.records.location(one.index)), to_row(shortcut), to_row(encoded))
        return MeasuredSample(encoded, one.facts)

    @cached_property
    def _piece_counter(self) -> PieceCounter | None:
        """Counter of pieces for the encoder's template; None if each sample is encoded in full."""
        template, tokens = self._encoder.template, self._encoder.image_tokens
        media = {} if tokens is None else {"image": tokens.token_id}
        if self._encoder.takes_videos:
            media["video"] = template.video_token_id
        counter, reason = find_piece_counter(template, tokens=media)
        if counter is None:
            self._log_once(f"each sample is encoded in full to be measured: {reason}")
        return counter

    @cached_property
    def image_costs(self) -> ImageCosts | None:
        """Method that computes images' tokens and patches; None if images have to be encoded."""
        lengths = find_image_costs(self._encoder.template)
        if lengths is None:
            self._log_once("the lengths of images cannot be computed, so samples with images are encoded in full")
        else:
            self._log_once(f"the lengths of images are computed from their headers, by {lengths.name}")
        return lengths

    def _log_once(self, text: str) -> None:
        _log_info_once("%s: %s", self._encoder.template.template_meta.template_type, text)

    def _measure_in_blocks(self, indices: range, executor: BlockExecutor, *, in_full: bool) -> Generator[RecordOutcome]:
        """Yield the outcomes of samples that other processes measure in blocks, queued ahead."""
        size = min(executor.block_size, -(-len(indices) // (2 * executor.num_workers)))
        waiting: deque[Callable[[], MeasuredBlock]] = deque()
        workers = f"lower training.packing_length_precompute_workers (now {self._workers:,}; "
        with closing(executor), wrap_process_errors("measuring samples", f"{workers}1 measures in the main process)"):
            for start in range(0, len(indices), size):
                waiting.append(executor.submit(indices[start : start + size]))
                if len(waiting) > _AHEAD * executor.num_workers:
                    yield from self._receive_block(waiting.popleft()(), in_full=in_full)
            while waiting:
                yield from self._receive_block(waiting.popleft()(), in_full=in_full)

    def measure_block(self, indices: range, *, in_full: bool) -> MeasuredBlock:
        """Measure consecutive samples; return their outcomes and the digests of their records."""
        parts = (indices[start : start + AT_ONCE] for start in range(0, len(indices), AT_ONCE))
        outcomes = [one for part in parts for one in self.measure_batch(part, in_full=in_full)]
        records = self._record_indices(indices)
        return MeasuredBlock(outcomes, records, self._encoder.records.known_digests(records))

    def _record_indices(self, indices: range) -> range:
        """Return the indices of the records from which the samples *indices* are read."""
        return indices

    def _receive_block(self, block: MeasuredBlock, *, in_full: bool) -> Sequence[RecordOutcome]:
        """
        Store the digests of a block's records, and return the outcomes of its samples.

        If another machine cannot read a record that this machine can read, RunError is raised.
        """
        self._encoder.records.add_digests(block.records, block.digests)
        for index, outcome in zip(block.records, block.outcomes, strict=True) if block.node else ():
            if isinstance(outcome, RecordError):
                (here,) = self.measure_batch(range(index, index + 1), in_full=in_full)
                if not isinstance(here, RecordError):
                    raise RunError("node", f"{block.node}: {outcome}; but this machine can read the record")
        return block.outcomes

    def _measure_in_loader(self, indices: Sequence[int], *, epoch: int) -> list[RecordOutcome]:
        """
        Measure samples by full encodes in a worker of a torch DataLoader with the seed *epoch*.
        """
        loader = DataLoader(
            _FullEncodeDataset(self),
            sampler=list(indices),
            batch_size=None,
            num_workers=1,
            timeout=_LOADER_TIMEOUT_S,
            generator=torch.Generator().manual_seed(epoch),
            multiprocessing_context="fork",
            worker_init_fn=lambda _: end_with_parent(),
        )
        with wrap_process_errors("encoding samples again, in another process,", "end other programs here"):
            with hold_ctrl_c():
                outcomes = iter(loader)
            return list(outcomes)


def _is_new_kind(sample: dict[str, Any], known: set[object]) -> bool:
    """Return whether a sample's kind is new, and add it to *known*."""
    kind = _sample_kind(sample)
    if kind in known or len(known) == _MAX_AUDITED_KINDS:
        return False
    known.add(kind)
    return True


def _sample_kind(sample: dict[str, Any]) -> object:
    """Return a sample's kind: its roles, keys and marks that a template may treat specially."""
    messages = sample["messages"]
    texts = [text for message in messages if isinstance(text := message["content"], str)]
    marks = {mark for text in texts if "<" in text for mark in _TEMPLATE_MARKS.findall(text)[:8]}
    return (
        tuple((message["role"], *sorted(message.keys() - {"role", "content"})) for message in messages[:4]),
        min(len(messages), 5),
        frozenset(sample.keys()),
        any(text[:1].isspace() or text[-1:].isspace() for text in texts),
        frozenset(marks),
    )


class _FullEncodeDataset(Dataset[RecordOutcome]):
    """Data set for a DataLoader. Its items are outcomes of full encodes."""

    def __init__(self, samples: SwiftMeasurer) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> RecordOutcome:
        (outcome,) = self._samples.measure_batch(range(index, index + 1), in_full=True)
        return outcome
