"""
Compares a pack, as training sees it, with its samples alone, as transformers sees them.

The reference attends by transformers' own attention, whatever trains: a fault in an attention of
ours is found, not repeated. The pack goes the whole way of training: data set, collator, the
trainer's preparation, ms-swift's hooks. The reference goes none of it: each sample's encoding
alone, positions by the model itself, no mask but the causal one.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from packplan.adapters.attention import native_attention
from packplan.adapters.families import trained_config
from packplan.adapters.loaders.positions import rope_of, takes
from packplan.adapters.models import Gradients, add_gradients, difference_norms, evaluating
from packplan.adapters.samples.encoder import IGNORED_LABEL
from packplan.adapters.samples.media import IMAGES, VIDEOS
from packplan.adapters.trainer.base import model_inputs
from packplan.adapters.trainer.loader import NORMALISER
from packplan.adapters.trainer.packed_dataset import EncodedPack
from packplan.adapters.trainer.static import PackTrainer
from packplan.adapters.trainer.vision import model_media
from packplan.core.equality import Deviation, loss_difference
from packplan.core.errors import PackplanError
from packplan.core.packs import Packs

_ROWS = ("text", "temporal", "height", "width")

_CHANGED_SAMPLES = 8
"""Samples of a pack that are changed, one at a time: the first, the last, and others between."""


@attrs.frozen
class _Span:
    """Place of a sample in its pack."""

    index: int

    tokens: slice

    pixels: slice
    """Part of the pack's pixel values along *axis*."""

    axis: int
    """Axis along which a pack joins the pixel values of its samples."""

    frames: slice
    """Rows of the pack's patches of videos."""


@attrs.frozen(eq=False)
class _Alone:
    """Results of a sample alone, without gradients."""

    logits: torch.Tensor
    """float32 of shape (length, vocabulary)."""

    positions: torch.Tensor
    """Position ids; int64, shape (rows, length)."""

    losses: torch.Tensor
    """Losses of the supervised tokens; float64."""

    terms: torch.Tensor
    """Size of the two terms of each loss; float64, of the losses' shape."""


@attrs.frozen(eq=False)
class PackComparison:
    """Compares the packs of a trainer with their samples alone."""

    trainer: PackTrainer

    encode: Callable[[int], dict[str, Any]]
    """Encodes a sample afresh."""

    packs: Packs
    """Packs of the plan."""

    @property
    def without_gradients(self) -> str | None:
        """Why gradients, and so the loss of a step, are not compared; None if they are."""
        config = trained_config(self.trainer.model.config)
        flex = config._attn_implementation == "flex_attention"  # noqa: SLF001  # no public question
        if flex and self.trainer.accelerator.device.type == "cpu":
            return "flex attention has no backward pass on a CPU"
        return None

    def findings(self, pack: int) -> Iterator[Deviation]:
        """
        Yield the deviations of a pack.

        Args:
            pack: Position of the pack in the plan.

        Raises:
            PackplanError: A sample is not the one that was planned.
        """
        with evaluating(self.trainer.model):  # dropout is no difference
            yield from self._findings(pack)

    def _findings(self, pack: int) -> Iterator[Deviation]:
        indices = self.packs[pack]
        served = self.trainer.train_dataset.encoded(pack, indices)
        if isinstance(served, PackplanError):
            raise served
        encoded = [self.encode(index) for index in indices]
        collated = self._collated(served)
        spans = list(_spans(indices, encoded, collated))
        alone = [self._alone(sample) for sample in encoded]
        prepared, logits = self._packed(collated)
        scale = max(_largest(one.logits) for one in alone)
        yield from _positions(pack, spans, alone, prepared["position_ids"])
        yield from _labels(pack, spans, encoded, collated["labels"][0])
        losses = _losses(logits, collated["labels"][0])
        for span, one in zip(spans, alone, strict=True):
            # By the predicted token. A sample's first one is included, which the sample before
            # predicts.
            mine = losses[span.tokens][collated["labels"][0][span.tokens] != IGNORED_LABEL]
            yield Deviation("logits", _largest(logits[span.tokens] - one.logits) / scale, pack, span.index)
            if one.losses.numel():
                means = (float(values.double().mean()) for values in (mine, one.losses))
                different = loss_difference(*means, terms=float(one.terms.mean()))
                yield Deviation("sample loss", different, pack, span.index)
        yield from self._isolation(pack, collated, spans, logits, scale)
        if self.without_gradients is None:
            yield from self._gradients(pack, collated, encoded)

    def _collated(self, served: EncodedPack) -> dict[str, Any]:
        device = self.trainer.accelerator.device
        collated = self.trainer.data_collator([served])
        return {key: value.to(device) if torch.is_tensor(value) else value for key, value in collated.items()}

    def _packed(self, collated: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
        """
        Return the inputs that the trainer prepares from a pack, and all logits: float32 of shape
        (length, vocabulary).
        """
        trainer = self.trainer
        with (
            torch.no_grad(),
            trainer.media_hook(),
            trainer.accelerator.autocast(),
            trainer.template.forward_context(trainer.model, dict(collated)),
        ):
            prepared = trainer._prepare_inputs(dict(collated))  # noqa: SLF001  # what training does, and no less
            inputs = model_inputs(prepared)
            inputs.pop("logits_to_keep", None)
            return prepared, trainer.model(**inputs).logits[0].float()

    def _reference(self, sample: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return a sample's encoding as the model's own inputs, a batch of one."""
        device = self.trainer.accelerator.device
        length = len(sample["input_ids"])
        inputs = {"input_ids": torch.tensor(sample["input_ids"])[None], "attention_mask": torch.ones(1, length).long()}
        inputs |= model_media(self.trainer.model, sample)
        return {key: value.to(device) for key, value in inputs.items()}

    def _alone(self, sample: dict[str, Any]) -> _Alone:
        inputs = self._reference(sample)
        native = native_attention(self.trainer.model, self.trainer.attention.native)
        with torch.no_grad(), self.trainer.accelerator.autocast(), native:
            logits = self.trainer.model(**inputs).logits[0].float()
        labels = torch.tensor(sample["labels"], device=logits.device)
        losses, terms = (of(logits, labels)[labels != IGNORED_LABEL].double() for of in (_losses, _terms))
        return _Alone(logits, self._own_positions(inputs), losses, terms)

    def _own_positions(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        Return the positions that the model itself gives a sample: the text's, then three rows if
        the model takes images.
        """
        text = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)[None]
        rope = rope_of(self.trainer.model)
        if rope is None:
            return text
        if IMAGES.rows(inputs) is None and VIDEOS.rows(inputs) is None:
            return text.expand(4, -1)
        given = takes(rope)
        positions, _ = rope(**{key: value for key, value in inputs.items() if key in given})
        return torch.cat([text, positions[:, 0]])

    def _isolation(
        self, pack: int, collated: dict[str, Any], spans: list[_Span], logits: torch.Tensor, scale: float
    ) -> Iterator[Deviation]:
        for number in torch.linspace(0, len(spans) - 1, min(_CHANGED_SAMPLES, len(spans))).round().int().tolist():
            changed = spans[number]
            embeddings = self.trainer.model.get_input_embeddings()
            with embeddings.register_forward_hook(partial(_change_tokens, changed.tokens)):
                _, moved = self._packed(_with_other_pixels(collated, changed))
            for span in spans:
                move = _largest(moved[span.tokens] - logits[span.tokens]) / scale
                if span is changed:
                    yield Deviation("sensitivity", move, pack, span.index)
                else:
                    detail = f"when sample {changed.index} changes"
                    yield Deviation("isolation", move, pack, span.index, detail)

    def _gradients(self, pack: int, collated: dict[str, Any], encoded: list[dict[str, Any]]) -> Iterator[Deviation]:
        trainer, model = self.trainer, self.trainer.model
        weights = self._weights(encoded)
        normaliser = float(torch.cat(weights).sum()) or 1.0
        expected = terms = norms = 0.0
        reference: Gradients = {}
        for sample, weight in zip(encoded, weights, strict=True):
            model.zero_grad()
            # Checkpointed layers run again in the backward pass.
            with native_attention(model, trainer.attention.native):
                with trainer.accelerator.autocast():
                    logits = model(**self._reference(sample)).logits[0].float()
                labels = torch.tensor(sample["labels"], device=logits.device)
                losses = _losses(logits, labels)
                share = weight.to(losses) / normaliser
                loss = (losses * share).sum()
                torch.autograd.backward(loss)
            expected += float(loss.detach().double())
            terms += float((_terms(logits.detach(), labels) * share).sum().double())
            norms += add_gradients(reference, _gradients_of(model))
        model.zero_grad()
        plain = {"router_aux_loss_coef": 0.0, "enable_dft_loss": False}  # what the reference computes
        with (
            _changed(trainer.args, plain),
            trainer.media_hook(),
            trainer.template.forward_context(model, dict(collated)),
        ):
            inputs = trainer._prepare_inputs(dict(collated))  # noqa: SLF001  # what training does, and no less
            items = torch.tensor(collated[NORMALISER] or 1.0, device=trainer.accelerator.device)
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            torch.autograd.backward(loss)
        different = loss_difference(float(loss.detach().double()), expected, terms=terms)
        yield Deviation("step loss", different, pack)
        norm_of = difference_norms(_gradients_of(model), reference)
        difference = math.hypot(*norm_of.values())
        model.zero_grad()
        if norms or difference:
            value = difference / norms if norms else math.inf
            yield Deviation("gradients", value, pack, detail=f"most in {max(norm_of, key=norm_of.__getitem__)}")

    def _weights(self, encoded: list[dict[str, Any]]) -> list[torch.Tensor]:
        """
        Return the weight of each target of each sample in the loss, by the loss's definition.
        """
        powers = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}
        weights = []
        for sample in encoded:
            counted = (torch.tensor(sample["labels"]) != IGNORED_LABEL).double()
            counted[0] = 0
            if "loss_scale" in sample:
                counted *= torch.tensor(sample["loss_scale"], dtype=torch.float64)
            weights.append(counted * (float(counted.sum()) or 1.0) ** powers[self.trainer.reduction])
        return weights


@contextlib.contextmanager
def _changed(arguments: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of *arguments* until the block ends."""
    before = {name: getattr(arguments, name) for name in values}
    try:
        for name, value in values.items():
            setattr(arguments, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(arguments, name, value)


def _spans(indices: list[int], encoded: list[dict[str, Any]], collated: dict[str, Any]) -> Iterator[_Span]:
    start = pixel = frame = 0
    axis = _joined_axis(encoded, collated)
    for index, sample in zip(indices, encoded, strict=True):
        held, shown = sample.get(IMAGES.pixels), sample.get(VIDEOS.pixels)
        pixels, frames = 0 if held is None else held.shape[axis], 0 if shown is None else len(shown)
        stop = start + len(sample["input_ids"])
        places = slice(start, stop), slice(pixel, pixel + pixels), axis, slice(frame, frame + frames)
        yield _Span(index, *places)
        start, pixel, frame = stop, pixel + pixels, frame + frames


def _change_tokens(tokens: slice, _: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Return embeddings in which a sample has those of its tokens backwards, negated."""
    embedded = embedded.clone()
    embedded[:, tokens] = -embedded[:, tokens].flip(1)
    return embedded


def _joined_axis(encoded: list[dict[str, Any]], collated: dict[str, Any]) -> int:
    """Return the axis along which a pack joins the pixel values of its samples."""
    whole = collated.get(IMAGES.pixels)
    parts = [torch.as_tensor(sample[IMAGES.pixels]) for sample in encoded if sample.get(IMAGES.pixels) is not None]
    if whole is None:
        return 0
    return next(axis for axis, size in enumerate(whole.shape) if size == sum(part.shape[axis] for part in parts))


def _with_other_pixels(collated: dict[str, Any], span: _Span) -> dict[str, Any]:
    """Return the batch with a sample's images and videos in negative."""
    changed = dict(collated)
    for medium, part, axis in ((IMAGES, span.pixels, span.axis), (VIDEOS, span.frames, 0)):
        if part.start != part.stop:
            changed[medium.pixels] = collated[medium.pixels].clone()
            changed[medium.pixels].transpose(0, axis)[part] *= -1
    return changed


def _positions(pack: int, spans: list[_Span], alone: list[_Alone], packed: torch.Tensor) -> Iterator[Deviation]:
    """Compare positions row by row; a missing row differs everywhere."""
    rows = packed.reshape(-1, packed.shape[-1])
    for span, one in zip(spans, alone, strict=True):
        # A model that sees takes four rows, the text's first; three have lost it.
        offset = len(one.positions) - len(rows)
        for number, own in enumerate(one.positions):
            mine = rows[number - offset, span.tokens] if number >= offset else torch.full_like(own, -1)
            yield Deviation("positions", int((mine != own).sum()), pack, span.index, f"row {_ROWS[number]}")


def _labels(pack: int, spans: list[_Span], encoded: list[dict[str, Any]], packed: torch.Tensor) -> Iterator[Deviation]:
    for span, sample in zip(spans, encoded, strict=True):
        own = torch.tensor(sample["labels"], device=packed.device)
        own[0] = IGNORED_LABEL  # alone, nothing comes before to predict it
        yield Deviation("labels", int((packed[span.tokens] != own).sum()), pack, span.index)


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Return the loss of each label, 0 where it is ignored and for the first, which nothing predicts.
    """
    losses = F.cross_entropy(logits[:-1], labels[1:].to(logits.device), reduction="none", ignore_index=IGNORED_LABEL)
    return torch.cat([losses.new_zeros(1), losses])


def _terms(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Return the size of the two terms of each label's loss, log-sum-exp and its logit; shape as
    `_losses`.
    """
    rows, targets = logits[:-1], labels[1:].to(logits.device).clamp(min=0)
    terms = rows.logsumexp(-1).abs() + rows.gather(-1, targets[:, None])[:, 0].abs()
    return torch.cat([terms.new_zeros(1), terms])


def _gradients_of(model: torch.nn.Module) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())
