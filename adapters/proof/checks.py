"""The two assertions: samples of a packed batch are apart, and equal to themselves alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from packplan.adapters.loaders.rows import IGNORED_LABEL
from packplan.adapters.models import Gradients, add_gradients, difference_norms, evaluating, weight_gradients
from packplan.adapters.proof.batches import PackedBatch, Starts
from packplan.adapters.proof.gradients import Reach, Shape, Watched, in_words, logit_reaches, watching
from packplan.adapters.proof.limits import difference_of, limit_of, precision_of, rounds_choices
from packplan.adapters.proof.modules import MixingModule, first_different, first_mixing
from packplan.adapters.proof.taking import refuse_hidden_weights
from packplan.core.equality import EQUAL, loss_difference
from packplan.core.errors import ArgumentError, ModelError, ProofError


@attrs.frozen
class Differences:
    """Largest relative differences of packed samples from themselves alone."""

    logits: float
    """Difference of a logit, over the largest logit."""

    losses: float
    """Difference of a sample's mean loss."""

    gradients: float
    """Norm of the difference of the weights' gradients, over the sum of the samples' norms."""

    limit: float
    """Largest difference that was allowed."""


def assert_isolated(model: torch.nn.Module, batch: Mapping[str, Any], starts: Starts | None = None) -> None:
    """
    Assert that no sample of a packed batch depends on another one.

    The gradient of each sample's logits with respect to the embeddings of the others has to be
    exactly 0. The model computes in evaluation mode, and its mode is restored.

    Args:
        model: Any model that returns logits: a tensor, or a part `logits` of its output.
        batch: Arguments of the model, of rows of shape (rows, tokens), as the collator made it.
        starts: First token of each sample, or a list of them for each row. None takes those at
            which `position_ids` restart; without these, each of several rows is a sample.

    Raises:
        ProofError: A sample depends on another one. It is an AssertionError, and names the first
            two samples and the first module that mixes them.
        ArgumentError: The batch has no packed rows, or its parts disagree on where samples begin.
        ModelError: The model cannot be asked: it has no gradients, or is random.
    """
    row = PackedBatch.read(batch, starts)
    with _computing(model):
        watched, logits = _watched_pass(model, row)
        for reach in logit_reaches(watched, logits, row.places):
            if math.isinf(reach.isolation):
                reason = f"no gradient reaches sample {reach.reader} from its own logits, so nothing can be said"
                raise ModelError("probe", reason)
            if reach.size != 0:
                raise _leak(model, row, reach)


def assert_equal_to_alone(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    starts: Starts | None = None,
    *,
    alone: Sequence[Mapping[str, Any]] | None = None,
    limit: float | None = None,
) -> Differences:
    """
    Assert that packed samples have the logits, losses and gradients that they have alone.

    The loss of a sample is the mean over its labels, or over its tokens without labels. The
    gradients are those of the sum of the samples' losses.

    Args:
        model: Any model that returns logits, with weights that train.
        batch: Arguments of the model, of rows of shape (rows, tokens), as the collator made it.
        starts: First token of each sample, or a list of them for each row. None takes those at
            which `position_ids` restart; without these, each of several rows is a sample.
        alone: A batch of each sample by itself, in the order of the row. None cuts them out of the
            row; images cannot be cut out.
        limit: Largest relative difference. None takes what rounding explains, by the type of the
            weights and the number of layers.

    Raises:
        ProofError: A sample differs. It is an AssertionError, and names the sample and the first
            module that computes something else.
        ArgumentError: The batch has no packed rows, or its parts disagree on where samples begin.
        ModelError: The model cannot be asked: it has no gradients, or is random.
    """
    row = PackedBatch.read(batch, starts)
    _refuse_crossing_labels(row)
    samples = row.each_alone(alone)
    limit = max(EQUAL[precision_of(model)], limit_of(model)) if limit is None else limit
    with _computing(model):
        if not any(one.requires_grad for one in model.parameters()):
            raise ModelError("probe", "none of its weights trains (requires_grad), so it has no gradients to compare")
        _, logits = _watched_pass(model, row)
        packed = [_loss(logits[place], row.targets(number)) for number, place in enumerate(row.places)]
        gradients = weight_gradients(model, torch.stack(packed).sum())
        logits = logits.detach().float()
        expected: Gradients = {}
        norms, worst_logits, worst_losses = 0.0, 0.0, 0.0
        for number, (place, sample) in enumerate(zip(row.places, samples, strict=True)):
            own = logits_of(model(**sample), (1, place[1].stop - place[1].start))[0]
            loss = _loss(own, row.targets(number))
            norms += add_gradients(expected, weight_gradients(model, loss))
            own = own.detach().float()
            scale = float(own.abs().max())
            tokens = (logits[place] - own).abs().amax(-1) / (scale or 1.0)
            different = difference_of(tokens, typical=rounds_choices(model))
            if not different <= limit:
                raise _unlike(model, row, sample, number, different=different, limit=limit)
            worst_logits = max(worst_logits, different)
            found = loss_difference(float(packed[number].detach()), float(loss.detach()), terms=scale)
            if not found <= limit and not rounds_choices(model):
                fact = f"the loss of sample {number} differs from that of the sample alone by {found:.2g}"
                raise ProofError("unlike_alone", f"{fact}, where {limit:.0e} is allowed", {"sample": number})
            worst_losses = max(worst_losses, found)
    by_weight = difference_norms(gradients, expected)
    different = math.hypot(*by_weight.values()) / (norms or 1.0)
    if not different <= limit:
        weight = max(by_weight, key=lambda name: by_weight[name])
        fact = f"gradients differ from the sum of the samples' own by {different:.2g}, where {limit:.0e} is allowed"
        raise ProofError("unlike_alone", f"{fact}; most of all that of {weight}", {"weight": weight})
    return Differences(worst_logits, worst_losses, different, limit)


def logits_of(output: Any, shape: Shape) -> torch.Tensor:
    """
    Return the logits in a model's output; shape (rows, tokens, vocabulary).

    Args:
        output: A tensor, or something with a part `logits`.
        shape: Rows, and tokens of each.

    Raises:
        ModelError: There are none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if not isinstance(logits, torch.Tensor):
        raise ModelError("probe", f"it returns {type(output).__name__} without logits: fused losses have to be off")
    rows, tokens = shape
    if logits.numel() == 0 or logits.numel() % (rows * tokens) or not {tokens, rows * tokens} & {*logits.shape[:2]}:
        raise ModelError("probe", f"its logits have shape {tuple(logits.shape)} for {in_words(shape)}")
    return logits.reshape(rows, tokens, -1)


@contextmanager
def _computing(model: torch.nn.Module) -> Iterator[None]:
    """Let a model compute with gradients, and without chance; ModelError if it cannot."""
    if torch.is_inference_mode_enabled() or any(one.is_inference() for one in model.parameters()):
        raise ModelError("probe", "it is in inference mode, which has no gradients: build and ask it outside")
    refuse_hidden_weights(model, sharded=False)
    with evaluating(model), torch.enable_grad():
        yield


def _watched_pass(model: torch.nn.Module, row: PackedBatch) -> tuple[Watched, torch.Tensor]:
    """Compute a row, and return its embeddings and logits; ModelError if numbers are random."""
    inputs = dict(row.inputs)
    with watching(model, inputs, row.shape) as watched:
        logits = logits_of(model(**inputs), row.shape)
    numbers = logits.detach()
    if not bool(numbers.isfinite().all()):
        raise ModelError("probe", "its logits are not all finite, so nothing can be said")
    with torch.no_grad():
        again = logits_of(model(**row.inputs), row.shape)
    limit = limit_of(model)
    if not float((again - numbers).abs().max()) <= limit * float(numbers.abs().max()):
        where = first_different(model, row.inputs, row.inputs, None, shape=row.shape, limit=limit)
        reason = f"it is random in evaluation mode: two passes differ{_first(where)}"
        raise ModelError("probe", reason)
    return watched, logits


def _leak(model: Any, row: PackedBatch, reach: Reach) -> ProofError:
    where = first_mixing(model, row.inputs, row.places, reach.reader, shape=row.shape)
    fact = (
        f"samples of the row are not apart: sample {reach.reader} depends on sample {reach.source}, by a gradient of "
        f"{reach.isolation:.2g} of its own, where 0 is due{_first(where)}"
    )
    if getattr(getattr(model, "config", None), "use_cache", False) and "use_cache" not in row.inputs:
        fact += ". Its config.use_cache is true, under which transformers takes a row as one sample: set it to False"
    return ProofError("leak", fact, {"samples": (reach.reader, reach.source), "module": where and where.name})


def _unlike(
    model: torch.nn.Module, row: PackedBatch, sample: dict[str, Any], number: int, *, different: float, limit: float
) -> ProofError:
    where = first_different(model, row.inputs, sample, row.places[number], shape=row.shape, limit=limit)
    fact = f"the logits of sample {number} differ from those of the sample alone by {different:.2g}"
    fact += f", where {limit:.0e} is allowed{_first(where)}"
    return ProofError("unlike_alone", fact, {"sample": number, "module": where and where.name})


def _first(where: MixingModule | None) -> str:
    return "" if where is None else f"; first in {where}"


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the learned tokens of a sample; 0 if it has none."""
    targets = targets.to(logits.device)
    total = F.cross_entropy(logits[:-1].float(), targets, ignore_index=IGNORED_LABEL, reduction="sum")
    return total / max(1, int((targets != IGNORED_LABEL).sum()))


def _refuse_crossing_labels(row: PackedBatch) -> None:
    """
    Refuse labels by which the last token of a sample would learn the first one of the next;
    ProofError.
    """
    if row.labels is None:
        return
    if row.labels.shape != row.shape:
        shape = tuple(row.labels.shape)
        raise ArgumentError("packed_batch", f"the packed batch has labels of shape {shape} for {in_words(row.shape)}")
    for number, (before, (at, span)) in enumerate(pairwise(row.places), 1):
        if before[0] == at and int(row.labels[at, span.start]) != IGNORED_LABEL:
            fact = f"sample {number - 1} would learn the first token of sample {number}: its label has to be -100"
            raise ProofError("unlike_alone", fact, {"sample": number})
