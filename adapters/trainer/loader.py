"""
Steps that turn packs into batches of the trainer:

1. `PackBatches` yields the indices of this rank's next packs, in the order of the schedule. 2.
`PackedDataset` encodes the samples of these packs again, and compares each sample with the plan. 3.
`Collator` lets ms-swift join the samples into one row, whose positions restart at each sample.
`Collator` also computes the loss weights of the tokens.
4. `PackLoader` of `adapters/loaders/packs.py` moves the batch to the device, and raises errors that
   loader workers returned.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import torch
from swift.template import Template
from swift.utils import get_packed_seq_params, seed_worker
from torch.utils.data import Dataset

from packplan.adapters.families import trained_config
from packplan.adapters.loaders.packs import NORMALISER, PACK, PackOfRows
from packplan.adapters.loaders.rows import MEDIA_TYPE_IDS, POSITIONS
from packplan.adapters.models import replace_attributes
from packplan.adapters.processes import end_with_parent, hide_connection_errors, ignore_foreign_sigterm
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.media import IMAGES
from packplan.adapters.trainer.vision import find_rope_index, token_types
from packplan.adapters.vision_tower import parameter_names
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import PackplanError
from packplan.core.lengths import IntArray
from packplan.core.packs import Packs
from packplan.core.samples.tables import Table

_POWERS = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}
"""Reduction -> power p: in a sample of n supervised tokens, the weight of a token is n ** p."""


class PackedDataset(Dataset[PackOfRows | PackplanError]):
    """
    Data set of packs: item k has the encoded samples of pack k.

    Errors are returned, and the loader raises them. An error that is raised in a loader's worker
    process would lose its type and fields.

    Attributes:
        degrees: Number of ranks that share each pack of an evaluation; None if no pack is shared.
    """

    degrees: IntArray | None = None

    def __init__(self, encoder: SwiftEncoder, packs_of: Callable[[int], Packs], table: Table, *, packed: bool) -> None:
        """
        Store the sources of packs; `set_epoch` then selects the packs of an epoch.

        Args:
            encoder: Encoder of samples, which compares them with the plan.
            packs_of: Function that returns the packs of an epoch.
            table: Measurements of all records, with which encoded samples are compared.
            packed: Whether the samples of a pack share a row. False means that every pack has one
                sample, and that batches are padded.
        """
        self.encoder, self.packs_of, self.table, self.packed = encoder, packs_of, table, packed

    def set_epoch(self, epoch: int) -> None:
        """Select the packs of *epoch*, which `__getitem__` then returns."""
        self.packs = self.packs_of(epoch)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a loader's worker process needs for the packs of one epoch."""
        return {**vars(self), "packs_of": None}

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, pack: int) -> PackOfRows | PackplanError:
        """Return the encoded samples of a pack; an error is returned, not raised."""
        try:
            return PackOfRows([self.encoder.encode_planned(index, self.table) for index in self.packs[pack]], pack)
        except PackplanError as error:
            return error


Sample = dict[str, Any]

Batch = dict[str, Any]

Reduction = Literal["token", "sample", "sqrt"]


@attrs.frozen
class Collator:
    """
    Collator that makes a packed or padded batch of packs, whatever the template's own setting is.
    """

    template: Template

    packed: bool
    """Whether all samples share one row; if not, each sample has its own padded row."""

    reduction: Reduction = "token"
    """Weighting of samples of unequal length in the loss; see `loss_weights`."""

    def __call__(self, items: list[PackOfRows | PackplanError]) -> Batch | PackplanError:
        """Return a batch of packs, or the first item that is an error."""
        packs = [item for item in items if not isinstance(item, PackplanError)]
        if len(packs) < len(items):
            return next(item for item in items if isinstance(item, PackplanError))
        rows = fill_token_weights(packs)
        # ms-swift's collator removes the keys that it joins from samples.
        samples = [dict(sample) for row in rows for sample in row]
        with replace_attributes(self.template, packing=self.packed, padding_free=self.packed):
            batch: Batch = self.template.data_collator(rows if self.packed else [one for (one,) in rows])
        if self.template.model_meta.is_multimodal:
            _add_media_positions(batch, self.template, samples, packed=self.packed)
        scale = batch.get("loss_scale")
        weights = loss_weights(batch["labels"], self._sample_starts(batch), reduction=self.reduction, scale=scale)
        batch[PACK] = tuple(pack.pack for pack in packs)
        batch[NORMALISER] = float(weights.sum(dtype=torch.float64))
        # ms-swift multiplies each token's loss by `loss_scale`. Without one, the model divides by
        # its number of tokens, with the same result. But a batch without tokens would give 0 / 0,
        # and make every weight of the model NaN.
        if self.reduction != "token" or scale is not None or not batch[NORMALISER]:
            batch["loss_scale"] = weights
        return batch

    def _sample_starts(self, batch: Batch) -> torch.Tensor:
        """Return a mask of the first token of each sample; bool, of the labels' shape."""
        if self.packed:
            positions: torch.Tensor = batch["text_position_ids" if "text_position_ids" in batch else "position_ids"]
            return positions == 0
        labels: torch.Tensor = batch["labels"]
        return (torch.arange(labels.shape[1]) == 0).expand_as(labels)


def fill_token_weights(packs: Sequence[Sequence[Any]]) -> list[list[Sample]]:
    """
    Return the samples of packs. If any sample has token weights, every other sample gets weight 1
    at supervised tokens, and 0 at other tokens.

    Otherwise ms-swift would join the existing weights without gaps, and so shift them to other
    tokens.
    """
    if not any("loss_scale" in sample for pack in packs for sample in pack):
        return list(map(list, packs))
    return [
        [{"loss_scale": [float(label != IGNORED_LABEL) for label in one["labels"]], **one} for one in pack]
        for pack in packs
    ]


def _add_media_positions(
    batch: dict[str, Any], template: Template, samples: list[dict[str, Any]], *, packed: bool
) -> None:
    """
    Add three rows of multimodal position ids to a collated batch, if its template computes none.

    A packed batch then has its text positions under `text_position_ids`, as do batches of templates
    that compute both kinds. If the key for pixels is missing, it is added with the value None.

    Args:
        batch: Batch as ms-swift collates it; changed in place.
        template: Template of ms-swift, with its model.
        samples: Encoded samples, in the order of the batch.
        packed: Whether the samples share one row, instead of having a padded row each.
    """
    batch.setdefault(IMAGES.pixels, None)  # some templates read it unconditionally
    text = batch.get(POSITIONS)
    if text is not None and text.dim() == 3:
        return
    rope = find_rope_index(template._get_model())  # noqa: SLF001  # in loader workers a dummy, which `open_template` makes
    if rope is None:
        return
    given, parts = parameter_names(rope), []
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])[None]
        named = {**sample, "input_ids": tokens, MEDIA_TYPE_IDS: token_types(trained_config(template.config), tokens)}
        parts.append(rope(**{key: value for key, value in named.items() if key in given})[0])
    if packed:
        batch |= {POSITIONS: torch.cat(parts, -1), "text_position_ids": text, **get_packed_seq_params(text)}
    else:
        batch[POSITIONS] = template._pad_3d_position_ids(parts)  # noqa: SLF001  # pads on its own side


def loss_weights(
    labels: torch.Tensor, starts: torch.Tensor, *, reduction: Reduction, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return the weight of each label in the loss, which is 0 for ignored labels. The loss of a step
    is the weighted mean of its tokens' losses.

    The reduction `token` gives equal weight to every supervised token, and `sample` to every sample
    with such a token. The reduction `sqrt` (square averaging in InternVL 2.5, 2024) lies between
    the two. With `sqrt`, the weight of a token is n ** -0.5 in a sample of n supervised tokens.
    With *scale*, n is the sum of *scale* over the sample's supervised tokens. The weight of each
    token is also multiplied by the token's value in *scale*.

    Args:
        labels: Labels of shape (rows, length).
        starts: Mask of the first token of each sample, and of each row; bool, of the labels' shape.
        reduction: Weighting of samples of unequal length.
        scale: Factor of each label's weight, of the labels' shape; None for 1.
    """
    counted = (labels != IGNORED_LABEL).float()
    if scale is not None:
        counted = counted * scale
    sample = starts.flatten().cumsum(0) - 1
    sums = torch.zeros(int(sample[-1]) + 1).index_add_(0, sample, counted.flatten())
    each = torch.where(sums > 0, sums, 1.0) ** _POWERS[reduction]
    return each[sample].view_as(labels) * counted


def with_zero_weights(batch: Batch) -> Batch:
    """Return a copy of a batch whose tokens all have weight 0 in losses and metrics."""
    labels = torch.full_like(batch["labels"], IGNORED_LABEL)
    weights = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    return {**batch, "labels": labels, "loss_scale": weights, NORMALISER: 0.0}


def prepare_worker(number: int, *, num_workers: int, rank: int) -> None:
    """
    Make this worker process of a loader end when its rank ends, and set the process's random seed.

    Args:
        number: Index of the worker, from 0.
        num_workers: Number of workers of each rank.
        rank: Rank for which the worker loads packs.
    """
    end_with_parent()
    ignore_foreign_sigterm()
    hide_connection_errors()
    seed_worker(number, num_workers=num_workers, rank=rank)
