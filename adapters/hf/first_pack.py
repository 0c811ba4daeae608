"""
Comparison of the first pack that a trainer trains with its samples, one by one.

The trainer's own loader, collator and loss compute both, so what they add to a plan is compared
too: a divisor that counts rows, positions that a collator forgets, labels across a border. Dropout
and noise are off meanwhile. Afterwards gradients, buffers, random state and the trainer are as
before, so that training goes on bit by bit as without the comparison.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.checkpoint import checkpoint

from packplan.adapters.loaders.rows import PACK, PackOfRows, count_supervised
from packplan.adapters.models import replace_attributes
from packplan.adapters.proof.comparison import compare_values, difference_limit, experts_may_differ
from packplan.adapters.proof.steps import restoring_attributes, restoring_training_state
from packplan.core.equality import loss_difference
from packplan.core.errors import MismatchError, counted

log = logging.getLogger(__name__)

Inputs = Mapping[str, Any]
"""Inputs of the model for a batch, as the trainer's loader gives them."""


def require_equal_to_samples(trainer: Any, batch: Inputs, rows: PackOfRows, collate: Any) -> None:
    """
    Require that a pack has the loss of its samples alone, and their gradients of embeddings.

    Every rank calls this, with a pack of its own, so that all ranks raise the same error.

    Args:
        trainer: Trainer of transformers, TRL or ms-swift.
        batch: Batch of the pack.
        rows: Rows of the pack.
        collate: Collator that makes the batch of a pack.

    Raises:
        MismatchError: A rank's pack differs.
    """
    lengths = [dict([one]) for one in rows.lengths.items()] or [{}] * len(rows)
    pairs = zip(rows, lengths, strict=True)
    alone = [collate([PackOfRows([row], rows.pack, planned)]) for row, planned in pairs]
    facts = gather_object([_difference_text(trainer, batch, alone, most=max(gather_object([len(alone)])))])
    for rank, fact in enumerate(facts):
        if fact is not None:
            of = f" of rank {rank}" if len(facts) > 1 else ""
            raise MismatchError("unlike_alone", f"pack {rows.pack if not of else ''}{of} {fact}")


def _difference_text(trainer: Any, batch: Inputs, alone: Sequence[Inputs], *, most: int) -> str | None:
    """
    Return how a pack differs from its samples, as a clause; None if it does not.

    Args:
        trainer: Trainer whose loss is computed.
        batch: Batch of the pack.
        alone: Batch of each sample.
        most: Samples of any rank's pack: losses of TRL gather numbers, so ranks compute as many.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    num_items = torch.as_tensor(max(1, count_supervised(batch["labels"])), device=trainer.args.device)
    with ExitStack() as stack:
        stack.enter_context(restoring_training_state(model))
        stack.enter_context(restoring_attributes(trainer))
        vars(trainer).update(_metrics=copy.deepcopy(getattr(trainer, "_metrics", None)))  # TRL's, which grow in place
        text = model.config.get_text_config()
        if getattr(text, "output_router_logits", False):
            log.info("the loss of routers, which compares the tokens of a batch, is left out of the first comparison")
            stack.enter_context(replace_attributes(text, output_router_logits=False))
        embeddings = model.get_input_embeddings()
        if hasattr(embeddings, "neftune_noise_alpha"):
            stack.enter_context(replace_attributes(embeddings, neftune_noise_alpha=0.0))
        for one in model.modules():
            if getattr(one, "gradient_checkpointing", False):  # reentrant ones give no gradients of inputs
                exact = partial(checkpoint, use_reentrant=False)
                stack.enter_context(replace_attributes(one, _gradient_checkpointing_func=exact))
        model.train()
        found, gradients, limit = _run(trainer, model, batch, num_items)
        each = [_run(trainer, model, one, num_items)[:2] for one in islice(cycle(alone), most)][: len(alone)]
    due, expected = sum(loss for loss, _ in each), torch.cat([one for _, one in each])
    if not loss_difference(found, due, term_size=abs(due)) <= limit:
        return f"has a loss of {found:.6g}, where its {counted(len(alone), 'sample')} alone have {due:.6g} together"
    if gradients.shape != expected.shape:
        return f"computes {len(gradients):,} tokens, where its samples have {len(expected):,}"
    (apart,) = compare_values([gradients], [expected], median=experts_may_differ(model))
    if not apart <= limit:
        fact = f"gradients of its embeddings that differ from its samples' by {apart:.2g}"
        return f"has {fact}, where {limit:.0e} is allowed"
    return None


def _run(trainer: Any, model: Any, batch: Inputs, num_items: torch.Tensor) -> tuple[float, torch.Tensor, float]:
    """Return the loss of a batch, its gradient by embedded token, and the difference allowed."""
    embedded: list[torch.Tensor] = []
    limits: list[float] = []

    def note(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output if output.requires_grad else output.detach().requires_grad_())
        limits.append(difference_limit(model))  # under autocast, if that is on
        return embedded[-1].clone()  # what follows may write into it

    inputs = trainer._prepare_inputs({key: value for key, value in batch.items() if key != PACK})  # noqa: SLF001  # has no public name
    mask = inputs.get("attention_mask")
    with model.get_input_embeddings().register_forward_hook(note), trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        (gradient,) = torch.autograd.grad(loss, embedded[-1:], allow_unused=True)
    gradient = torch.zeros_like(embedded[-1]) if gradient is None else gradient
    is_padded = mask is not None and gradient.shape[:2] == mask.shape
    return float(loss.detach()), (gradient[mask != 0] if is_padded else gradient.flatten(0, 1)).float(), limits[-1]
