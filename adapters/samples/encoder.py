"""
Encodes records with ms-swift's template; each error names the record's file and line.

The methods are in the order of their calls. First comes `read_sample`, then `encode_planned` for
training or `encode_and_measure` for measuring, then the methods that these two call. Methods for
shapes, images and videos follow.
"""

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import PIL.Image
import torch
from swift.template import Template

from packplan.adapters.models import replace_attributes
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.data_files import copy_faults, open_records, source_names
from packplan.adapters.samples.data_set import FileRecords, message_options
from packplan.adapters.samples.downloads import MediaCache, fetch_medium
from packplan.adapters.samples.media import IMAGES, VIDEOS, ImageTokens, measure_encoded
from packplan.adapters.samples.media_files import VideoFacts, image_facts, read_image_size, shrink_size, video_facts
from packplan.adapters.samples.media_lengths import VideoCosts
from packplan.adapters.samples.reference import find_difference
from packplan.adapters.samples.template import open_template
from packplan.adapters.samples.video_reading import Sampling, decode_fault, decord_fault, reads_videos, video_sampling
from packplan.core.batch import IGNORED_LABEL
from packplan.core.config.run import RunConfig
from packplan.core.errors import DataSetError, RecordError, StaleError, counted
from packplan.core.samples.media import Image, Video
from packplan.core.samples.records import to_messages
from packplan.core.samples.shapes import MIXABLE, shape_name, to_shape
from packplan.core.samples.tables import DataFile, Measurement, MediaFacts, Table, from_row
from packplan.core.samples.tools import CALL, RESPONSE

_SOUNDS = frozenset({"audio", "tts"})
"""ms-swift's tags of models whose only input besides text is sound."""

_REMEDY = "name a model that reads images in model.model, such as Qwen2.5-VL"

_FETCHED_AT_ONCE = 16
"""Largest number of records whose media are downloaded at the same time."""

_TRIED = 1000
"""
Number of first records of a file that are searched for a valid record. The shape of that record is
the shape of the file.
"""


class SwiftEncoder:
    """
    Encodes records into samples with ms-swift's template.

    Attributes:
        records_per_sample: 2 for the pairs (chosen and rejected) of a `swift` command, else 1.
    """

    records_per_sample = 1

    def __init__(
        self, config: RunConfig, paths: tuple[str, ...], *, template: Template, cache: Path | None = None,
        records: FileRecords | None = None,
    ) -> None:  # fmt: skip
        """
        Open the data files, unless *records* has their records.

        Args:
            config: Configuration of the run whose records are encoded.
            paths: Data files.
            template: Template in training mode.
            cache: Folder of copies of data files that cannot be read in random order.
            records: Records of *paths* if the files are already open; None opens the files.
        """
        self.config, self.paths, self.cache, self.template, custom = config, paths, cache, template, config.custom
        # Set for the whole process, since ms-swift opens images too.
        PIL.Image.MAX_IMAGE_PIXELS = custom.max_image_pixels
        self.records = records or open_records(
            paths, max_line_bytes=custom.max_line_bytes, cache=cache, media=custom.media_dir
        )
        self._media = MediaCache(Path(custom.media_cache)) if custom.media_cache else None
        self._options = message_options(custom)

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def takes_images(self) -> bool:
        """Whether the model accepts images."""
        meta = self.template.model_meta
        return bool(meta.is_multimodal) and not (meta.tags and _SOUNDS.issuperset(meta.tags))

    @cached_property
    def takes_videos(self) -> bool:
        """Whether the model accepts videos, and its template reads them with qwen_vl_utils."""
        return self.takes_images and reads_videos(self.template)

    @cached_property
    def image_tokens(self) -> ImageTokens | None:
        """
        Token that stands for images; None if the model accepts no images.

        ConfigError is raised if the template cannot encode an image.
        """
        return ImageTokens.from_template(self.template) if self.takes_images else None

    def read_sample(self, index: int) -> dict[str, Any]:
        """
        Return record *index* as messages, with media as local paths or as bytes of an image.

        Raises:
            RecordError: The record cannot become a sample.
            StaleError: The record differs from its known digest.
        """
        record = self.records.read_checked(index)
        with self.records.wrap_errors(index, "the record "):
            shaped = to_shape(record, self.config.custom.columns)
            self._refuse_mixed_shapes(index, shaped.shape)
            sample = to_messages(shaped, self._options)
        folder = self.records.media_folder(index)
        with self.records.wrap_errors(index):
            for kind in ("images", "videos"):
                if kind in sample:
                    held = sample[kind]
                    sample[kind] = [fetch_medium(one, folder, self._media, is_video=kind == "videos") for one in held]
        self._refuse_unsupported(index, sample)
        return sample

    def encode_planned(self, index: int, planned: Table) -> dict[str, Any]:
        """
        Encode sample *index*; StaleError if its measurement differs from the planned one.

        Args:
            index: Index of the sample.
            planned: Measurements from which the plan was made; int32, shape (num_records,
                num_columns).
        """
        expected, encoded = from_row(planned, index), self.encode(index)
        found = attrs.evolve(self.measure_and_check(index, encoded), cut=expected.cut)
        if found != expected:
            raise StaleError.for_sample(index, str(self.records.location(index)), expected.differences(found))
        return encoded

    def encode_and_measure(self, index: int, sample: dict[str, Any], *, compared: bool = False) -> Measurement:
        """
        Encode a sample that `read_sample` returned, and measure it.

        The sample is first encoded without truncation. If it exceeds the limit of a template that
        truncates, it is encoded again with the limit.

        Args:
            index: Index of the sample.
            sample: Result of `read_sample`, which is not changed.
            compared: Whether to compare tokens, labels and weights with ms-swift's own encode of
                the record.

        Raises:
            RecordError: The sample cannot be encoded.
            DataSetError: ms-swift encodes the record differently.
        """
        with replace_attributes(self.template, max_length=None):
            encoded = self.encode(index, sample)
            if compared:
                self._require_same_as_swift(index, sample, encoded)
            whole = self.measure_and_check(index, encoded)
        if self.truncation_limit is None or whole.length <= self.truncation_limit:
            return whole
        # The limit holds for each sequence, so a row of two sequences may exceed it untruncated.
        kept = self.measure_and_check(index, self.encode(index, sample))
        return attrs.evolve(kept, cut=kept.length < whole.length)

    @cached_property
    def _reference(self) -> Template:
        """
        Template of `swift sft` for comparisons, unchanged since it was opened, without truncation.
        """
        whole = attrs.evolve(self.config.template, truncation_strategy=None)
        return open_template(self.config.model, whole, packing_length=0, processor=self.template.processor)

    def _require_same_as_swift(self, index: int, sample: dict[str, Any], encoded: dict[str, Any]) -> None:
        record, columns = self.records.read_checked(index), self.config.custom.columns
        if found := find_difference(self._reference, record, to_swift_media(sample), encoded, columns=columns):
            place = self.records.location(index)
            raise DataSetError(f"{place}: {found}; train with swift sft (packplan plugin), and report this")

    @property
    def truncation_limit(self) -> int | None:
        """
        Number of tokens to which a longer sample is truncated; None without truncation.

        Samples are truncated only if `template.truncation_strategy` is `left` or `right`.
        """
        limit: int | None = self.template.max_length
        return limit

    def encode(self, index: int, sample: dict[str, Any] | None = None) -> dict[str, Any]:
        """
        Encode sample *index* with the template; RecordError gives the likeliest cause of a failure.

        Args:
            index: Index of the sample.
            sample: Result of `read_sample`, which is not changed; None reads the record.
        """
        sample = self.read_sample(index) if sample is None else sample
        images, videos = sample.get("images", ()), sample.get("videos", ())
        with self.records.wrap_errors(index):
            for image in images:
                shrink_size(*read_image_size(image), self.template.max_pixels)
        for video in videos:
            self.video_facts(index, video)
        try:
            return self.apply_template(index, sample)
        except RecordError:
            # A damaged image or video is a likelier cause, and a clearer message.
            with self.records.wrap_errors(index):
                for image in images:
                    read_image_size(image, decode=True)
            for video in videos:
                self.require_decodable_video(index, video, sampling=video_sampling(self.config.template))
            raise

    def apply_template(self, index: int, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens and labels of a sample; RecordError if the template fails."""
        with self.wrap_encode_errors(index):
            encoded = dict(self.template.encode(to_swift_media(sample), return_length=True))
        # Some templates make these for a part of the tokens; the model would apply them to all.
        for key in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
            if isinstance(held := encoded.get(key), torch.Tensor) and held.numel() != len(encoded["input_ids"]):
                del encoded[key]
        encoded[IMAGES.count_key] = len(sample.get("images", ()))
        encoded[VIDEOS.count_key] = len(sample.get("videos", ()))
        return self._drop_binary_weights(index, encoded)

    @contextlib.contextmanager
    def wrap_encode_errors(self, index: int) -> Iterator[None]:
        """Turn any exception in this context into a RecordError with the sample's file and line."""
        try:
            yield
        except RecordError:
            raise
        except Exception as error:
            raise self.record_error(index, f"the record cannot be encoded: {type(error).__name__}: {error}") from error

    def _drop_binary_weights(self, index: int, encoded: dict[str, Any]) -> dict[str, Any]:
        """
        Drop the token weights of an encoded sample if all of them are 0 or 1.

        RecordError is raised if the number of other weights differs from the number of labels.
        """
        weights = encoded.pop("loss_scale", None)
        if weights is None or set(weights) <= {0, 1}:
            return encoded
        if len(weights) != len(encoded["labels"]):
            name = self.template.template_meta.template_type
            reason = (
                f"the record has loss weights, which the template {name} does not apply to its "
                f"{len(encoded['labels']):,} tokens: remove loss_scale from its messages, or template.loss_scale"
            )
            raise self.record_error(index, reason)
        return {**encoded, "loss_scale": weights}

    def measure_and_check(self, index: int, encoded: dict[str, Any]) -> Measurement:
        """Measure an encoded sample; RecordError if its media tokens do not match its media."""
        counts = {"images": encoded[IMAGES.count_key], "videos": encoded[VIDEOS.count_key]}
        measurement = measure_encoded(self.template, encoded, **counts)
        held = IMAGES.count(encoded)
        if held not in (None, measurement.images):
            reason = f"the record has {counted(measurement.images, 'image')}, but its encoding has {held:,}"
            raise self.record_error(index, f"{reason}: mark each image with <image> in the text")
        for kind, token, expected in self._media_tokens(measurement):
            if (found := encoded["input_ids"].count(token)) != expected:
                reason = f"the record has {counted(found, f'{kind} token')}, but its {kind}s need {expected:,}"
                raise self.record_error(index, f"{reason}: its text may contain the {kind} token itself")
        return measurement

    def _media_tokens(self, measurement: Measurement) -> Iterator[tuple[str, int, int]]:
        """Yield each kind of medium, the id of its token, and how many such tokens are expected."""
        images = self.image_tokens
        if images is not None and (images.patches_per_token is not None or not measurement.patches):
            yield "image", images.token_id, measurement.patches // (images.patches_per_token or 1)
        if self.takes_videos:
            merge = self.template.processor.image_processor.merge_size**2
            yield "video", self.template.video_token_id, measurement.video_patches // merge

    def decode_text(self, index: int) -> list[tuple[bool, str]]:
        """
        Return the text of sample *index*, split where supervision starts or ends.

        Each part is a pair of a flag, true if the part is supervised, and the part's text.
        RecordError is raised if the record cannot become a sample.
        """
        encoded = self.encode(index)
        pairs = zip(encoded["labels"], encoded["input_ids"], strict=True)
        runs = groupby(pairs, key=lambda pair: pair[0] != IGNORED_LABEL)
        return [(trained, self.template.safe_decode([token for _, token in run])) for trained, run in runs]

    def fetch_media(self, indices: Sequence[int]) -> None:
        """
        Download the remote media of samples, several at a time.

        A failed download raises an error only later, when its sample is read.
        """
        if self._media is not None:
            bar = progress(total=len(indices), desc="fetching media", unit=" records", delay=BRIEF_S)
            with bar, ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
                for _ in pool.map(self._prefetch, indices):
                    bar.update()

    def _prefetch(self, index: int) -> None:
        with contextlib.suppress(RecordError):
            self.read_sample(index)

    def _refuse_unsupported(self, index: int, sample: dict[str, Any]) -> None:
        """
        Raise RecordError for media that the model or this machine cannot read.

        The error is also raised for tools that the template cannot write, and for a `loss` key that
        `template.loss_scale: all` would ignore.
        """
        name = self.template.template_meta.template_type
        for kind in ("images", "videos"):
            if kind in sample and not self.takes_images:
                raise self.record_error(index, f"the record has {kind}, but the model reads text only", _REMEDY)
        if "videos" in sample and not self.takes_videos:
            reason = f"the record has videos, which Packplan cannot read for the template {name}: remove the record"
            raise self.record_error(index, reason)
        if "videos" in sample and (why_not := decord_fault()) is not None and "pip install" in why_not:
            raise self.record_error(index, f"the record has videos, but {why_not}")
        has_tools = "tools" in sample or any(message["role"] in {CALL, RESPONSE} for message in sample["messages"])
        if has_tools and self.template._agent_template is None:  # noqa: SLF001  # its property raises
            reason = f"the record has tools, which the template {name} cannot write"
            raise self.record_error(index, reason, "set template.agent_template, for example to hermes")
        if self.template.loss_scale.base_strategy == "all" and any(
            message.get("loss") is not None and message["role"] not in {"assistant", CALL}
            for message in sample["messages"]
        ):
            reason = "the record has 'loss': false in a message that is no answer, but template.loss_scale: all trains"
            raise self.record_error(index, f"{reason} it anyway: remove the key")

    def copy_faults(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each file that differs from its copy or cache, with a message."""
        return copy_faults(self.paths, cache=self.cache)

    def data_files(self) -> tuple[DataFile, ...]:
        """Return the data files in order, each with its source and the shape of its records."""
        sources = source_names(self.paths, self.config.custom.source_names)
        return tuple(
            DataFile(file, sources[file], shape, records)
            for (file, records), (_, shape) in zip(self.records.records_per_file, self._first_shapes, strict=True)
        )

    @cached_property
    def _first_shapes(self) -> list[tuple[int, str]]:
        """Index and shape of each file's first valid record, from `_first_shape`."""
        ends = [*self.records.first_indices[1:], len(self.records)]
        return [self._first_shape(range(*place)) for place in zip(self.records.first_indices, ends, strict=True)]

    def _first_shape(self, indices: range) -> tuple[int, str]:
        """
        Return the index and shape of the first valid record among *indices*.

        If the first `_TRIED` records are invalid, the first of them with a known shape is returned.
        """
        columns, known = self.config.custom.columns, None
        for index in indices[:_TRIED]:
            with contextlib.suppress(ValueError, RecordError):
                record = self.records[index]
                known = known or (index, shape_name(record, columns))
                to_messages(shaped := to_shape(record, columns), self._options)
                return index, shaped.shape
        return known or (indices.start, "unknown")

    def _refuse_mixed_shapes(self, index: int, shape: str) -> None:
        """
        Raise RecordError if a record's shape may not be mixed with the shape of its file.

        Args:
            index: Index of the sample.
            shape: Shape of the record.
        """
        first, expected = self._first_shapes[bisect.bisect_right(self.records.first_indices, index) - 1]
        if expected not in {"unknown", shape} and not {shape, expected} <= MIXABLE:
            reason = (
                f"the record has the shape {shape}, but {self.records.location(first)} has the shape {expected}: put "
                "records of each shape into a file of their own"
            )
            raise self.record_error(index, reason)

    def image_facts(self, index: int, images: Iterable[Image], *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """
        Return the digest and the size, in pixels and in bytes, of each image of sample *index*.

        Args:
            index: Index of the sample.
            images: Paths or contents of the sample's images.
            decode: Whether to decode the pixels too, to find damage behind the header.

        Raises:
            RecordError: An image cannot be read.
        """
        with self.records.wrap_errors(index):
            return tuple(image_facts(image, decode=decode) for image in images)

    @cached_property
    def video_costs(self) -> VideoCosts | None:
        """
        Method that computes the tokens and patches of videos; None if each video must be decoded.
        """
        return None if decord_fault() else VideoCosts.from_template(self.template, self.config.template)

    def video_facts(self, index: int, video: Video) -> VideoFacts:
        """
        Return a video's frame count, size and digest; RecordError if it is unusable or too large.
        """
        custom = self.config.custom
        with self.records.wrap_errors(index):
            facts = video_facts(video, max_seconds=custom.max_video_s)
        with self.records.wrap_errors(index, f"the video {_video_name(video)} cannot be sampled: "):
            size = self.video_costs.frame_bytes(facts) if self.video_costs is not None else 0
        if size > custom.max_video_bytes:
            reason = (
                f"the sampled frames ({facts.width} x {facts.height}) of the video {_video_name(video)} take "
                f"{counted(size, 'byte')}, above custom.max_video_bytes, {custom.max_video_bytes:,}: lower "
                "template.fps_max_frames, or shrink the video"
            )
            raise self.record_error(index, reason)
        return facts

    def to_media_facts(self, facts: VideoFacts) -> MediaFacts:
        """Return a video's facts in the form in which the length store has them."""
        lengths = self.video_costs
        seconds = facts.num_frames / float(facts.rate) if facts.rate else 0.0
        return facts.to_media_facts(seconds if lengths is None else lengths.seconds(facts))

    def require_decodable_video(self, index: int, video: Video, *, sampling: Sampling | None = None) -> None:
        """
        Decode frames of a video to find damage; the frames are discarded.

        Args:
            index: Index of the sample.
            video: Video of the sample.
            sampling: Sampling of the frames to decode; None decodes all frames.

        Raises:
            RecordError: A frame cannot be decoded.
        """
        if isinstance(video, tuple):
            with self.records.wrap_errors(index):
                for frame in video:
                    read_image_size(frame, decode=True)
        elif (reason := decode_fault(video, sampling)) is not None:
            raise self.record_error(index, reason)

    def record_error(self, index: int, reason: str, remedy: str = "") -> RecordError:
        """
        Return a RecordError that names a sample's file and line.

        Args:
            index: Index of the sample.
            reason: Reason why the record cannot become a sample.
            remedy: Advice on keys of the YAML; empty if only the record can be changed.
        """
        return RecordError(str(self.records.location(index)), reason, remedy)


def to_swift_media(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with its images and videos in the form that ms-swift expects."""
    media: dict[str, Any] = {}
    if videos := sample.get("videos"):
        media["videos"] = [list(video) if isinstance(video, tuple) else video for video in videos]
    if images := sample.get("images"):
        media["images"] = to_swift_images(images)
    return {**sample, **media}


def to_swift_images(images: Iterable[Image]) -> list[Any]:
    """Return images as ms-swift expects them: paths unchanged, bytes inside a dict."""
    return [{"bytes": image, "path": None} if isinstance(image, bytes) else image for image in images]


def _video_name(video: Video) -> str:
    return video if isinstance(video, str) else f"of {counted(len(video), 'frame')}, {video[0]}"
