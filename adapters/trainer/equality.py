"""
Comparison of training on a pack with transformers' results for each of its samples alone.

The pack passes through all stages of training: data set, collator, the trainer's preparation,
ms-swift's hooks. The reference skips these stages: each sample is encoded alone, the model itself
computes position ids, and the only mask is causal. The reference always uses transformers' own
attention, so that a fault in Packplan's attention is found, not repeated.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from accelerate.utils import send_to_device
from torch.autograd.graph import GradientEdge, get_gradient_edge

from packplan.adapters.attention import using_native_attention
from packplan.adapters.families import trained_config
from packplan.adapters.loaders.packs import NORMALISER
from packplan.adapters.models import Gradients, evaluation_mode, replace_attributes, weight_gradients
from packplan.adapters.proof.batches import PackedBatch, Sample, next_tokens, places_by_lengths
from packplan.adapters.proof.comparison import allow_for_cancelling, difference_limit, packed_and_alone, run_alone
from packplan.adapters.samples.media import IMAGES, VIDEOS
from packplan.adapters.trainer.trainer import PLAIN_LOSS, PlanTrainer, logit_inputs
from packplan.adapters.trainer.vision import find_rope_index, media_inputs
from packplan.adapters.vision_tower import parameter_names
from packplan.core.batch import IGNORED_LABEL
from packplan.core.equality import Deviation, reason_against_backend
from packplan.core.errors import PackplanError

_ROWS = ("text", "temporal", "height", "width")

_READERS = 8
"""
Maximum number of samples of a pack whose dependence on other samples is computed. These samples are
spread evenly over the pack.
"""


@attrs.frozen(eq=False)
class PackComparison:
    """Comparison of a trainer's packs with their samples alone, by results and gradients."""

    trainer: PlanTrainer

    encode: Callable[[int], dict[str, Any]]
    """Function that takes the index of a sample, and encodes the sample again."""

    @property
    def no_gradients_reason(self) -> str | None:
        """Reason why gradients and the loss of a step are not compared; None if they are."""
        config = trained_config(self.trainer.model.config)
        name = config._attn_implementation  # noqa: SLF001  # no public question
        on_cpu = self.trainer.accelerator.device.type == "cpu"
        return reason_against_backend(name, flash_installed=True, on_cpu=on_cpu)

    @property
    def limit(self) -> float:
        """
        Largest allowed difference of logits and gradients, if routers choose the same experts.
        """
        return difference_limit(self.trainer.model, self.trainer.precision, experts=False)

    def deviations(self, pack: int) -> Iterator[Deviation]:
        """
        Yield the deviations of a pack from its samples alone, including deviations of size 0.

        Args:
            pack: Pack index.

        Raises:
            PackplanError: A sample cannot be encoded, or differs from its plan.
        """
        with evaluation_mode(self.trainer.model):  # dropout would add differences
            yield from self._compare(pack)

    def _compare(self, pack: int) -> Iterator[Deviation]:
        trainer, indices = self.trainer, self.trainer.train_dataset.packs[pack]
        served = trainer.train_dataset[pack]
        if isinstance(served, PackplanError):
            raise served
        encoded = [self.encode(index) for index in indices]
        places = places_by_lengths(len(one["input_ids"]) for one in encoded)
        collated = send_to_device(trainer.data_collator([served]), trainer.accelerator.device)
        samples = self._model_samples(encoded)
        gradients = self.no_gradients_reason is None
        run = partial(run_alone, trainer.model, samples, call=self._call_model, with_gradients=gradients)
        with using_native_attention(trainer.model, trainer.attention.native):
            alone = run()
        media = _split_pixels(encoded, collated) if gradients else []
        targets = next_tokens(collated["labels"][0])  # a label that crosses a border counts for the sample before it
        packed = [attrs.evolve(one, targets=targets[span]) for one, (_, span) in zip(samples, places, strict=True)]
        readers = torch.linspace(0, len(places) - 1, min(_READERS, len(places))).round().int().tolist()
        # With a router's loss, ms-swift asks the model for it as it prepares a batch.
        with replace_attributes(trainer.args, **PLAIN_LOSS), self._prepared_pack(collated) as prepared:
            inputs = {key: one for key, one in logit_inputs(prepared).items() if key != "logits_to_keep"}
            row = PackedBatch(inputs, None, (1, collated["labels"].shape[1]), places)
            apart = packed_and_alone(
                trainer.model, row, packed, alone=alone, call=self._call_model, readers=readers if gradients else (),
                sources=media, step=partial(self._run_step, prepared, collated[NORMALISER]),
            )  # fmt: skip
        with using_native_attention(trainer.model, trainer.attention.native):
            apart = allow_for_cancelling(apart, alone, trainer.model, run, limit=self.limit)
        for index, (_, span), sample, own in zip(indices, places, samples, encoded, strict=True):
            yield from _diff_rows(pack, index, self._own_positions(sample.inputs), prepared["position_ids"][..., span])
            labels = torch.tensor([IGNORED_LABEL, *own["labels"][1:]])  # alone, no token comes before it to predict it
            yield Deviation("labels", int((collated["labels"][0, span].cpu() != labels).sum()), pack, index)
        for one in apart.dependences:
            detail = f"on sample {indices[one.source]}" if one.size else ""
            yield Deviation("isolation", one.isolation, pack, indices[one.reader], detail)
        for index, value, loss in zip(indices, apart.logits, apart.losses, strict=True):
            yield Deviation("logits", value, pack, index)
            yield Deviation("sample loss", loss, pack, index)
        if gradients:
            yield Deviation("step loss", apart.loss, pack)
            yield Deviation("gradients", apart.gradients, pack, detail=f"most in {apart.weight}")

    def _call_model(self, **inputs: Any) -> Any:
        with self.trainer.accelerator.autocast():
            return self.trainer.model(**inputs)

    @contextlib.contextmanager
    def _prepared_pack(self, collated: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """
        Yield the inputs that the trainer prepares from a pack, while the trainer's hooks are
        active.
        """
        trainer = self.trainer
        with trainer.media_hook(), trainer.template.forward_context(trainer.model, dict(collated)):
            yield trainer._prepare_inputs(dict(collated))  # noqa: SLF001  # what training does, and no less

    def _run_step(self, prepared: dict[str, Any], normaliser: float) -> tuple[float, Gradients]:
        """Return the trainer's loss of a prepared pack, and the gradients of the weights."""
        trainer = self.trainer
        items = torch.tensor(normaliser or 1.0, device=trainer.accelerator.device)
        with trainer.accelerator.autocast():
            loss = trainer.compute_loss(trainer.model, dict(prepared), num_items_in_batch=items)
        return float(loss.detach().double()), weight_gradients(trainer.model, loss)

    def _model_samples(self, encoded: Sequence[dict[str, Any]]) -> list[Sample]:
        """
        Convert encoded samples into inputs of the model, with each target's weight in the loss.
        """
        power = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}[self.trainer.reduction]
        samples = []
        for one in encoded:
            targets = next_tokens(torch.tensor(one["labels"]))
            counted = (targets != IGNORED_LABEL).double()
            if "loss_scale" in one:
                counted[:-1] *= torch.tensor(one["loss_scale"], dtype=torch.float64)[1:]
            ids = torch.tensor(one["input_ids"])[None]
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **media_inputs(self.trainer.model, one)}
            weights = counted * (float(counted.sum()) or 1.0) ** power
            samples.append(Sample(send_to_device(inputs, self.trainer.accelerator.device), targets, weights))
        total = sum(float(one.weights.sum()) for one in samples if one.weights is not None) or 1.0
        return [attrs.evolve(one, weights=one.weights / total) for one in samples if one.weights is not None]

    def _own_positions(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """
        Return a sample's position ids as the model computes them: 4 rows if the model has
        `get_rope_index`, else 1.
        """
        text = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)[None]
        rope = find_rope_index(self.trainer.model)
        if rope is None:
            return text
        if IMAGES.count(inputs) is None and VIDEOS.count(inputs) is None:
            return text.expand(4, -1)
        given = parameter_names(rope)
        positions, _ = rope(**{key: value for key, value in inputs.items() if key in given})
        return torch.cat([text, positions[:, 0]])


def _split_pixels(encoded: Sequence[Mapping[str, Any]], collated: dict[str, Any]) -> list[tuple[GradientEdge, int]]:
    """
    Rebuild the pixels in *collated* from one leaf tensor per sample. Return the gradient edge of
    each leaf, with the number of its sample.
    """
    own: list[tuple[GradientEdge, int]] = []
    for medium in (IMAGES, VIDEOS):
        whole, held = collated.get(medium.pixels), {}
        for number, sample in enumerate(encoded):
            if sample.get(medium.pixels) is not None:
                held[number] = torch.as_tensor(sample[medium.pixels]).shape
        if whole is None or not held:
            continue
        sizes = {axis: [shape[axis] for shape in held.values()] for axis in range(whole.dim())}
        axis = next(axis for axis, size in enumerate(whole.shape) if size == sum(sizes[axis]))
        parts = [part.detach().clone().requires_grad_() for part in whole.split(sizes[axis], axis)]
        collated[medium.pixels] = torch.cat(parts, axis)
        own += zip(map(get_gradient_edge, parts), held, strict=True)
    return own


def _diff_rows(pack: int, index: int, own: torch.Tensor, packed: torch.Tensor) -> Iterator[Deviation]:
    """
    Yield a deviation for each row of a sample's position ids; a missing row differs everywhere.
    """
    rows = packed.reshape(-1, packed.shape[-1])
    # A vision model takes four rows, the text's first; with three rows, that one is missing.
    missing = len(own) - len(rows)
    for number, expected in enumerate(own):
        mine = rows[number - missing] if number >= missing else torch.full_like(expected, -1)
        yield Deviation("positions", int((mine != expected).sum()), pack, index, f"row {_ROWS[number]}")
