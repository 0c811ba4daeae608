"""
The tokens and patches of an image by its size alone, without its pixels.

There are two ways to know: the arithmetic of qwen_vl_utils, by which ms-swift resizes for templates
of Qwen-VL's kind, and what a processor says of itself. A template's way is the first that gives the
lengths of images of several sizes as they encode; what images have in common (marks around them, a
constant that a processor adds) falls out, since only differences from a dummy image count. Nobody
turns an image by its EXIF orientation on the way, so the stored width and height count.
"""

import math
from collections.abc import Iterator
from typing import Any

import attrs
from qwen_vl_utils.vision_process import smart_resize
from swift.template import Template

from packplan.adapters.samples.media import DUMMY_SIZE, MediaCost, encode_image

PROOF_SIZES = ((28, 28), (9, 150), (37, 411), (571, 24), (500, 333), (640, 480), (1100, 90))
"""Widths and heights of the images that a way is compared with encodings of."""


def shrunk(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """
    Return the size to which ms-swift shrinks an image before anything else.

    Args:
        width: In pixels.
        height: In pixels.
        max_pixels: Limit of the template; None shrinks nothing.

    Raises:
        ValueError: It leaves one side of a narrow image no pixel.
    """
    if max_pixels is None or not 0 < max_pixels < width * height:
        return width, height
    ratio = width / height
    scaled = math.sqrt(max_pixels / ratio)
    sides = int(scaled * ratio), int(scaled)
    if not all(sides):
        message = f"template.max_pixels, {max_pixels:,}, leaves an image of {width} x {height} no size: raise it"
        raise ValueError(message)
    return sides


class ImageLengths:
    """A way to know the costs of images from their sizes."""

    name: str
    """The way in words, for the log."""

    def cost(self, width: int, height: int) -> MediaCost:
        """Return the cost of an image of this size; ValueError if its shape is refused."""
        raise NotImplementedError

    def beyond_stand_in(self, width: int, height: int) -> MediaCost:
        """Return the cost of an image beyond the stand-in; ValueError if its shape is refused."""
        return self.cost(width, height) - self.cost(*DUMMY_SIZE)


@attrs.frozen
class QwenArithmetic(ImageLengths):
    """qwen_vl_utils rounds both sides to whole merged patches within its limits."""

    patch_size: int
    """Pixels of a patch's side."""

    merge_size: int
    """Patches of a token's side."""

    max_pixels: int | None

    name = "the arithmetic of qwen_vl_utils"

    def cost(self, width: int, height: int) -> MediaCost:
        """Return the cost of an image of this size; ValueError if its shape is refused."""
        width, height = shrunk(width, height, self.max_pixels)
        rows, columns = smart_resize(height, width, factor=self.patch_size * self.merge_size)
        patches = int(rows // self.patch_size) * int(columns // self.patch_size)
        if not patches:
            message = f"the limits of qwen_vl_utils leave an image of {width} x {height} no size"
            raise ValueError(message)
        return MediaCost(patches // self.merge_size**2, patches)


@attrs.frozen
class ProcessorArithmetic(ImageLengths):
    """A processor says of itself how many tokens an image of some size takes."""

    processor: Any

    unit: int
    """Patches of what the processor counts: a patch, or a tile of many."""

    max_pixels: int | None

    @property
    def name(self) -> str:  # type: ignore[override]
        """The way in words, for the log."""
        return f"what {type(self.processor).__name__} says of sizes"

    def cost(self, width: int, height: int) -> MediaCost:
        """Return the cost of an image of this size; ValueError if its shape is refused."""
        width, height = shrunk(width, height, self.max_pixels)
        said = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])  # noqa: SLF001  # no public way
        return MediaCost(int(said.num_image_tokens[0]), int(said.num_image_patches[0]) * self.unit)


def prove_lengths(template: Template) -> tuple[ImageLengths | None, str]:
    """
    Return the arithmetic that gives the lengths of images by their sizes, and its name.

    It has to agree with full encodes of `PROOF_SIZES`. Otherwise None is returned, and the reason.
    """
    try:
        stands, *costs = (
            MediaCost.from_encoded(template, encode_image(template, size)) for size in (DUMMY_SIZE, *PROOF_SIZES)
        )
    except Exception as error:  # noqa: BLE001  # qwen_vl_utils leaves nothing of thin ones where MAX_PIXELS is low
        return None, f"images of some sizes cannot be encoded ({type(error).__name__}: {error})"
    encoded = {size: cost - stands for size, cost in zip(PROOF_SIZES, costs, strict=True)}
    failures = []
    for arithmetic in _candidates(template, stands):
        why_not = _why_not(arithmetic, encoded)
        if why_not is None:
            return arithmetic, arithmetic.name
        failures.append(why_not)
    if not hasattr(template.processor, "_get_num_multimodal_tokens"):
        failures.append(f"{type(template.processor).__name__} does not say what an image of some size takes")
    return None, "; ".join(failures)


def _candidates(template: Template, stands: MediaCost) -> Iterator[ImageLengths]:
    """Yield the ways that a template may have."""
    images = getattr(template.processor, "image_processor", None)
    patch, merge = (getattr(images, name, None) for name in ("patch_size", "merge_size"))
    # A template that resizes by qwen_vl_utils names its function.
    resizes = "fetch_image" in type(template).replace_tag.__code__.co_names
    if resizes and isinstance(patch, int) and isinstance(merge, int):
        yield QwenArithmetic(patch, merge, template.max_pixels)
    if hasattr(template.processor, "_get_num_multimodal_tokens"):
        plain = ProcessorArithmetic(template.processor, 1, template.max_pixels)
        units = plain.cost(*DUMMY_SIZE).patches
        yield attrs.evolve(plain, unit=stands.patches // units if units else 1)


def _why_not(arithmetic: ImageLengths, encoded: dict[tuple[int, int], MediaCost]) -> str | None:
    """Return the first difference between a way and encodings, or None."""
    for (width, height), cost in encoded.items():
        found = arithmetic.beyond_stand_in(width, height)
        if found != cost:
            beyond = f"than one of {DUMMY_SIZE[0]} x {DUMMY_SIZE[1]}"
            return (
                f"{arithmetic.name} gives an image of {width} x {height} {found.tokens:,} tokens and "
                f"{found.patches:,} patches more {beyond}, where it has {cost.tokens:,} and {cost.patches:,}"
            )
    return None
