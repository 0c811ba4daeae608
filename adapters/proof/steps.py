"""
Assertion that the loss of an optimizer step is the mean over all of its learned tokens.

The reference computes each sample of the step by itself, in float32 from its logits. So nothing of
it depends on batches, ranks or the trainer's own loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch.distributed.tensor import DTensor

from packplan.adapters.loaders.rows import IGNORED_LABEL, RowsOfPacks, pad_rows, types_of
from packplan.adapters.models import Gradients, add_gradients, difference_norms, evaluating, weight_gradients
from packplan.adapters.proof.batches import PackedBatch
from packplan.adapters.proof.checks import logits_of
from packplan.adapters.proof.limits import limit_of, precision_of
from packplan.adapters.proof.taking import TakenStep, take_step, whole, without_dropout
from packplan.core.equality import EQUAL, Precision, loss_difference
from packplan.core.errors import ArgumentError, ModelError, PackplanError, ProofError, counted
from packplan.core.surface import Plan


@attrs.frozen
class StepLoss:
    """An optimizer step, compared with its samples alone."""

    loss: float | None
    """Loss that the trainer reports; None if it reports none."""

    due: float
    """Mean of the samples alone."""

    gradients: float
    """Norm of the gradients' difference, over the sum of the norms of the samples' own."""

    factor: float
    """Size of the gradients along those that are due; 1 is due."""

    samples: int
    """Samples of the step that learn a token."""

    tokens: int
    """Tokens that are learned."""

    limit: float
    """Largest relative difference that was allowed."""


@attrs.frozen(eq=False)
class _Sample:
    """A sample alone, and where it was served."""

    name: str
    """Words that name it."""

    key: str
    """Digest of its tokens."""

    inputs: dict[str, Any]
    targets: torch.Tensor
    rank: int

    @property
    def learned(self) -> int:
        return int((self.targets != IGNORED_LABEL).sum())

    def without_tensors(self) -> _Sample:
        """Return the sample without its tensors, to be sent to other ranks."""
        return attrs.evolve(self, inputs={})


def assert_step_loss(
    trainer: Any,
    plan: Plan | None = None,
    *,
    model: torch.nn.Module | None = None,
    rows: Any = None,
    packs: Sequence[int] | None = None,
    ranks_per_row: int | None = None,
    limit: float | None = None,
) -> StepLoss:
    """
    Assert that one optimizer step has the loss and the gradients of its samples alone.

    The first step of the training is computed: all its passes, forward and backward, on all ranks,
    without the update of the weights. All ranks call this. Dropout is off meanwhile. Weights,
    gradients, random state and the trainer's state are afterwards as before.

    Args:
        trainer: Trainer of transformers, or a function that computes the gradients of one step and
            returns the loss that it reports, or None.
        plan: Plan of the step: it has to train each sample of its packs once. None takes the
            samples that the trainer serves.
        model: Model that a function trains; None takes the trainer's.
        rows: Tokenized rows of the plan by sample index; None takes those of a trainer that follows
            the plan, or its training data.
        packs: Packs of the step over all ranks; None takes those that a trainer that follows a plan
            trains first.
        ranks_per_row: Ranks that share each row (context, sequence or tensor parallelism); None
            asks the trainer.
        limit: Largest relative difference. None takes what rounding explains.

    Raises:
        ProofError: The loss or the gradients differ, or the step has other samples than the plan.
            It is an AssertionError, and names the factor.
        ArgumentError: The trainer or its batches cannot be read, or the function updates weights.
        ModelError: The model has no gradients to compare, or is random without dropout.
    """
    step = take_step(trainer, model, sharing=ranks_per_row)
    samples = _agreed(lambda: _served(step, planned=plan is not None))
    if plan is not None:
        served = samples
        samples = _agreed(lambda: _planned(step, trainer, plan, rows=rows, packs=packs))
        _refuse_other_samples(served, samples, step.sharing)
    samples = [one for one in samples if one.learned]
    if not samples:
        raise ArgumentError("packed_batch", "the step learns no token, so it has no loss to compare")
    if limit is None:
        precision = _precision_of(step)
        limit = max(EQUAL[precision], limit_of(step.model, precision))
    with evaluating(step.model), torch.enable_grad():
        expected = _Expected.compute(step, samples)
    try:
        return _compared(step, expected, limit)
    except ProofError as error:
        _refuse_random(step, samples, limit, error)
        raise


def _precision_of(step: TakenStep) -> Precision:
    """Return the type in which a step computes."""
    device = next(step.model.parameters()).device.type
    with step.computing():
        if torch.is_autocast_enabled(device):
            return "bfloat16" if torch.get_autocast_dtype(device) == torch.bfloat16 else "float16"
    return precision_of(step.model)


def _agreed(make: Callable[[], list[_Sample]]) -> list[_Sample]:
    """Return all ranks' samples, this rank's with tensors; raise on all ranks what one raises."""
    try:
        mine, error = make(), None
    except PackplanError as raised:
        mine, error = [], raised
    shared = _gathered(([one.without_tensors() for one in mine], error))
    for _, failure in shared:
        if failure is not None:
            raise failure
    return [one for rank, (theirs, _) in enumerate(shared) for one in (mine if rank == _rank() else theirs)]


def _served(step: TakenStep, *, planned: bool) -> list[_Sample]:
    """Return the samples that reached this rank; none if rows are shared and a plan tells them."""
    if _rank() % step.sharing or (planned and step.sharing > 1):
        return []
    samples = []
    for number, batch in enumerate(step.batches):
        read = PackedBatch.read(batch, None, at_least=1)
        if not planned and read.labels is None:
            raise ArgumentError("packed_batch", "the model is given no labels, so give the plan and its rows")
        for sample in range(len(read.places)):
            name = f"sample {sample} of batch {number} on rank {_rank()}"
            key = _digest(read.inputs["input_ids"][read.places[sample]])
            samples.append(_Sample(name, key, {} if planned else read.alone(sample), read.targets(sample), _rank()))
    return samples


def _planned(step: TakenStep, trainer: Any, plan: Plan, *, rows: Any, packs: Sequence[int] | None) -> list[_Sample]:
    """Return this rank's share of the samples that the plan has for the step."""
    if packs is None:
        schedule = getattr(trainer, "schedule", None)
        if schedule is None:
            raise ArgumentError("host", "the trainer follows no plan, so nothing says what its step holds: give packs")
        ranks = range(schedule.world_size)
        packs = [pack for rank in ranks for batch in next(iter(schedule.steps(rank=rank))).batches for pack in batch]
    planned: Any = getattr(trainer, "_train_packs", None)
    if rows is None and not isinstance(planned, RowsOfPacks):
        rows = getattr(trainer, "train_dataset", None)
        if rows is None:
            raise ArgumentError("host", "the plan's rows are not known: give rows, by sample index")
    read = planned.row if rows is None else rows.__getitem__
    types = types_of(step.model)
    samples = []
    for pack in packs:
        for index in plan.packs[pack]:
            batch = pad_rows([read(index)], types=types)
            labels = batch.pop("labels")[0]
            del batch["attention_mask"]
            samples.append(
                _Sample(f"sample {index} (pack {pack})", _digest(batch["input_ids"][0]), batch, labels[1:], 0)
            )
    return samples[_rank() :: _world_size()]


def _refuse_other_samples(served: list[_Sample], planned: list[_Sample], sharing: int) -> None:
    """Refuse a step that does not train each planned sample once, with its labels; ProofError."""
    if sharing > 1:
        return
    learned = {one.key: one.learned for one in planned}
    found, due = (Counter(one.key for one in samples) for samples in (served, planned))
    names = {one.key: one.name for samples in (served, planned) for one in samples}
    teaches = {one.key for samples in (served, planned) for one in samples if one.learned}
    for key in {**due, **found}:
        if key in teaches and found[key] != due[key]:
            ranks = sorted({one.rank for one in served if one.key == key})
            where = f" (ranks {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
            fact = f"the step trains {names[key]} {_times(found[key])}{where}, and the plan {_times(due[key])}"
            raise _unlike(fact)
    for one in served:
        if one.learned != learned.get(one.key, 0):
            fact = f"{names[one.key]} teaches {learned[one.key]:,} tokens, but {one.learned:,} in its batch"
            raise _unlike(f"{fact}: the collator changes labels")


def _times(number: int) -> str:
    return {0: "not at all", 1: "once"}.get(number, f"{number} times")


@attrs.frozen(eq=False)
class _Expected:
    """Loss and gradients of a step, from its samples alone."""

    loss: float
    samples: int
    tokens: int
    """Learned tokens."""

    scale: float
    """Largest logit."""

    gradients: Gradients
    norms: float
    """Sum of the norms of the samples' weighted gradients."""

    @classmethod
    def compute(cls, step: TakenStep, samples: list[_Sample]) -> _Expected:
        """Compute each rank's samples on it, and add up."""
        tokens = sum(one.learned for one in samples)
        sharded = _is_sharded(step.model)
        gradients: Gradients = {}
        found = list((_sharded_passes if sharded else _passes)(step, samples, 1 / tokens, gradients))
        if not sharded:
            _add_over_ranks(step.model, gradients)
        losses, scales, norms = zip(*(one for rank in _gathered(found) for one in rank), strict=True)
        norm = math.hypot(*(float(one.double().norm()) for one in gradients.values())) if sharded else sum(norms)
        return cls(math.fsum(losses) / tokens, len(samples), tokens, max(scales), gradients, norm)


_Found = tuple[float, float, float]
"""Sum of a sample's losses, its largest logit, and the norm of its weighted gradients."""


def _passes(step: TakenStep, samples: list[_Sample], weight: float, total: Gradients) -> Iterator[_Found]:
    """Compute the samples whose tensors this rank has, and add their gradients up."""
    for one in samples:
        if one.inputs:
            loss, scale = _summed_loss(step, one)
            yield float(loss.detach()), scale, add_gradients(total, weight_gradients(step.model, loss * weight))


def _sharded_passes(step: TakenStep, samples: list[_Sample], weight: float, total: Gradients) -> Iterator[_Found]:
    """
    Compute samples whose weights are sharded: all ranks run as many passes, and FSDP averages the
    gradients over the ranks.
    """
    mine = [one for one in samples if one.inputs]
    shares = _gathered(len(mine))
    if not all(shares):
        raise ArgumentError("host", f"a rank has no sample of the step's {len(samples)}, and all have to run a pass")
    kept = [(one, one.grad) for one in step.model.parameters()]
    for one, _ in kept:
        one.grad = None
    for place in range(max(shares)):
        loss, scale = _summed_loss(step, mine[min(place, len(mine) - 1)])
        (loss * (weight if place < len(mine) else 0.0) * _world_size()).backward()  # type: ignore[no-untyped-call]
        if place < len(mine):
            yield float(loss.detach()), scale, 0.0
    for name, one in step.model.named_parameters():
        if one.grad is not None:
            total[name] = whole(one.grad).detach().clone()
    for one, gradient in kept:
        one.grad = gradient


def _summed_loss(step: TakenStep, sample: _Sample) -> tuple[torch.Tensor, float]:
    """Return the sum of a sample's losses over its learned tokens, and its largest logit."""
    device = next(step.model.parameters()).device
    inputs = {key: one.to(device) if isinstance(one, torch.Tensor) else one for key, one in sample.inputs.items()}
    with step.computing():
        output = step.model(**inputs)
    logits = logits_of(output, (1, len(sample.targets) + 1))[0].float()
    targets = sample.targets.to(logits.device)
    loss = F.cross_entropy(logits[:-1], targets, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss, float(logits.detach().abs().max())


def _compared(step: TakenStep, expected: _Expected, limit: float) -> StepLoss:
    """Return a step's differences from what is due; ProofError on all ranks if one is large."""
    if not step.gradients:
        raise ArgumentError("host", "the step left no gradients: the function has to leave them in the weights")
    differences = difference_norms(step.gradients, expected.gradients)
    different = math.hypot(*differences.values()) / (expected.norms or 1.0)
    due = sum(float((one.double() ** 2).sum()) for one in expected.gradients.values())
    along = sum(
        float((step.gradients[name].double() * one.double()).sum())
        for name, one in expected.gradients.items()
        if name in step.gradients
    )
    factor = along / (due or 1.0)
    found = StepLoss(step.loss, expected.loss, different, factor, expected.samples, expected.tokens, limit)
    norms = _gathered(math.hypot(*(float(one.double().norm()) for one in step.gradients.values())))
    if max(norms) - min(norms) > limit * max(norms):
        raise _unlike("the ranks have different gradients: they were not reduced before the update")
    worst = max(_gathered(found), key=lambda one: _loss_apart(one, expected))
    facts = []
    if _loss_apart(worst, expected) > limit:
        assert worst.loss is not None  # noqa: S101  # none is never apart
        ratio = worst.loss / worst.due
        facts.append(f"the step's loss is {worst.loss:.5g}, {ratio:.4g} times the {worst.due:.5g} that is due")
    if not (different <= limit and abs(factor - 1) <= limit):
        facts.append(f"the gradients are {factor:.4g} times those that are due, and differ by {different:.2g}")
    if facts:
        numbers = f"{counted(_world_size(), 'rank')} of {counted(len(step.batches), 'batch')} each"
        raise _unlike(f"{'; '.join(facts)}; {numbers} took the step", factor=factor, loss=worst.loss, due=worst.due)
    return found


def _refuse_random(step: TakenStep, samples: list[_Sample], limit: float, error: ProofError) -> None:
    """Refuse a model that is random without dropout, which explains an error; ModelError."""
    one = next((sample for sample in samples if sample.inputs), None)
    if one is None or _is_sharded(step.model):
        return
    with evaluating(step.model), without_dropout(step.model), torch.no_grad():
        step.model.train()
        first, second = (float(_summed_loss(step, one)[0]) for _ in range(2))
    if not abs(first - second) <= limit * abs(first):
        reason = "it is random in training mode with dropout off: two passes of a sample differ"
        raise ModelError("probe", reason) from error


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(one, DTensor) for one in model.parameters())


def _loss_apart(found: StepLoss, expected: _Expected) -> float:
    """Return how far a reported loss is from what is due, by the scale of its rounding."""
    if found.loss is None:
        return 0.0
    difference = loss_difference(found.loss, found.due, terms=expected.scale)
    return difference if math.isfinite(difference) else math.inf


def _digest(ids: torch.Tensor) -> str:
    """Return the digest of a sample's tokens."""
    return blake2b(np.asarray(ids.flatten().tolist(), dtype=np.int64).tobytes(), digest_size=16).hexdigest()


def _rank() -> int:
    return dist.get_rank() if _world_size() > 1 else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gathered(value: Any) -> list[Any]:
    """Return the value of each rank."""
    found = [value] * _world_size()
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


def _add_over_ranks(model: torch.nn.Module, gradients: Gradients) -> None:
    """Add gradients up over the ranks, in place; a rank without one has zeros."""
    names = {name for rank in _gathered(list(gradients)) for name in rank}
    for name, weight in model.named_parameters():
        if _world_size() > 1 and name in names:
            gradients.setdefault(name, torch.zeros_like(weight))
            dist.all_reduce(gradients[name])


def _unlike(fact: str, **details: Any) -> ProofError:
    return ProofError("unlike_step", fact, details)
