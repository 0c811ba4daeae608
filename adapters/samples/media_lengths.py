"""
Computes the tokens and patches of images and videos from their sizes, without their pixels.

For images there are two methods. The first is the arithmetic of qwen_vl_utils, by which ms-swift
resizes images for templates like Qwen-VL's. The second asks the processor for the numbers of tokens
and patches. A template uses the first method that agrees with encoded images of several sizes.
Width and height are read from the header, since ms-swift ignores EXIF orientation.

For videos, the arithmetic of qwen_vl_utils gives the number of sampled frames and their scaled
size. Two frames make one layer of patches. Qwen3-VL writes the time of each layer as text in front
of it, and the tokens of this text are counted too.

A medium counts by its cost beyond that of a stand-in of the same kind. So the tokens that mark
media, and the constant costs of a processor, cancel out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import attrs
import torch
from PIL import Image
from qwen_vl_utils import vision_process
from swift.template import Template

from packplan.adapters.samples.media import DUMMY_SIZE, FRAMES_PER_LAYER, encode_image, encode_media, measure_encoded
from packplan.adapters.samples.media_files import VideoFacts, shrink_size
from packplan.adapters.samples.video_reading import Sampling, reads_videos, video_sampling
from packplan.core.config.run import TemplateConfig
from packplan.core.errors import counted
from packplan.core.samples.tables import NOTHING, Measurement

log = logging.getLogger(__name__)

PROOF_SIZES = ((28, 28), (9, 150), (37, 411), (571, 24), (500, 333), (640, 480), (1100, 90))
"""Widths and heights in pixels of the images for which a method has to agree with full encodes."""


_LARGE = (150, 70)
"""Width and height in pixels of the larger test frames that check the computed costs of videos."""


@attrs.frozen
class ImageCosts:
    """Method that computes the tokens and patches of an image from its size."""

    name: str
    """Name of the method in the log."""

    cost: Callable[[int, int], Measurement]
    """
    Function that returns the cost of an image from its width and height in pixels; ValueError if
    ms-swift refuses that size.
    """

    def extra_cost(self, width: int, height: int) -> Measurement:
        """
        Return an image's cost minus the stand-in's cost; ValueError if ms-swift refuses its size.
        """
        return self.cost(width, height) - self.cost(*DUMMY_SIZE)


def find_image_costs(template: Template) -> ImageCosts | None:
    """Return the first method that agrees with full encodes for all `PROOF_SIZES`, or None."""
    try:
        stand_in, *costs = (
            measure_encoded(template, encode_image(template, size), images=0, videos=0)
            for size in (DUMMY_SIZE, *PROOF_SIZES)
        )
    except Exception as error:  # noqa: BLE001  # qwen_vl_utils leaves nothing of thin ones where MAX_PIXELS is low
        log.info("images of some sizes cannot be encoded: %s: %s", type(error).__name__, error)
        return None
    extra = [cost - stand_in for cost in costs]
    ways = _image_cost_methods(template, stand_in)
    return next((way for way in ways if [way.extra_cost(*size) for size in PROOF_SIZES] == extra), None)


# Other processes receive these functions by pickling, so they are on the module's top level.


def _qwen_cost(patch: int, merge: int, most: int | None, width: int, height: int) -> Measurement:
    # Both sides are rounded to whole merged patches within the limits.
    width, height = shrink_size(width, height, most)
    rows, columns = vision_process.smart_resize(height, width, factor=patch * merge)
    patches = int(rows // patch) * int(columns // patch)
    if not patches:
        raise ValueError(f"qwen_vl_utils shrinks an image of {width} x {height} to 0: raise IMAGE_MAX_TOKEN_NUM")
    return Measurement(patches // merge**2, 0, 0, patches)


def _processor_cost(processor: Any, unit: int, most: int | None, width: int, height: int) -> Measurement:
    width, height = shrink_size(width, height, most)
    said = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])  # noqa: SLF001  # no public way
    return Measurement(int(said.num_image_tokens[0]), 0, 0, int(said.num_image_patches[0]) * unit)


def _image_cost_methods(template: Template, stand_in: Measurement) -> Iterator[ImageCosts]:
    """Yield methods to try; *stand_in* is the measurement of a sample with one stand-in image."""
    processor, most = template.processor, template.max_pixels
    images: Any = getattr(processor, "image_processor", None)
    patch: Any = getattr(images, "patch_size", None)
    merge: Any = getattr(images, "merge_size", None)
    # A template that resizes with qwen_vl_utils calls its function `fetch_image`.
    resizes = "fetch_image" in type(template).replace_tag.__code__.co_names
    if resizes and isinstance(patch, int) and isinstance(merge, int):
        yield ImageCosts("the arithmetic of qwen_vl_utils", partial(_qwen_cost, patch, merge, most))
    if hasattr(processor, "_get_num_multimodal_tokens"):
        # Some processors count patches, others count tiles of many patches.
        units = _processor_cost(processor, 1, most, *DUMMY_SIZE).patches
        says = partial(_processor_cost, processor, stand_in.patches // units if units else 1, most)
        yield ImageCosts(f"the sizes that {type(processor).__name__} computes", says)


@attrs.frozen
class VideoCosts:
    """Method that computes the tokens and patches of videos under one template."""

    patch_size: int
    merge_size: int
    sampling: Sampling

    tokenizer: Any
    """Tokenizer if the template writes the time of each layer of frames as text, else None."""

    @classmethod
    def from_template(cls, template: Template, config: TemplateConfig) -> VideoCosts | None:
        """
        Return the method for a template; None if the costs of videos cannot be computed.

        None is returned if the template reads no videos, or if its limits allow no size for the
        test frames. None is also returned if the computed cost of a black video differs from a full
        encode.

        Args:
            template: Template of a vision model.
            config: Section `template`, whose keys set the sampling of videos.
        """
        if not reads_videos(template):
            return None
        images = template.processor.image_processor
        stamped = template.tokenizer if template.version == "v3" else None
        lengths = cls(images.patch_size, images.merge_size, video_sampling(config), stamped)
        try:
            expected = lengths.extra_cost(_black_video_facts(_LARGE, 5))
        except ValueError:  # the run's limits allow no size for such frames
            return None
        small, large = _measure_black_video(template, DUMMY_SIZE, 2), _measure_black_video(template, _LARGE, 5)
        return lengths if large - small == expected else None

    def extra_cost(self, facts: VideoFacts) -> Measurement:
        """
        Return a video's cost minus the stand-in's; ValueError if qwen_vl_utils refuses the video.
        """
        return self.cost(facts) - self.cost(_black_video_facts(DUMMY_SIZE, 2))

    def frame_bytes(self, facts: VideoFacts) -> int:
        """
        Return the memory in bytes of a video's sampled frames before scaling.

        ValueError is raised if qwen_vl_utils refuses the number or the size of the frames.
        """
        frames, _ = self._sampled_indices(facts)
        self._scaled_size(facts, len(frames))
        return len(frames) * facts.width * facts.height * 3

    def seconds(self, facts: VideoFacts) -> float:
        """Return a video's duration in seconds; a list of frames is played at the sampling rate."""
        return facts.num_frames / float(facts.rate or self._sampling_rate())

    def cost(self, facts: VideoFacts) -> Measurement:
        """
        Return a video's tokens and patches; ValueError if qwen_vl_utils refuses its frames.
        """
        frames, rate = self._sampled_indices(facts)
        rows, columns = self._scaled_size(facts, len(frames))
        layers = len(frames) // FRAMES_PER_LAYER
        patches = layers * (rows // self.patch_size) * (columns // self.patch_size)
        tokens = patches // self.merge_size**2
        if self.tokenizer is not None:
            pairs = zip(frames[::FRAMES_PER_LAYER], frames[1::FRAMES_PER_LAYER], strict=True)
            times = ((first / rate + last / rate) / 2 for first, last in pairs)
            # A layer has its time in front of it, and a start token and an end token around it.
            tokens += sum(_count_tokens(self.tokenizer, f"<{time:.1f} seconds>") + 2 for time in times)
        return attrs.evolve(NOTHING, length=tokens, frames=len(frames), video_patches=patches)

    def _sampling_rate(self) -> float:
        return float(self.sampling.get("fps", vision_process.FPS))

    def _sampled_indices(self, facts: VideoFacts) -> tuple[list[int], float]:
        """
        Return the sampled frames' indices, and the rate; ValueError for a file with one frame.
        """
        if not facts.rate:
            return list(range(vision_process.ceil_by_factor(facts.num_frames, FRAMES_PER_LAYER))), self._sampling_rate()
        if facts.num_frames < FRAMES_PER_LAYER:
            message = f"it has {counted(facts.num_frames, 'frame')}, but needs {FRAMES_PER_LAYER}: use it as an image"
            raise ValueError(message)
        rate = float(facts.rate)
        number = vision_process.smart_nframes(dict(self.sampling), total_frames=facts.num_frames, video_fps=rate)
        return torch.linspace(0, facts.num_frames - 1, number).round().long().tolist(), rate

    def _scaled_size(self, facts: VideoFacts, num_frames: int) -> tuple[int, int]:
        """
        Return height and width of sampled frames after scaling; ValueError if no size is valid.
        """
        rules, given = vision_process, self.sampling
        factor = self.patch_size * rules.SPATIAL_MERGE_SIZE
        height, width = facts.height, facts.width
        if not facts.rate:  # listed frames are first resized as images, in units of twice the side
            unit = factor * rules.SPATIAL_MERGE_SIZE
            least = given.get("min_pixels", rules.IMAGE_MIN_TOKEN_NUM * unit**2)
            most = given.get("max_pixels", rules.IMAGE_MAX_TOKEN_NUM * unit**2)
            height, width = _resized_frame_size(height, width, unit, least, most)
        least = given.get("min_pixels", rules.VIDEO_MIN_TOKEN_NUM * factor**2)
        total = given.get("total_pixels", rules.MODEL_SEQ_LEN * factor**2 * 0.9)
        frame = max(
            min(rules.VIDEO_MAX_TOKEN_NUM * factor**2, total / num_frames * rules.FRAME_FACTOR), int(least * 1.05)
        )
        return _resized_frame_size(height, width, factor, least, min(given.get("max_pixels", frame), frame))


def _resized_frame_size(height: int, width: int, factor: int, least: float, most: float) -> tuple[int, int]:
    """
    Return a frame's height and width after the resize of qwen_vl_utils, which may raise ValueError.
    """
    if most < least:
        fact = f"frames need at least {least:,.0f} pixels, but may have at most {most:,.0f}"
        raise ValueError(f"{fact}: lower template.video_min_pixels")
    try:
        rows, columns = vision_process.smart_resize(height, width, factor, least, most)
    except ValueError as error:
        raise ValueError(f"frames of {width} x {height}: {error}") from None
    if not rows or not columns:
        raise ValueError(f"a limit of {most:,.0f} pixels shrinks frames of {width} x {height} to 0: raise the limit")
    return int(rows), int(columns)


@lru_cache(maxsize=100_000)
def _count_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _black_video_facts(size: tuple[int, int], number: int) -> VideoFacts:
    """Return the facts of a video with *number* listed frames of width and height *size*."""
    return VideoFacts(0, *size, number, Fraction(0), 0)


def _measure_black_video(template: Template, size: tuple[int, int], number: int) -> Measurement:
    """Encode a sample with a video of *number* black frames, and return its measurement."""
    frames = [Image.new("RGB", size)] * number
    return measure_encoded(template, encode_media(template, videos=[frames]), images=0, videos=1)
