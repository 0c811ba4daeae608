"""
Assertions that packed samples do not depend on each other, and have the same results as alone.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from packplan.adapters.models import evaluation_mode, find_sharded_weight
from packplan.adapters.proof.batches import PackedBatch, Starts, shape_text
from packplan.adapters.proof.comparison import (
    Comparison,
    allow_for_cancelling,
    difference_limit,
    experts_may_differ,
    packed_and_alone,
    run_alone,
)
from packplan.adapters.proof.modules import NamedModule, first_different_module, first_leak
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ArgumentError, MismatchError, ModelError


def assert_isolated(model: torch.nn.Module, batch: Mapping[str, Any], starts: Starts | None = None) -> None:
    """
    Assert that no sample of a packed batch depends on another sample.

    The gradient of each sample's logits with respect to the embeddings of all other samples has to
    be exactly 0. The model computes in evaluation mode; afterwards its mode is restored.

    Args:
        model: Any model that returns logits, as a tensor or as `logits` of its output.
        batch: Arguments of the model for rows of shape (rows, tokens), as the collator made them.
        starts: Position of the first token of each sample, or a list of positions for each row.
            None takes the tokens at which `position_ids` restart. Without position ids, each of
            several rows is a sample.

    Raises:
        MismatchError: A sample depends on another sample. The error is an AssertionError, and names
            two such samples and the first module that mixes them.
        ArgumentError: The batch has no packed rows, or its parts disagree on where samples begin.
        ModelError: The model has no gradients, or its weights are sharded.
    """
    row = PackedBatch.read(batch, starts)
    refuse_sharded_weights(model)
    with evaluation_mode(model), torch.enable_grad():
        leak = first_leak(model, row)
    if leak is None:
        return
    dependence, where = leak
    if math.isinf(dependence.isolation):
        reason = f"the logits of sample {dependence.reader} have gradients that are 0 or not finite"
        raise ModelError("probe", f"{reason}, so a leak cannot be measured")
    fact = f"gradients of sample {dependence.reader} are {dependence.isolation:.2g} times as large at sample "
    fact += f"{dependence.source} as at sample {dependence.reader}, instead of 0"
    if getattr(getattr(model, "config", None), "use_cache", False) and "use_cache" not in row.inputs:
        fact += "; set config.use_cache to False, since transformers takes a row with a cache as one sample"
    details = {"samples": (dependence.reader, dependence.source), "module": where and where.name}
    raise MismatchError("leak", f"samples of the row are not kept apart: {fact}{_location_text(where)}", details)


def assert_equal_to_alone(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    starts: Starts | None = None,
    *,
    alone: Sequence[Mapping[str, Any]] | None = None,
    limit: float | None = None,
) -> Comparison:
    """
    Assert that packed samples have the same logits, losses and gradients as each sample alone, and
    return the differences.

    The loss of a sample is the mean over its labels, or over all its tokens if there are no labels.
    Gradients of the sum of the samples' losses are compared.

    Args:
        model: Any model that returns logits, with trainable weights.
        batch: Arguments of the model for rows of shape (rows, tokens), as the collator made them.
        starts: Position of the first token of each sample, or a list of positions for each row.
            None takes the tokens at which `position_ids` restart. Without position ids, each of
            several rows is a sample.
        alone: A batch for each sample by itself, in the order of the row. With None, samples are
            cut out of the row, which does not work with images.
        limit: Largest allowed relative difference. None takes the difference that rounding can
            cause with the dtype and the number of layers of the model.

    Raises:
        MismatchError: A sample differs. The error is an AssertionError, and names the sample and
            the first module whose results differ.
        ArgumentError: The batch has no packed rows, or its parts disagree on where samples begin.
        ModelError: The model has no gradients, or its weights are sharded.
    """
    row = PackedBatch.read(batch, starts)
    _refuse_crossing_labels(row)
    samples = row.samples(alone)
    limit = difference_limit(model) if limit is None else limit
    refuse_sharded_weights(model)
    if not any(one.requires_grad for one in model.parameters()):
        raise ModelError("probe", "the model has no weight with requires_grad, so there are no gradients to compare")
    with evaluation_mode(model), torch.enable_grad():
        median, expected = experts_may_differ(model), run_alone(model, samples)
        apart = packed_and_alone(model, row, samples, alone=expected, readers=(), median=median)
        apart = allow_for_cancelling(apart, expected, model, lambda: run_alone(model, samples), limit=limit)
        for number, different in enumerate(apart.logits):
            if not different <= limit:
                fact = f"the logits of sample {number} differ from those of the sample alone by {different:.2g}"
                where = first_different_module(model, row, samples[number].inputs, row.places[number], limit=limit)
                raise _difference_error(f"{fact} (allowed: {limit:.0e})", where, sample=number)
    for number, different in enumerate(apart.losses):
        if not different <= limit:
            fact = f"the loss of sample {number} differs from that of the sample alone by {different:.2g}"
            raise _difference_error(f"{fact} (allowed: {limit:.0e})", sample=number)
    if not apart.gradients <= limit:
        fact = f"gradients differ from those of the samples alone by {apart.gradients:.2g} (allowed: {limit:.0e}), "
        fact += f"most of all the gradient of {apart.weight}"
        raise _difference_error(fact, weight=apart.weight)
    return apart


def refuse_sharded_weights(model: torch.nn.Module) -> None:
    """Refuse a model with sharded weights, of which this process has only a part."""
    if (name := find_sharded_weight(model)) is not None:
        reason = f"the model's weight {name} is sharded (FSDP, ZeRO-3): test the model before it is sharded"
        raise ModelError("probe", reason)


def _difference_error(fact: str, where: NamedModule | None = None, **details: Any) -> MismatchError:
    """
    Return the error about a difference; its message names the first module whose results differ.
    """
    return MismatchError("unlike_alone", f"{fact}{_location_text(where)}", {**details, "module": where and where.name})


def _location_text(where: NamedModule | None) -> str:
    return "" if where is None else f"; first in {where}"


def _refuse_crossing_labels(row: PackedBatch) -> None:
    """
    Raise MismatchError if the last token of a sample would learn to predict the next sample's first
    token. Raise ArgumentError if labels and rows differ in shape.
    """
    if row.labels is None:
        return
    if row.labels.shape != row.shape:
        fact = f"the packed batch has labels of shape {tuple(row.labels.shape)}, but {shape_text(row.shape)}"
        raise ArgumentError("packed_batch", f"{fact}: give each token a label")
    for number, (before, (at, span)) in enumerate(pairwise(row.places), 1):
        if before[0] == at and int(row.labels[at, span.start]) != IGNORED_LABEL:
            fact = f"sample {number - 1} would learn the first token of sample {number}: set its label to -100"
            raise _difference_error(fact, sample=number)
