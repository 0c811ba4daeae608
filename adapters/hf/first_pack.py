"""
Comparison of a pack in the first training step with its samples computed alone.

The pack and each of its samples pass through the collator, the trainer's preparation, the model and
the loss. The comparison covers losses, and gradients with respect to the embedding of each token
id. Single samples are computed without the hooks of `unpad`, by transformers' own attention, as
whole rows on each rank. Dropout and noise are off during the comparison. Afterwards random state,
gradients, buffers, counts and metrics are restored, so training is bit for bit the same as without
the comparison.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object, send_to_device
from torch.autograd.graph import GradientEdge

from packplan.adapters.attention.shared_rows import count_tokens
from packplan.adapters.loaders.packs import PACK, PackOfRows
from packplan.adapters.loaders.rows import count_supervised
from packplan.adapters.models import Gradients, add_gradients, find_sharded_weight, replace_attributes
from packplan.adapters.probe.small_model import error_text
from packplan.adapters.proof.comparison import Outcome, allow_for_cancelling, compare
from packplan.adapters.proof.gradients import open_source
from packplan.adapters.proof.steps import rounding_limit_of, trying_losses
from packplan.core.config.remedies import GRADIENT_REMEDY, LOSS_REMEDY
from packplan.core.errors import MismatchError, counted

log = logging.getLogger(__name__)

_MOST_IDS = 2**31
"""Length of the sparse axis of token ids, which exceeds every id and needs no memory."""


class LocalAccelerator:
    """Accelerator whose `gather` and `reduce` return only this rank's values."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any, **_: Any) -> Any:
        """Return only this rank's tensor."""
        return tensor

    gather_for_metrics = reduce = gather


def require_pack_as_alone(trainer: Any, batches: list[Mapping[str, Any]], num_items: Any) -> None:
    """
    Check that the batch with the most samples has the loss and gradients of its samples alone.

    Every rank has to call this function. If ranks share the weights, or the loss compares samples
    with each other, the function only logs that it compares nothing. Other errors inside the
    comparison are logged too.

    Args:
        trainer: Trainer of packs, a `ServesPacks`.
        batches: Batches of the step.
        num_items: Divisor of the step's loss.

    Raises:
        MismatchError: On some rank, loss or gradients of the batch differ from those of its samples
            alone.
    """
    if find_sharded_weight(trainer.model) is not None or not trainer.loss_of_samples:
        why = "ranks share the weights" if trainer.loss_of_samples else "the loss compares samples with each other"
        log.warning("the first pack is not compared with its samples alone, since %s", why)
        return
    packs, fact = getattr(trainer.train_packs, "plan", trainer.train_packs).packs, None
    counts = [sum(len(packs[pack]) for pack in np.atleast_1d(batch[PACK]).tolist()) for batch in batches]
    if trainer.row_groups is not None:  # ranks that share a row compute the same microbatch
        counts = np.sum(gather_object([counts]), axis=0).tolist()
    batch = batches[counts.index(max(counts))]
    alone = f"with its samples alone, before the first step: {max(counts) + 1} forward and backward passes"
    trainer.show(f"comparing a pack of {counted(max(counts), 'sample')} {alone} (check=False skips them)")
    try:
        fact = _find_difference(trainer, batch, num_items, scale=len(batches))
    except Exception as error:  # noqa: BLE001  # told; what fails in training too ends the run there
        log.warning("the first pack could not be compared with its samples alone: %s", error_text(error))
    for rank, found in enumerate(gather_object([fact])):
        if found is not None:
            raise MismatchError("unlike_alone", f"on rank {rank}, {found}" if dist.is_initialized() else found)


def _samples_of(trainer: Any, batch: Mapping[str, Any]) -> Iterator[list[PackOfRows]]:
    """Yield each sample of a batch of packs, as a batch of one pack."""
    for pack in np.atleast_1d(batch[PACK]).tolist():
        rows = trainer.train_packs[pack]
        for place, row in enumerate(rows):
            yield [PackOfRows([row], pack, dict([*rows.lengths.items()][place : place + 1]))]


def _find_difference(trainer: Any, batch: Mapping[str, Any], num_items: Any, *, scale: int) -> str | None:
    """
    Return a clause that says how a batch differs from its samples alone; None if it agrees up to
    rounding.

    Args:
        trainer: See `require_pack_as_alone`.
        batch: Batch of packs.
        num_items: See `require_pack_as_alone`.
        scale: Number of batches of the step, by which the trainer divides the loss.
    """
    model = trainer.model
    with ExitStack() as stack:
        stack.enter_context(trying_losses(trainer, batches=scale))
        # Trainers gather metrics in their loss: no rank is to wait for one that has failed.
        vars(trainer).update(accelerator=LocalAccelerator(trainer.accelerator))
        if getattr(config := model.config.get_text_config(), "output_router_logits", False):
            # The router's loss compares the tokens of a batch.
            stack.enter_context(replace_attributes(config, output_router_logits=False))
            vars(trainer).update(aux_loss_enabled=False)
        rows = [*_samples_of(trainer, batch)]
        packed = _run_shared(trainer, batch, num_items, scale)
        stack.enter_context(trainer.reference())
        weight = scale / (len(rows) if trainer.loss_of_samples == "mean" else 1)

        def run_alone() -> Outcome:
            total: Gradients = {}
            loss, norms = 0.0, 0.0
            for row in rows:
                alone = trainer.collate(row)
                own, gradients = _run(trainer, send_to_device(alone, trainer.args.device), num_items, weight)
                # Without anything to learn, losses are 0 or NaN.
                if trainer.loss_of_samples == "mean" or count_supervised(alone["labels"]):
                    loss, norms = loss + own, norms + add_gradients(total, gradients)
            return Outcome(loss, total, norms)

        alone, limit = run_alone(), rounding_limit_of(trainer)
        apart = allow_for_cancelling(compare(Outcome(*packed), alone), alone, model, run_alone, limit=limit)
    if max(apart.loss, apart.gradients) <= limit:
        return None
    remedy = GRADIENT_REMEDY if apart.loss <= limit else LOSS_REMEDY
    return (
        f"pack {rows[0][0].pack} does not train like its {counted(len(rows), 'sample')} alone: its loss is "
        f"{packed[0]:.6g} instead of {alone.loss:.6g}. Gradients of its embeddings differ by {apart.gradients:.2g} of "
        f"their norm (allowed: {limit:.0e}); {remedy}"
    )


def _run_shared(trainer: Any, batch: Mapping[str, Any], num_items: Any, factor: float) -> tuple[float, Gradients]:
    """
    Return loss and gradients as `_run` does, for the whole row if ranks share the batch's row.
    """
    loss, gradients = _run(trainer, batch, num_items, factor)
    tokens, groups = count_tokens(batch), trainer.row_groups
    if groups is None or (group := groups.group_of(tokens)) is None:
        return loss, gradients
    weight = groups.weight_of(tokens)
    for one in gradients.values():  # a rank has a part of the row's gradient
        dist.all_reduce(one.values().div_(weight * group.size()), group=group)
    return loss / weight, gradients


def _run(trainer: Any, batch: Mapping[str, Any], num_items: Any, factor: float) -> tuple[float, Gradients]:
    """Return the trainer's loss of a batch, and its gradient by token id, both times *factor*."""
    sources: list[tuple[GradientEdge, torch.Tensor, torch.Tensor]] = []

    def note(_: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return embedded
        edge, embedded = open_source(embedded)
        sources.append((edge, args[0].reshape(1, -1), embedded.new_zeros(1).expand(embedded.shape)))
        return embedded

    with ExitStack() as inside:
        inside.enter_context(trainer.model.get_input_embeddings().register_forward_hook(note))
        inputs = inside.enter_context(trainer.prepared(dict(batch)))
        inside.enter_context(trainer.compute_loss_context_manager())
        loss = factor * trainer.compute_loss(trainer.model, inputs, num_items_in_batch=num_items)
        found = torch.autograd.grad(loss, [edge for edge, _, _ in sources], allow_unused=True)
    gradients: Gradients = {}
    for (_, ids, none), gradient in zip(sources, found, strict=True):
        values = (none if gradient is None else gradient).flatten(0, -2).float()
        by_id = torch.sparse_coo_tensor(ids, values, (_MOST_IDS, values.shape[-1]), check_invariants=False)
        add_gradients(gradients, {"embeddings": by_id.coalesce()})
    return float(loss.detach()), gradients
