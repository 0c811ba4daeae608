"""
Records -> encoded samples and their measurements, by ms-swift's template, with every failure named.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import attrs
import torch
from swift.template import Template
from torch.utils.data import DataLoader, Dataset

from adapters.lifeline import ctrl_c_kept, end_with_parent, open_pool
from adapters.samples.image_headers import ImageArithmetic, image_facts, read_size
from adapters.samples.jsonl import JsonlRecords
from adapters.samples.template import open_template, swift_types
from core.config import CustomConfig, ModelConfig, TemplateConfig
from core.errors import ContractError, RecordError
from core.fingerprint import Fingerprint, Value, configured_inputs
from core.samples import ImageFacts, Measured, Measurement, Outcome, Table, from_row, to_messages

IGNORED_LABEL = -100

_PROCESSING_FILES = (
    "config.json",
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens*",
    "added_tokens*",
    "*processor_config.json",
    "chat_template*",
    "*.model",
    "*.py",
)

_PROCESSING_PACKAGES = ("ms-swift", "transformers", "tokenizers", "qwen_vl_utils", "pillow", "torchvision")

_PROCESSING_VARIABLES = (
    "MAX_PIXELS",
    "MIN_PIXELS",
    "IMAGE_FACTOR",
    "IMAGE_MAX_TOKEN_NUM",
    "IMAGE_MIN_TOKEN_NUM",
    "MAX_RATIO",
    "SPATIAL_MERGE_SIZE",
    "QWENVL_BBOX_FORMAT",
    "ENABLE_THINKING",
    "PRESERVE_THINKING",
)
"""Environment variables that ms-swift and qwen_vl_utils read while encoding text and images."""

MEASURING = 1
"""
Version of this project's own part in a length: records to messages, headers to patches. A change
that moves one raises it.
"""

POOL_START_S = 20.0
"""A pool of processes that import the whole stack takes about this long to start."""


_ELSEWHERE_S = 600.0
"""A sample that another process has not encoded by then never will be."""


@attrs.frozen
class SampleSpec:
    """What decides how records become samples; small, and picklable for worker processes."""

    model: ModelConfig
    template: TemplateConfig
    custom: CustomConfig
    paths: tuple[str, ...]
    packing_length: int


class SwiftSamples:
    """A `core.ports.LengthSource` over JSONL records; also encodes samples for training."""

    def __init__(
        self,
        spec: SampleSpec,
        *,
        workers: int = 1,
        sharers: int = 1,
        template: Template | None = None,
        pool_start_s: float = POOL_START_S,
    ) -> None:
        """
        Open the data files and the template.

        Args:
            spec: What decides how records become samples.

            workers: Processes that measure, at most as many as there are cores; 1 measures in this
            one.

            sharers: Processes like this one that measure on this machine at the same time.

            template: To share with a trainer; built from the spec if None.

            pool_start_s: Seconds that a pool takes to start; what is left has to take longer than
            that in this process.
        """
        self.spec = spec
        self.records = JsonlRecords(spec.paths, max_line_bytes=spec.custom.max_line_bytes)
        self.template = template or open_template(spec.model, spec.template, packing_length=spec.packing_length)
        self._arithmetic = ImageArithmetic.of(self.template)
        self._pool_start_s = pool_start_s
        self._workers = min(workers, max(1, (os.cpu_count() or 1) // sharers))

    def __len__(self) -> int:
        return len(self.records)

    @property
    def sees_images(self) -> bool:
        """Whether the model takes images."""
        return bool(self.template.model_meta.is_multimodal)

    def fingerprint(self) -> Fingerprint:
        """Return everything that the measurements depend on, the data aside."""
        spec = self.spec
        model_type, template_type = swift_types(spec.model, spec.template)
        inputs: dict[str, Value] = {
            **configured_inputs(spec.template, spec.custom, packing_length=spec.packing_length),
            "model.model_type": model_type,
            "template.template": template_type,
        }
        folder = Path(spec.model.model)
        for file in sorted({file for pattern in _PROCESSING_FILES for file in folder.glob(pattern)}):
            inputs[f"model.{file.name}.sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        inputs["version.measuring"] = MEASURING
        for package in _PROCESSING_PACKAGES:
            inputs[f"version.{package}"] = importlib.metadata.version(package)
        for variable in _PROCESSING_VARIABLES:
            inputs[f"environment.{variable}"] = os.environ.get(variable)
        return Fingerprint(inputs)

    def data_digest(self, count: int, *, start: int = 0) -> str:
        """Return the digest of *count* records from *start* on."""
        return self.records.digest(count, start=start)

    def measure_quickly(self, index: int) -> Measurement:
        """
        Measure sample *index* from its images' headers where that is proven to be exact; else in
        full.
        """
        sample, images = self._sample(index)
        # Where the template truncates, what goes depends on where the images stand.
        if self._arithmetic is None or not images or self.template.max_length is not None:
            return self.measure(index)
        sizes = [self._size(index, image) for image in images]
        stand_ins = [self._arithmetic.smallest_image] * len(images)
        standing = self.measured(index, self._encode(index, {**sample, "images": stand_ins}))
        try:
            patches = sum(self._arithmetic.patches(*size) for size in sizes)
        except ValueError as error:
            raise self._fault(index, f"an image cannot be encoded: {error}") from None
        more = (patches - standing.patches) // self._arithmetic.merge_size**2
        return attrs.evolve(standing, length=standing.length + more, patches=patches)

    def measure(self, index: int) -> Measurement:
        """Encode and measure sample *index*; RecordError if it cannot become a sample."""
        limit = self.template.max_length
        if limit is None:
            return self.measured(index, self.encode(index))
        # Whether a sample is truncated, or happens to fit exactly, shows only without the limit.
        self.template.max_length = None
        try:
            whole = self.measured(index, self.encode(index))
        finally:
            self.template.max_length = limit
        if whole.length <= limit:
            return whole
        return attrs.evolve(self.measured(index, self.encode(index)), cut=True)

    def measure_many(self, indices: range, *, in_full: bool) -> Generator[Outcome, None, None]:
        """
        Measure several, in the order of *indices*, by processes where that is faster; see
        `core.ports`.
        """
        measure = partial(self.outcome, in_full=in_full)
        done = 0
        if self._workers > 1:
            started = time.perf_counter()
            while done < len(indices):
                yield measure(indices[done])
                done += 1
                spent = time.perf_counter() - started
                if done >= 16 and spent / done * (len(indices) - done) * (1 - 1 / self._workers) > self._pool_start_s:
                    break
        rest = indices[done:]
        if not rest or self._workers == 1:
            yield from map(measure, rest)
            return
        with ctrl_c_kept():
            pool = open_pool(self._workers, _open_worker, self.spec, in_full)
            measured = pool.map(_measure_in_worker, rest, chunksize=16)
        try:
            yield from measured
        finally:
            pool.shutdown(cancel_futures=True)

    def measure_elsewhere(self, indices: Sequence[int], *, epoch: int) -> list[Outcome]:
        """
        Encode samples in a worker process of torch's own loader, seeded for *epoch*; see
        `core.ports`.
        """
        loader = DataLoader(
            _Measured(self),
            sampler=list(indices),
            batch_size=None,
            num_workers=1,
            timeout=_ELSEWHERE_S,
            generator=torch.Generator().manual_seed(epoch),
            multiprocessing_context="fork",
            worker_init_fn=lambda _: end_with_parent(),
        )
        return list(loader)

    def images(self, index: int, *, decode: bool = False) -> tuple[ImageFacts, ...]:
        """Return what the image files of sample *index* are now; see `core.ports`."""
        try:
            return tuple(image_facts(image, decode=decode) for image in self._sample(index)[1])
        except ValueError as error:
            raise self._fault(index, str(error)) from None

    def outcome(self, index: int, *, in_full: bool) -> Outcome:
        """Measure sample *index* and its images, or say why it cannot become a sample."""
        try:
            measurement = self.measure(index) if in_full else self.measure_quickly(index)
            return Measured(measurement, self.images(index))
        except RecordError as error:
            return error

    @property
    def mixes(self) -> bool:
        """Whether samples are others in another epoch: not those of files."""
        return False

    def answer(self, index: int) -> str:
        """Return what the last message of sample *index* says."""
        said: str = self._sample(index)[0]["messages"][-1]["content"]
        return said

    def prompt(self, index: int) -> dict[str, Any]:
        """
        Encode sample *index* without its last message, for the model to answer; RecordError if
        nothing comes before.
        """
        sample, images = self._sample(index)
        before = sample["messages"][:-1]
        if not any(message["role"] == "user" for message in before):
            raise self._fault(index, "the record has no question before its last message")
        mode = self.template.mode
        self.template.set_mode("transformers")
        try:
            return self._encode(index, {**sample, "messages": before, "images": images})
        finally:
            self.template.set_mode(mode)

    def encode(self, index: int, *, answer: str | None = None) -> dict[str, Any]:
        """
        Encode sample *index* as the template does; RecordError if it cannot become a sample.

        Args:
            index: Of the sample.

            answer: What its last message says instead of its own.
        """
        sample, images = self._sample(index)
        if answer is not None:
            *before, last = sample["messages"]
            sample = {**sample, "messages": [*before, {**last, "content": answer}]}
        for image in images:
            self._size(index, image)
        try:
            return self._encode(index, {**sample, "images": images})
        except RecordError:
            # A damaged image is the likelier reason, and a better one.
            for image in images:
                self._size(index, image, decode=True)
            raise

    def _sample(self, index: int) -> tuple[dict[str, Any], list[str]]:
        """Return sample *index* as messages, and the paths of its images."""
        try:
            sample = to_messages(
                self.records[index],
                object_field_order=self.spec.custom.object_field_order,
                use_summary=self.spec.custom.use_summary,
                max_messages=self.spec.custom.max_messages,
            )
        except ValueError as error:
            raise self._fault(index, f"the record {error}") from None
        images = [str(Path(self.records.folder(index), image)) for image in sample.get("images", ())]
        if images and not self.sees_images:
            raise self._fault(index, "the record has images, but the model reads text only")
        return sample, images

    def _size(self, index: int, image: str, *, decode: bool = False) -> tuple[int, int]:
        try:
            return read_size(image, decode=decode)
        except ValueError as error:
            raise self._fault(index, str(error)) from None

    def _encode(self, index: int, sample: dict[str, Any]) -> dict[str, Any]:
        try:
            return dict(self.template.encode(sample, return_length=True))
        except Exception as error:
            raise self._fault(index, f"the record cannot be encoded: {type(error).__name__}: {error}") from error

    def _fault(self, index: int, reason: str) -> RecordError:
        return RecordError(str(self.records.where(index)), reason)

    def measured(self, index: int, encoded: dict[str, Any]) -> Measurement:
        """Measure an encoded sample; RecordError if its image tokens do not match its images."""
        grid = encoded.get("image_grid_thw")
        measurement = Measurement(
            length=encoded["length"],
            supervised=sum(label != IGNORED_LABEL for label in encoded["labels"][1:]),
            images=0 if grid is None else len(grid),
            patches=0 if grid is None else int(torch.as_tensor(grid).prod(-1).sum()),
        )
        if hasattr(self.template, "image_token_id"):
            merge = self.template.processor.image_processor.merge_size**2
            tokens = encoded["input_ids"].count(self.template.image_token_id)
            if tokens != measurement.patches // merge:
                reason = (
                    f"the record has {tokens:,} image tokens, but its images give {measurement.patches // merge:,}: "
                    "its text may contain the image token itself"
                )
                raise self._fault(index, reason)
        return measurement

    def fetch(self, index: int, planned: Table) -> dict[str, Any]:
        """
        Encode sample *index* for training; ContractError if it is not the one that was planned.
        """
        return self.checked(index, self.encode(index), planned)

    def checked(self, index: int, encoded: dict[str, Any], planned: Table) -> dict[str, Any]:
        """
        Return an encoded sample; ContractError if it is not the one that was planned.

        Args:
            index: Its position in the data, from 0.

            encoded: The sample as the template gives it.

            planned: Measurements that the plan rests on; int32, shape (num_samples, num_columns).
        """
        expected = from_row(planned, index)
        found = attrs.evolve(self.measured(index, encoded), cut=expected.cut)
        if differences := expected.differences(found):
            raise ContractError(index, str(self.records.where(index)), differences)
        return encoded


class _Measured(Dataset[Outcome]):
    """Samples encoded in full, as a loader's worker would."""

    def __init__(self, samples: SwiftSamples) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Outcome:
        return self._samples.outcome(index, in_full=True)


_measure: Callable[[int], Outcome] | None = None


def _open_worker(spec: SampleSpec, in_full: bool) -> None:  # noqa: FBT001  # pools pass arguments by place
    global _measure  # noqa: PLW0603  # the one thing a worker process holds
    torch.set_num_threads(1)
    _measure = partial(SwiftSamples(spec).outcome, in_full=in_full)


def _measure_in_worker(index: int) -> Outcome:
    assert _measure is not None  # noqa: S101  # the pool's initializer made it
    return _measure(index)
