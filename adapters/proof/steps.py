"""
Assertion that the loss of an optimizer step is the mean over all of its learned tokens.

The reference computes each sample of the step by itself, in float32 from its logits. So nothing of
it depends on batches, ranks or the trainer's own loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from packplan.adapters.loaders.rows import IGNORED_LABEL, RowsOfPacks, pad_rows, types_of
from packplan.adapters.models import Gradients, weight_gradients
from packplan.adapters.proof.batches import PackedBatch, shifted
from packplan.adapters.proof.comparison import (
    Comparison,
    Outcome,
    Sample,
    compare,
    limit_of,
    precision_of,
    run_alone,
)
from packplan.adapters.proof.taking import TakenStep, gradients_of, take_step, untouched
from packplan.core.equality import EQUAL, Precision
from packplan.core.errors import ArgumentError, MismatchError, PackplanError, counted
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
class _Served:
    """A sample of a step, and where it was served."""

    name: str
    """Words that name it."""

    key: str
    """Digest of its tokens."""

    learned: int
    """Tokens that are learned."""

    sample: Sample | None
    """The sample alone; None if it is computed elsewhere."""

    rank: int

    @classmethod
    def of(cls, name: str, key: str, targets: torch.Tensor, sample: Sample | None) -> _Served:
        """Return a sample of this rank that has these targets."""
        return cls(name, key, int((targets != IGNORED_LABEL).sum()), sample, _rank())


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
        MismatchError: The loss or the gradients differ, or the step has other samples than planned.
            It is an AssertionError, and names the factor.
        ArgumentError: The trainer or its batches cannot be read, or the function updates weights.
        ModelError: The model has no gradients to compare.
    """
    step = take_step(trainer, model, sharing=ranks_per_row)
    samples = _agreed(lambda: _served(step, planned=plan is not None))
    if plan is not None:
        served = samples
        samples = _agreed(lambda: _planned(step, trainer, plan, rows=rows, packs=packs))
        if step.sharing == 1:
            _refuse_other_samples(served, samples)
    tokens = sum(one.learned for one in samples)
    if not tokens:
        raise ArgumentError("packed_batch", "the step learns no token, so it has no loss to compare")
    if limit is None:
        precision = _precision_of(step)
        limit = max(EQUAL[precision], limit_of(step.model, precision))
    mine = [
        attrs.evolve(one.sample, weights=torch.full(one.sample.targets.shape, 1 / tokens))
        for one in samples
        if one.learned and one.sample is not None
    ]
    with untouched(step.model), torch.enable_grad():
        step.model.eval()
        expected = _outcome_alone(step, mine)
    apart = compare(Outcome(expected.loss if step.loss is None else step.loss, step.gradients), expected)
    learning = sum(one.learned > 0 for one in samples)
    factor = _factor(step.gradients, expected.gradients)
    found = StepLoss(step.loss, expected.loss, apart.gradients, factor, learning, tokens, limit)
    _refuse_differences(step, found, apart)
    return found


def _precision_of(step: TakenStep) -> Precision:
    """Return the type in which a step computes."""
    device = next(step.model.parameters()).device.type
    with step.computing():
        if torch.is_autocast_enabled(device):
            return "bfloat16" if torch.get_autocast_dtype(device) == torch.bfloat16 else "float16"
    return precision_of(step.model)


def _agreed(make: Callable[[], list[_Served]]) -> list[_Served]:
    """Return all ranks' samples, this rank's with tensors; raise on all ranks what one raises."""
    try:
        mine, error = make(), None
    except PackplanError as raised:
        mine, error = [], raised
    shared = _gathered(([attrs.evolve(one, sample=None) for one in mine], error))
    for _, failure in shared:
        if failure is not None:
            raise failure
    return [one for rank, (theirs, _) in enumerate(shared) for one in (mine if rank == _rank() else theirs)]


def _served(step: TakenStep, *, planned: bool) -> list[_Served]:
    """Return the samples that reached this rank; none if rows are shared and a plan tells them."""
    if _rank() % step.sharing or (planned and step.sharing > 1):
        return []
    samples = []
    for number, batch in enumerate(step.batches):
        read = PackedBatch.read(batch, None, at_least=1)
        if not planned and read.labels is None:
            raise ArgumentError("packed_batch", "the model is given no labels, so give the plan and its rows")
        alone = [None] * len(read.places) if planned else read.samples()
        for place, (targets, own) in enumerate(zip(read.targets(), alone, strict=True)):
            key = _digest(read.inputs["input_ids"][read.places[place]])
            samples.append(_Served.of(f"sample {place} of batch {number} on rank {_rank()}", key, targets, own))
    return samples


def _planned(step: TakenStep, trainer: Any, plan: Plan, *, rows: Any, packs: Sequence[int] | None) -> list[_Served]:
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
            sample = Sample(batch, shifted(labels))
            key = _digest(batch["input_ids"][0])
            samples.append(_Served.of(f"sample {index} (pack {pack})", key, sample.targets, sample))
    return samples[_rank() :: _world_size()]


def _refuse_other_samples(served: list[_Served], planned: list[_Served]) -> None:
    """Refuse a step that does not train each planned sample once, by its labels; MismatchError."""
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


def _outcome_alone(step: TakenStep, mine: list[Sample]) -> Outcome:
    """Return the outcome of all ranks' samples, each alone, of which this rank computes its own."""
    sharded = _is_sharded(step.model)
    if sharded:  # all ranks run as many passes, since each gathers weights
        shares = _gathered(len(mine))
        if not all(shares):
            fact = f"a rank has no sample of the step's {sum(shares)}, and all have to run a pass"
            raise ArgumentError("host", fact)
        filler = attrs.evolve(mine[-1], weights=torch.zeros(mine[-1].targets.shape))
        mine = [*mine, *[filler] * (max(shares) - len(mine))]
    take = _sharded_gradients if sharded else weight_gradients
    outcome = run_alone(step.model, mine, call=step.call, gradients=take, keep=False)
    if not sharded:
        _add_over_ranks(step.model, outcome.gradients)
    losses, norms, scales = zip(*_gathered((outcome.loss, outcome.norms, outcome.scale)), strict=True)
    norm = outcome.norms if sharded else sum(norms)
    return attrs.evolve(outcome, loss=math.fsum(losses), norms=norm, scale=max(scales))


def _sharded_gradients(model: torch.nn.Module, loss: torch.Tensor) -> Gradients:
    """Return gradients of the sum of all ranks' losses; FSDP averages them in a backward pass."""
    (loss * _world_size()).backward()  # type: ignore[no-untyped-call]
    found = gradients_of(model)
    model.zero_grad()
    return found


def _factor(found: Gradients, expected: Gradients) -> float:
    """Return the size of gradients along the expected ones, over the size of those."""
    due = sum(float((one.double() ** 2).sum()) for one in expected.values())
    along = (float((found[name].double() * one.double()).sum()) for name, one in expected.items() if name in found)
    return sum(along) / (due or 1.0)


def _refuse_differences(step: TakenStep, found: StepLoss, apart: Comparison) -> None:
    """Refuse a step that differs on any rank, on all of them; MismatchError."""
    if not step.gradients:
        raise ArgumentError("host", "the step left no gradients: the function has to leave them in the weights")
    norms = _gathered(math.hypot(*(float(one.double().norm()) for one in step.gradients.values())))
    if max(norms) - min(norms) > found.limit * max(norms):
        raise _unlike("the ranks have different gradients: they were not reduced before the update")
    loss_apart, loss = max(_gathered((apart.loss, found.loss or 0.0)))
    facts = []
    if loss_apart > found.limit:
        ratio = loss / found.due
        facts.append(f"the step's loss is {loss:.5g}, {ratio:.4g} times the {found.due:.5g} that is due")
    if not (found.gradients <= found.limit and abs(found.factor - 1) <= found.limit):
        factor = f"{found.factor:.4g} times those that are due"
        facts.append(f"the gradients are {factor}, and differ by {found.gradients:.2g}")
    if facts:
        numbers = f"{counted(_world_size(), 'rank')} of {counted(len(step.batches), 'batch')} each"
        raise _unlike(f"{'; '.join(facts)}; {numbers} took the step", factor=found.factor, loss=loss, due=found.due)


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(one, DTensor) for one in model.parameters())


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


def _unlike(fact: str, **details: Any) -> MismatchError:
    return MismatchError("unlike_step", fact, details)
