"""
Inputs of a policy for a microbatch: tokens, positions, and the images and videos of its sequences.

Rules: media belong to sequences, one mapping of tensors each, so that they follow them wherever a
batch is cut. They are joined for one forward pass at a time. Answers to one prompt share its
mapping: nothing is copied in a process, and what is pickled for another process holds it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from packplan.adapters.families import trained_config
from packplan.adapters.loaders.positions import positions_of
from packplan.adapters.loaders.rows import joined_media
from packplan.adapters.microbatches import BatchedData, Microbatch
from packplan.core.errors import ConfigError

MEDIA = "media"
"""
Field of a batch: tensors of each sequence's images and videos, by the names of the model's inputs.
"""

MEDIA_WORK = "media_work"
"""Field of a batch: FLOPs of each sequence's images and videos; float64, shape (batch,)."""

_SECONDS = "second_per_grid_ts"

_BY_TOKEN = frozenset({"mm_token_type_ids", "attention_mask", "labels", "loss_scale"})
"""Tensors of an encoding that are no media; positions follow from the tokens."""

_REFUSED = frozenset({"token_type_ids", "cross_attention_mask"})
"""Inputs for each token beside images, which answers of any length would lack."""

_NEVER = -1e4
"""Logit of a token that is never sampled; finite, so that no loss is NaN."""

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def media_of(encoded: Mapping[str, Any]) -> dict[str, Tensor]:
    """
    Return the images and videos of an encoded prompt, by the names of the model's inputs.

    Raises:
        ConfigError: The model takes them in a form that cannot be joined over sequences.
    """
    listed = {key for key, value in encoded.items() if key.startswith("pixel_values") and isinstance(value, list)}
    if others := sorted(listed | _REFUSED.intersection(encoded)):
        reason = f"takes {', '.join(others)} with images, which packplan rl cannot join: name one such as Qwen2.5-VL"
        raise ConfigError.at("model.model", reason)
    media = {key: value for key, value in encoded.items() if isinstance(value, Tensor) and key not in _BY_TOKEN}
    if encoded.get(_SECONDS) is not None:
        media[_SECONDS] = torch.tensor(encoded[_SECONDS])
    # ms-swift creates them in inference mode, in which no gradient can pass them.
    return {key: value.clone() for key, value in media.items()}


def never_sample_placeholders(model: Any) -> None:
    """
    Give the tokens that stand for media no probability, in every forward pass of a model.

    A sampled placeholder would have no image, and no model could compute the sequence.
    """
    config = trained_config(model.config)
    named = (getattr(config, name, None) for name in _PLACEHOLDERS)
    ids = torch.tensor([token for token in named if token is not None], dtype=torch.long)

    def lower(_: Any, __: Any, logits: Tensor) -> Tensor:
        return logits.index_fill_(-1, ids.to(logits.device), _NEVER)

    model.get_output_embeddings().register_forward_hook(lower)


@attrs.frozen(eq=False)
class PolicyInputs:
    """Makes the inputs of a model's forward pass."""

    positions: Callable[[Mapping[str, Any]], Tensor] | None
    """Function of `positions_of`; None counts tokens."""

    device: torch.device

    @classmethod
    def from_model(cls, model: Any) -> PolicyInputs:
        """Return the maker of inputs for a model of transformers."""
        return cls(positions_of(model), model.device)

    def forward(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """
        Return the inputs of a packed row, or of padded rows.

        `position_ids` have the shape (rows, width), or (4, rows, width) for models that place
        images, with the text's first.
        """
        inputs = {
            "input_ids": microbatch.input_ids,
            "position_ids": self._placed(microbatch.position_ids, microbatch.cu_seqlens_padded, microbatch.data),
        }
        if microbatch.attention_mask is not None:
            inputs["attention_mask"] = microbatch.attention_mask
        return self._with_media(inputs, microbatch.data)

    def prompts(self, data: BatchedData) -> dict[str, Tensor]:
        """
        Return the inputs that answers are generated from: prompts padded on the left.

        Positions are as in `forward`. Those of the next token are the last ones plus 1.

        Args:
            data: Prompts, padded on the right.
        """
        data = data.truncate(int(data.lengths.max()))
        padding = (data.width - data.lengths)[:, None]
        columns = torch.arange(data.width)
        starts = torch.arange(len(data)) * data.width + padding[:, 0]
        inputs = {
            "input_ids": data.tensor("input_ids").gather(1, (columns - padding) % data.width),
            "attention_mask": (columns >= padding).long(),
            "position_ids": self._placed((columns - padding).clamp(min=0), starts, data),
        }
        return self._with_media(inputs, data)

    def _placed(self, text: Tensor, starts: Tensor, data: BatchedData) -> Tensor:
        """
        Return the positions of rows: the text's, and below them the model's own of each sequence.

        Args:
            text: Positions that count tokens; shape (rows, width).
            starts: Start of each sequence in all rows, one row after the other.
            data: The sequences.
        """
        if self.positions is None:
            return text
        rows = text.expand(4, -1, -1).clone()
        flat, ids = rows.view(4, -1), data.tensor("input_ids")
        places = zip(starts.tolist(), data.lengths.tolist(), _held(data), strict=False)
        for number, (start, length, media) in enumerate(places):
            own = self.positions({"input_ids": ids[number, :length], **media})
            flat[1:, start : start + length] = own[:, 0]
        return rows

    def _with_media(self, inputs: dict[str, Tensor], data: BatchedData) -> dict[str, Tensor]:
        return {name: part.to(self.device) for name, part in {**inputs, **joined_media(_held(data))}.items()}


def _held(data: BatchedData) -> Sequence[Mapping[str, Tensor]]:
    """Return the media of each sequence; empty for those without, and in batches of text."""
    return data[MEDIA] if MEDIA in data else [{}] * len(data)  # type: ignore[return-value]  # a list
