"""The header of an image file: its size, and the facts that tell it from another."""

import hashlib
import stat
import warnings
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from packplan.core.errors import counted
from packplan.core.samples import HEAD_BYTES, MediaFacts
from packplan.core.samples import Image as Held


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
        most = f"{Image.MAX_IMAGE_PIXELS:,}"
        reason = f"the image {path} has more than {most} pixels: shrink it, or raise custom.max_image_pixels"
    except UnidentifiedImageError:
        reason = f"the image {path} cannot be read, it is damaged or no image: cannot identify image file"
    except (OSError, SyntaxError, ValueError) as error:
        # An error of the system quotes the path once more.
        why = getattr(error, "strerror", None) or error
        reason = f"the image {path} cannot be read, it is damaged or no image: {why}"
    raise ValueError(reason)


def image_facts(image: Held, *, decode: bool = False) -> MediaFacts:
    """
    Return the facts that tell an image from another.

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
    return MediaFacts(size, width, height, int.from_bytes(digest[:8], "little", signed=True))
