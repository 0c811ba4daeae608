"""
Encodes and measures the rows of an ms-swift data set with ms-swift's template.

A row is one sequence, or a pair of sequences: chosen and rejected. The length of a row is the sum
of its sequences' lengths. Sequences are measured from texts and image headers, like samples of
files. Rows with boxes, videos or sound are encoded in full, and so are rows for classifiers,
embeddings and rerankers. Rows that ms-swift made by splitting long texts are already encoded.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import PIL.Image
from numpy.typing import NDArray
from swift.template import StdTemplateInputs, Template, TemplateInputs
from swift.template.vision_utils import _check_path, load_file

from packplan.adapters.samples.data_set import FileRecords
from packplan.adapters.samples.encoder import SwiftEncoder, to_swift_images
from packplan.adapters.samples.formats.record_file import RecordFile
from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.adapters.samples.media import IMAGES, VIDEOS, measure_encoded
from packplan.adapters.samples.shortcut import SplitSample
from packplan.core.config.run import RunConfig
from packplan.core.errors import RecordError
from packplan.core.samples.identity import digest_record
from packplan.core.samples.tables import NOTHING, DataFile, MeasuredSample, Measurement, MediaFacts, RecordLocation

_OTHERS = "others"
"""Key under which a sample has the fields of a sequence that only a full encode reads."""

_READ_IN_FULL = ("videos", "audios", "objects", "mm_processor_kwargs")
"""Fields of a sequence that only a full encode reads."""

_SIZES = "packplan_sizes"
"""Key under which a row has the sizes in bytes of its video and sound files."""

_IMAGE_PATH = "<img>"
"""Tag that ms-swift reads in a text as the start of an image's path."""


class DatasetRowsFile(RecordFile):
    """Sequences of a data set's rows; the two sequences of a pair have consecutive indices."""

    def __init__(self, rows: Any, *, files: Sequence[str], sequences_per_row: int) -> None:
        """
        Provide the rows of a data set as sequences.

        Args:
            rows: Rows of the data set, a `datasets.Dataset`.
            files: Values of `--dataset` or `--val_dataset`.
            sequences_per_row: 2 if a row is a pair of sequences, else 1.
        """
        self.rows, self.sequences_per_row, self._files = rows, sequences_per_row, files
        self.name, self.folder = " and ".join(files), ""

    def __len__(self) -> int:
        return len(self.rows) * self.sequences_per_row

    def _read_value(self, row: int) -> Any:
        """
        Return the content of the data set row that sequence *row* belongs to.

        The sizes of the row's video and sound files are added to the content, so that the row's
        digest changes if a file is replaced.
        """
        value = self.rows[row // self.sequences_per_row]
        named = chain.from_iterable(value.get(kind) or () for kind in ("videos", "audios"))
        files = chain.from_iterable(one if isinstance(one, list) else [one] for one in named)
        paths = [Path(path) for one in files if isinstance(one, str) and (path := _check_path(one)) is not None]
        sizes = [path.stat().st_size for path in paths if path.is_file()]
        return {**value, _SIZES: sizes} if sizes else value

    def _read_digest(self, row: int) -> bytes:
        return digest_record(self[row])

    def location(self, row: int) -> RecordLocation:
        """
        Return the file and the line of sequence *row*, or else its row in the data set.

        The row is returned if the files are not JSON Lines, or if ms-swift did not make one row of
        each line.
        """
        number, order = row // self.sequences_per_row, self.rows._indices  # noqa: SLF001  # no public way
        at = number if order is None else order.column(0)[number].as_py()
        for file, lines in self._lines:
            if at < len(lines):
                return RecordLocation(file, int(lines[at]))
            at -= len(lines)
        return RecordLocation(self.name, number + 1, self.unit)

    @cached_property
    def _lines(self) -> list[tuple[str, NDArray[np.int64]]]:
        """Name and line numbers of each file; empty if rows and non-blank lines do not match."""
        is_split = "input_ids" in self.rows.column_names  # ms-swift shuffles these rows before it splits them
        if is_split or not all(file.endswith(".jsonl") and Path(file).is_file() for file in self._files):
            return []
        found = []
        for file in self._files:
            with Path(file).open("rb") as lines:
                found.append((file, np.array([number for number, line in enumerate(lines, 1) if line.strip()])))
        total = len(self.rows._data)  # noqa: SLF001  # no public way
        return found if total == sum(len(numbers) for _, numbers in found) else []

    def save_digests(self) -> None:
        """Do nothing, since ms-swift builds the rows again at each start."""


class DatasetRowsEncoder(SwiftEncoder):
    """Encodes the sequences of rows with the template that ms-swift trains with."""

    def __init__(self, config: RunConfig, split: str, *, template: Template, rows: Any) -> None:
        """
        Set up the encoder; for tasks other than causal LM, it encodes each row as a whole.

        Args:
            config: Configuration of the `swift` command's run.
            split: Name of the split that the rows belong to, `train` or `eval`, for messages.
            template: Template in training mode, as the command opens it.
            rows: Rows of the data set, a `datasets.Dataset`.
        """
        self.config, self.template, self.paths, self.cache, self._media = config, template, (), None, None
        files = config.custom.train_jsonl if split == "train" else config.custom.val_jsonl
        self.rows, self.records_per_sample = rows, 2 if config.command and config.command.sequences_per_row == 2 else 1
        self.records = FileRecords([DatasetRowsFile(rows, files=files, sequences_per_row=self.records_per_sample)])
        PIL.Image.MAX_IMAGE_PIXELS = config.custom.max_image_pixels
        self._kind = "split texts" if "input_ids" in rows.column_names else template.task_type

    def data_files(self) -> tuple[DataFile, ...]:
        """Return the data set as a single file."""
        return tuple(DataFile(file, file, "messages", len(self.rows)) for file, _ in self.records.records_per_file)

    def full_encode_reason(self, sample: dict[str, Any]) -> str | None:
        """Return why a row has to be encoded in full; None if the shortcut can measure it."""
        if self._kind != "causal_lm":
            return f"rows of {self._kind} are encoded in full"
        texts = (message["content"] for message in sample["messages"])
        if _OTHERS in sample or any(_IMAGE_PATH in text for text in texts if isinstance(text, str)):
            return f"rows with boxes, videos, sound or {_IMAGE_PATH} are encoded in full"
        return None

    def read_sample(self, index: int) -> dict[str, Any]:
        """Return sequence *index* as messages; RecordError if ms-swift refuses its row."""
        record = self.records.read_checked(index)
        record.pop(_SIZES, None)
        if self._kind != "causal_lm":
            return {"messages": [], _OTHERS: record}
        with self.wrap_encode_errors(index):
            pair = TemplateInputs.from_dict(record)
            held = pair.rejected if index % self.records_per_sample else pair.chosen
            if held is None:
                raise self.record_error(index, "the row has no rejected answer: add rejected_response")
            if held.images:
                held.images = [_path_or_bytes(image) for image in held.images]
            if held.is_multimodal:
                self.template._add_default_tags(held)  # noqa: SLF001  # no public way
        return _to_sample_dict(held)

    def _require_same_as_swift(self, index: int, sample: dict[str, Any], encoded: dict[str, Any]) -> None:
        """Do nothing, since ms-swift's own template encodes the rows anyway."""

    def apply_template(self, index: int, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens and labels of a sequence; RecordError if the template fails."""
        images = sample.get("images", ())
        row = {key: value for key, value in sample.items() if key != _OTHERS}
        with self.wrap_encode_errors(index):
            if self._kind == "split texts":
                encoded = {**sample[_OTHERS], "length": len(sample[_OTHERS]["input_ids"])}
            elif self._kind != "causal_lm":
                length = sum(self.template.encode(sample[_OTHERS], return_length=True)["lengths"])
                encoded = {"length": length, "input_ids": [], "labels": []}
            else:
                row |= {**sample.get(_OTHERS, {}), "images": to_swift_images(images)}
                encoded = dict(self.template.encode(row, return_length=True))
        return {**encoded, IMAGES.count_key: len(images), VIDEOS.count_key: 0}

    def measure_and_check(self, index: int, encoded: dict[str, Any]) -> Measurement:  # noqa: ARG002  # its base names it
        """
        Measure an encoded sequence; its media need no check, since ms-swift has checked them.

        A video adds only to the length. For tasks other than causal LM, a row has one supervised
        token.
        """
        found = measure_encoded(self.template, encoded, images=encoded[IMAGES.count_key], videos=0)
        return found if self._kind in {"causal_lm", "split texts"} else attrs.evolve(found, supervised=1)


class DatasetRowsMeasurer(SwiftMeasurer):
    """
    Measures the rows of a `swift` command; the length of a pair is the sum of its two lengths.
    """

    _encoder: DatasetRowsEncoder

    def _record_indices(self, indices: range) -> range:
        """Return the indices of the sequences of consecutive rows."""
        size = self._encoder.records_per_sample
        return range(indices.start * size, indices.stop * size)

    def _sequences(self, row: int) -> range:
        return self._record_indices(range(row, row + 1))

    def __len__(self) -> int:
        return len(self._encoder.rows)

    def data_digest(self, count: int, *, without: Sequence[int] = ()) -> str:
        """Return the digest of the first *count* rows, except those with an index in *without*."""
        left = [sequence for row in without for sequence in self._sequences(row)]
        return super().data_digest(len(self._record_indices(range(count))), without=left)

    def digest_and_folder(self, index: int) -> tuple[str, str]:
        """Return row *index*'s digest, and the absolute folder where its media paths start."""
        return super().digest_and_folder(self._sequences(index).start)

    def measure_in_full(self, index: int) -> Measurement:
        """Encode the sequences of row *index* in full, and sum their measurements."""
        return sum(map(super().measure_in_full, self._sequences(index)), NOTHING)

    def media_facts(self, index: int, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """Return the size and digest of each media file of row *index*; see `LengthSource`."""
        facts = partial(super().media_facts, decode=decode)
        return tuple(chain.from_iterable(map(facts, self._sequences(index))))

    def measure_batch(self, indices: range, *, in_full: bool) -> list[MeasuredSample | RecordError]:
        """Measure consecutive rows in this process; see `SwiftMeasurer`."""
        outcomes = super().measure_batch(self._record_indices(indices), in_full=in_full)
        by_row = zip(*[iter(outcomes)] * self._encoder.records_per_sample, strict=True)
        return [*map(_join_outcomes, by_row)]

    def sequence_lengths(self, index: int) -> list[int]:
        """Return the length of each sequence in row *index*, which must not be a bad record."""
        outcomes = super().measure_batch(self._sequences(index), in_full=False)
        return [one.measurement.length for one in outcomes if isinstance(one, MeasuredSample)]

    def _split(self, index: int, sample: dict[str, Any], *media: Any) -> SplitSample | None:
        if (reason := self._encoder.full_encode_reason(sample)) is not None:
            self._log_once(reason)
            return None
        return super()._split(index, sample, *media)


def _join_outcomes(parts: Sequence[MeasuredSample | RecordError]) -> MeasuredSample | RecordError:
    """Return the sum of a row's measurements, or the error of its first bad sequence."""
    samples = [one for one in parts if isinstance(one, MeasuredSample)]
    if len(samples) < len(parts):
        return next(one for one in parts if isinstance(one, RecordError))
    facts = tuple(fact for one in samples for fact in one.media)
    return MeasuredSample(sum((one.measurement for one in samples), NOTHING), facts)


def _path_or_bytes(image: Any) -> Any:
    """Return the path of an image, or its content if it is remote or part of the row."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path") or ""
    if not isinstance(image, str):
        return image
    path = None if image.startswith("http") else _check_path(image)
    return load_file(image).getvalue() if path is None else path


def _to_sample_dict(inputs: StdTemplateInputs) -> dict[str, Any]:
    """Convert a sequence in ms-swift's input type into a dict, without its empty fields."""
    system = [] if inputs.system is None else [{"role": "system", "content": inputs.system}]
    sample: dict[str, Any] = {"messages": [*system, *inputs.messages]}
    plain = ("images", "tools", "chat_template_kwargs")
    sample |= {name: value for name in plain if (value := getattr(inputs, name))}
    if others := {name: value for name in _READ_IN_FULL if (value := getattr(inputs, name))}:
        sample[_OTHERS] = others
    return sample
