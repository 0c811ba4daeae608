"""
Compares a pack, as training sees it, with its samples alone, as transformers sees them.

The reference attends by transformers' own attention, whatever trains: a fault in an attention of
ours is found, not repeated. The pack goes the whole way of training: data set, collator, the
trainer's preparation, ms-swift's hooks. The reference goes none of it: each sample's encoding
alone, positions by the model itself, no mask but the causal one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from packplan.adapters.attention import native_attention
from packplan.adapters.families import trained_config
from packplan.adapters.samples.encoder import IGNORED_LABEL
from packplan.adapters.samples.media import IMAGES, VIDEOS
from packplan.adapters.trainer.base import model_inputs
from packplan.adapters.trainer.loader import NORMALISER
from packplan.adapters.trainer.packed_dataset import EncodedPack
from packplan.adapters.trainer.static import PackTrainer
from packplan.adapters.trainer.vision import model_media, rope_of, takes
from packplan.core.equality import Deviation, loss_difference
from packplan.core.errors import PackplanError

_ROWS = ("text", "temporal", "height", "width")

_CHANGED_SAMPLES = 8
"""Samples of a pack that are changed, one at a time: the first, the last, and others between."""


@attrs.frozen
class _Span:
    """Where a sample lies in its pack."""

    index: int
    start: int
    stop: int
    pixels: slice
    """Where this sample's lie among the pack's pixel values, along *axis*."""

    axis: int
    """The axis along which a pack's pixel values are those of its samples."""

    frames: slice = slice(0, 0)
    """Rows of the pack's patches of videos that are this sample's."""


@attrs.frozen(eq=False)
class _Alone:
    """What a sample gives alone, without gradients."""

    logits: torch.Tensor
    """float32 of shape (length, vocabulary)."""

    positions: torch.Tensor
    """Position ids; int64, shape (rows, length)."""

    losses: torch.Tensor
    """Losses of the supervised tokens; float64."""

    terms: torch.Tensor
    """Size of what each loss is the difference of; float64, of the losses' shape."""


@attrs.frozen(eq=False)
class PackComparison:
    """Compares the packs of a trainer with their samples alone."""

    trainer: PackTrainer

    encode: Callable[[int], dict[str, Any]]
    """Encodes a sample afresh."""

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
        Yield what comparing a pack finds.

        Args:
            pack: Its position in the plan.

        Raises:
            PackplanError: A sample is not the one that was planned.
        """
        model = self.trainer.model
        was_training = model.training
        model.eval()  # dropout is no difference
        try:
            yield from self._findings(pack)
        finally:
            model.zero_grad()
            model.train(was_training)

    def _findings(self, pack: int) -> Iterator[Deviation]:
        served = self.trainer.train_dataset[pack]
        if isinstance(served, PackplanError):
            raise served
        indices = self.trainer.train_dataset.packs[pack]
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
            # By the token that is predicted: the first of a sample, which is predicted by the
            # sample before, included.
            mine = losses[span.start : span.stop]
            mine = mine[collated["labels"][0][span.start : span.stop] != IGNORED_LABEL]
            yield Deviation("logits", _largest(logits[span.start : span.stop] - one.logits) / scale, pack, span.index)
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
        Return the inputs that the trainer prepares of a pack, and all logits; float32, (length,
        vocabulary).
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
        with torch.no_grad(), self.trainer.accelerator.autocast(), self._native():
            logits = self.trainer.model(**inputs).logits[0].float()
        labels = torch.tensor(sample["labels"], device=logits.device)
        losses, terms = (of(logits, labels)[labels != IGNORED_LABEL].double() for of in (_losses, _terms))
        return _Alone(logits, self._own_positions(inputs), losses, terms)

    def _native(self) -> AbstractContextManager[None]:
        """Let the model attend as transformers does, inside."""
        return native_attention(self.trainer.model, self.trainer.attention.native)

    def _own_positions(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        Return the positions that the model itself gives a sample: of the text, then of its three
        rows if it sees.
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
            with self._changed(changed):
                _, moved = self._packed(_with_other_pixels(collated, changed))
            for span in spans:
                move = _largest(moved[span.start : span.stop] - logits[span.start : span.stop]) / scale
                if span is changed:
                    yield Deviation("sensitivity", move, pack, span.index)
                else:
                    detail = f"when sample {changed.index} changes"
                    yield Deviation("isolation", move, pack, span.index, detail)

    @contextmanager
    def _changed(self, span: _Span) -> Iterator[None]:
        """
        Let every token of a sample be another one: its embeddings are those of the sample
        backwards, negated.
        """

        def change(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
            embedded = embedded.clone()
            embedded[:, span.start : span.stop] = -embedded[:, span.start : span.stop].flip(1)
            return embedded

        handle = self.trainer.model.get_input_embeddings().register_forward_hook(change)
        try:
            yield
        finally:
            handle.remove()

    def _gradients(self, pack: int, collated: dict[str, Any], encoded: list[dict[str, Any]]) -> Iterator[Deviation]:
        trainer, model = self.trainer, self.trainer.model
        weights = self._weights(encoded)
        normaliser = float(torch.cat(weights).sum()) or 1.0
        expected = terms = norms = 0.0
        reference: dict[str, torch.Tensor] = {}
        for sample, weight in zip(encoded, weights, strict=True):
            model.zero_grad()
            # Checkpointed layers run again in the backward pass.
            with self._native():
                with trainer.accelerator.autocast():
                    logits = model(**self._reference(sample)).logits[0].float()
                labels = torch.tensor(sample["labels"], device=logits.device)
                losses = _losses(logits, labels)
                share = weight.to(losses) / normaliser
                loss = (losses * share).sum()
                torch.autograd.backward(loss)
            expected += float(loss.detach().double())
            terms += float((_terms(logits.detach(), labels) * share).sum().double())
            norms += _add_gradients(reference, model)
        model.zero_grad()
        with trainer.media_hook(), trainer.template.forward_context(model, dict(collated)):
            inputs = trainer._prepare_inputs(dict(collated))  # noqa: SLF001  # what training does, and no less
            items = torch.tensor(collated[NORMALISER] or 1.0, device=trainer.accelerator.device)
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            torch.autograd.backward(loss)
        different = loss_difference(float(loss.detach().double()), expected, terms=terms)
        yield Deviation("step loss", different, pack)
        yield from _gradient_finding(pack, model, reference, scale=norms)

    def _weights(self, encoded: list[dict[str, Any]]) -> list[torch.Tensor]:
        """
        Return what each target of each sample weighs in the loss, counted from the definition.
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


def _spans(indices: list[int], encoded: list[dict[str, Any]], collated: dict[str, Any]) -> Iterator[_Span]:
    start = pixel = frame = 0
    axis = _joined_axis(encoded, collated)
    for index, sample in zip(indices, encoded, strict=True):
        held, shown = sample.get(IMAGES.pixels), sample.get(VIDEOS.pixels)
        pixels, frames = 0 if held is None else held.shape[axis], 0 if shown is None else len(shown)
        stop = start + len(sample["input_ids"])
        yield _Span(index, start, stop, slice(pixel, pixel + pixels), axis, slice(frame, frame + frames))
        start, pixel, frame = stop, pixel + pixels, frame + frames


def _joined_axis(encoded: list[dict[str, Any]], collated: dict[str, Any]) -> int:
    """Return the axis along which a pack's pixel values are those of its samples."""
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
            mine = rows[number - offset, span.start : span.stop] if number >= offset else torch.full_like(own, -1)
            yield Deviation("positions", int((mine != own).sum()), pack, span.index, f"row {_ROWS[number]}")


def _labels(pack: int, spans: list[_Span], encoded: list[dict[str, Any]], packed: torch.Tensor) -> Iterator[Deviation]:
    for span, sample in zip(spans, encoded, strict=True):
        own = torch.tensor(sample["labels"], device=packed.device)
        own[0] = IGNORED_LABEL  # alone, nothing comes before to predict it
        yield Deviation("labels", int((packed[span.start : span.stop] != own).sum()), pack, span.index)


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Return the loss of each label, 0 where it is ignored and for the first, which nothing predicts.
    """
    losses = F.cross_entropy(logits[:-1], labels[1:].to(logits.device), reduction="none", ignore_index=IGNORED_LABEL)
    return torch.cat([losses.new_zeros(1), losses])


def _terms(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Return the size of what each label's loss is the difference of: log-sum-exp and its logit; shape
    as `_losses`.
    """
    rows, targets = logits[:-1], labels[1:].to(logits.device).clamp(min=0)
    terms = rows.logsumexp(-1).abs() + rows.gather(-1, targets[:, None])[:, 0].abs()
    return torch.cat([terms.new_zeros(1), terms])


def _add_gradients(total: dict[str, torch.Tensor], model: torch.nn.Module) -> float:
    """Add the gradients of a model to a total in place, and return their norm."""
    square = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            square += float(parameter.grad.double().square().sum())
            if name in total:
                total[name] += parameter.grad
            else:
                total[name] = parameter.grad.clone()
    return float(square**0.5)


def _gradient_finding(
    pack: int, model: torch.nn.Module, reference: dict[str, torch.Tensor], *, scale: float
) -> Iterator[Deviation]:
    """
    Compare a model's gradients with the reference, on the scale of the samples' norms; nothing
    where both are 0.
    """
    different = 0.0
    worst, worst_name = -1.0, ""
    for name, parameter in model.named_parameters():
        own = reference.get(name)
        mine = parameter.grad
        if own is None and mine is None:
            continue
        own = torch.zeros_like(parameter) if own is None else own
        mine = torch.zeros_like(parameter) if mine is None else mine
        difference = float((mine.double() - own.double()).square().sum())
        different += difference
        if difference > worst:
            worst, worst_name = difference, name
    if scale or different:
        value = different**0.5 / scale if scale else math.inf
        yield Deviation("gradients", value, pack, detail=f"most in {worst_name}")


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())
