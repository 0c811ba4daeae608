"""
What an image will cost in tokens, from its header alone.

The arithmetic is the processor's own: ms-swift shrinks to `max_pixels` (`rescale_image`),
qwen_vl_utils rounds both sides to whole merged patches within its limits (`smart_resize`), and each
merged patch is a token. Nobody turns an image by its EXIF orientation on the way, so the stored
width and height count.
"""

from __future__ import annotations

import hashlib
import math
import stat
import warnings
from io import BytesIO
from pathlib import Path

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import attrs
from PIL import Image, UnidentifiedImageError
from qwen_vl_utils.vision_process import smart_resize
from swift.template import Template

from core.errors import counted
from core.samples import HEAD_BYTES, ImageFacts
from core.samples import Image as Held

PROVEN = frozenset({"qwen2_5_vl", "qwen3_vl"})
"""Templates whose lengths this gives; the audit compares them with full encodes all the same."""


@attrs.frozen
class ImageArithmetic:
    """How one template turns an image's size into patches."""

    patch_size: int
    """Pixels of a patch's side."""

    merge_size: int
    """Patches of a token's side."""

    max_pixels: int | None
    """To which ms-swift shrinks images before anything else; None does not."""

    @classmethod
    def of(cls, template: Template) -> ImageArithmetic | None:
        """Return the arithmetic of a template, None if it is not known."""
        if template.template_meta.template_type not in PROVEN:
            return None
        processor = template.processor.image_processor
        return cls(processor.patch_size, processor.merge_size, template.max_pixels)

    def patches(self, width: int, height: int) -> int:
        """Return the vision patches of an image; ValueError if the processor refuses its shape."""
        if self.max_pixels is not None and 0 < self.max_pixels < width * height:
            ratio = width / height
            scaled = math.sqrt(self.max_pixels / ratio)
            height, width = int(scaled), int(scaled * ratio)
        rows, columns = smart_resize(height, width, factor=self.patch_size * self.merge_size)
        return int(rows // self.patch_size) * int(columns // self.patch_size)


def read_size(image: Held, *, decode: bool = False) -> tuple[int, int]:
    """
    Return the width and height that an image's header gives, in pixels.

    Args:
        image: Path of the file, or what it would hold.

        decode: Read the pixels too, to find damage behind the header.

    Raises:
        ValueError: The image cannot be used, and why.
    """
    path = image if isinstance(image, str) else f"of {counted(len(image), 'byte')} in the record"
    try:
        # A pipe would wait for a writer that never comes.
        if isinstance(image, bytes) or stat.S_ISREG(Path(image).stat().st_mode):
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(BytesIO(image) if isinstance(image, bytes) else image) as opened:
                    if decode:
                        opened.load()
                    return opened.size
        reason = f"the image {path} is a folder, a pipe or a device: name an image file"
    except FileNotFoundError:
        reason = f"the image {path} does not exist: relative paths start at the folder of the data file"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        reason = f"the image {path} has more than {Image.MAX_IMAGE_PIXELS:,} pixels, which may be an attack: shrink it"
    except UnidentifiedImageError:
        reason = f"the image {path} cannot be read, it is damaged or no image: cannot identify image file"
    except (OSError, SyntaxError, ValueError) as error:
        # An error of the system quotes the path once more.
        why = getattr(error, "strerror", None) or error
        reason = f"the image {path} cannot be read, it is damaged or no image: {why}"
    raise ValueError(reason)


def image_facts(image: Held, *, decode: bool = False) -> ImageFacts:
    """
    Return what tells an image from another.

    Args:
        image: Path of the file, or what it would hold.

        decode: Read the pixels too, to find damage behind the header.

    Raises:
        ValueError: The image cannot be used, and why.
    """
    width, height = read_size(image, decode=decode)
    if isinstance(image, bytes):
        head, size = image[:HEAD_BYTES], len(image)
    else:
        with Path(image).open("rb") as file:
            head, size = file.read(HEAD_BYTES), Path(image).stat().st_size
    digest = hashlib.sha256(head).digest()
    return ImageFacts(size, width, height, int.from_bytes(digest[:8], "little", signed=True))
