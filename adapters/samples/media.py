"""
Counts the images and videos in an encoded sample, and their patches and tokens.

Templates encode images as patches with a grid for each image, as slices with a grid for each slice,
or as tiles of one size. For every template, the counts are read from the encoded sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from PIL import Image
from swift.template import Template

from packplan.adapters.families import trained_config
from packplan.adapters.models import replace_attributes
from packplan.core.errors import ConfigError
from packplan.core.samples.tables import Measurement

FRAMES_PER_LAYER = 2
"""Number of consecutive video frames that become one layer of patches."""

Encoded = Mapping[str, Any]


DUMMY_SIZE = (56, 56)
"""
Width and height in pixels of black images and video frames. These stand in for media while samples
are measured, and for images on ranks without images. They also reveal a template's image token.
"""


@attrs.frozen
class MediaKind:
    """Kind of media, images or videos, with its keys in encoded samples."""

    count_key: str
    """Key under which `SwiftEncoder` adds the number of media to an encoded sample."""

    pixels: str
    """Key of the pixels in an encoded sample."""

    grids: tuple[str, ...]
    """Keys of grids. A row of a grid has a medium's number of patches in each dimension."""

    slices: tuple[str, ...]
    """Keys of grids that have one row for each slice of a medium."""

    def count(self, encoded: Encoded) -> int | None:
        """Return the number of media in an encoded sample; None if the sample has no grids."""
        found = next((encoded[key] for key in self.grids if encoded.get(key) is not None), None)
        return None if found is None else len(found)

    def count_patches(self, encoded: Encoded, *, config: Any) -> int:
        """
        Return the number of vision patches in an encoded sample, before merging.

        Args:
            encoded: Sample, encoded by its template.
            config: Configuration of the model; its patch size is used for templates with tiles.
        """
        for key in (*self.grids, *self.slices):
            if encoded.get(key) is not None:
                return int(torch.as_tensor(encoded[key]).prod(-1).sum())
        if (pixels := encoded.get(self.pixels)) is None:
            return 0
        side, parts = _find_patch_size(config), pixels if isinstance(pixels, list) else [pixels]
        shapes = [part.shape for part in parts]
        return sum(shape[:-3].numel() * (shape[-2] // side) * (shape[-1] // side) for shape in shapes)


VIDEOS = MediaKind("num_videos", "pixel_values_videos", ("video_grid_thw",), ())

IMAGES = MediaKind("num_images", "pixel_values", ("image_grid_thw", "image_grid_hws", "grid_thws"), ("target_sizes",))


def _find_patch_size(config: Any) -> int:
    """Return the side of a patch in pixels; 1 if the model's configuration does not state it."""
    vision = getattr(trained_config(config), "vision_config", None)
    size = (vision.get("patch_size") if isinstance(vision, Mapping) else getattr(vision, "patch_size", None)) or 1
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def measure_encoded(template: Template, encoded: Encoded, *, images: int, videos: int) -> Measurement:
    """
    Return the measurement of an encoded sample.

    Args:
        template: Template that encoded the sample.
        encoded: Sample, encoded by its template.
        images: Number of images in the record.
        videos: Number of videos in the record.
    """
    return Measurement(
        length=encoded["length"],
        supervised=sum(label >= 0 for label in encoded["labels"][1:]),
        images=images,
        patches=IMAGES.count_patches(encoded, config=template.config),
        videos=videos,
        frames=FRAMES_PER_LAYER * int(encoded["video_grid_thw"][:, 0].sum()) if videos else 0,
        video_patches=VIDEOS.count_patches(encoded, config=template.config),
    )


def encode_media(template: Template, **media: list[Any]) -> dict[str, Any]:
    """
    Encode a short question about some media, without truncation.

    Args:
        template: Template of a vision model.
        **media: Lists `images` or `videos`, in the form that the template expects.
    """
    tags = "".join(f"<{kind[:-1]}>" * len(held) for kind, held in media.items())
    messages = [{"role": "user", "content": f"{tags}?"}, {"role": "assistant", "content": "."}]
    with replace_attributes(template, max_length=None):
        return dict(template.encode({"messages": messages, **media}, return_length=True))


def encode_image(template: Template, size: tuple[int, int] | None) -> dict[str, Any]:
    """
    Encode a sample with a black image, without truncation.

    Args:
        template: Template of a vision model.
        size: Width and height of the image in pixels; None encodes the sample without an image.
    """
    return encode_media(template, images=[] if size is None else [Image.new("RGB", size)])


@attrs.frozen
class ImageTokens:
    """Token that a template repeats in a sample for the patches of an image."""

    token_id: int

    patches_per_token: int | None
    """Number of vision patches for each image token; None if it is not a whole number."""

    @classmethod
    def from_template(cls, template: Template) -> ImageTokens:
        """
        Return the token that an image adds most often to an encoded sample.

        Raises:
            ConfigError: The template cannot encode an image, or the image adds no token.
        """
        try:
            without, encoded = (encode_image(template, size) for size in (None, DUMMY_SIZE))
        except Exception as error:
            install = f": install {error.name}" if isinstance(error, ImportError) and error.name else ""
            reason = f"is {template.template_meta.template_type}, which cannot encode an image here{install}"
            raise ConfigError.for_key("template.template", f"{reason} ({type(error).__name__}: {error})") from error
        added = Counter(encoded["input_ids"]) - Counter(without["input_ids"])
        if not added:
            reason = f"is {template.template_meta.template_type}, in which images add no token: name another template"
            raise ConfigError.for_key("template.template", reason)
        (token, number), *_ = added.most_common(1)
        patches = IMAGES.count_patches(encoded, config=template.config)
        return cls(token, patches // number if patches % number == 0 else None)
