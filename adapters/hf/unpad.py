"""
`unpad` makes a model skip padding. `separate_samples` makes a model keep the samples of a row
apart.

`unpad` tries each module whose calls may be packed, with each way to find samples and to count
positions. The trial rows have padding on the right, on the left and between tokens. `unpad` uses
the first combination whose hooks (see `packed_calls`) leave all results unchanged. If there is
none, `unpad` uses the combination that changes results for the fewest sides of padding, and these
sides stay padded. If results change even for padding on the right, the model is refused.

`assert_unpadded_equal` compares the loss and the gradients of a batch with and without padding.
"""

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from typing import Any

import attrs
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from packplan.adapters.attention import NAME, set_attention
from packplan.adapters.attention.packed_row import PADDINGS, RealTokens
from packplan.adapters.attention.shared_rows import RowGroups, attention_for_shared_rows, share_rows, sharing_by
from packplan.adapters.families import trained_config, trained_part
from packplan.adapters.hf.first_pack import LocalAccelerator
from packplan.adapters.hf.packed_calls import HOOKED, POSITIONS, TextStack, Unpadding
from packplan.adapters.models import add_gradients, evaluation_mode, find_sharded_weight, weight_gradients
from packplan.adapters.probe.probe import probe_small_copy
from packplan.adapters.probe.probe_row import (
    build_small_copy,
    draw_token_types,
    ordinary_token_ids,
    probe_ready_model,
    probe_sharing_copy,
)
from packplan.adapters.probe.small_model import error_text
from packplan.adapters.proof.comparison import Outcome, allow_for_cancelling, compare
from packplan.adapters.proof.first_calls import FirstCalls, find_difference, raising_together
from packplan.adapters.proof.steps import rounding_limit_of, trying_losses
from packplan.adapters.versions import has_flash_package
from packplan.core.equality import AUTO, VARLEN, AttentionChoice, choose_attention
from packplan.core.errors import ArgumentError, MismatchError, ModelError

log = logging.getLogger(__name__)

_LENGTHS = (17, 3)
"""
Numbers of real tokens in the first two rows of the probe. `_longest_probe` returns the number for
the third row.
"""

_LONGEST = 29

_SEED = 5


def unpad(model: Any, *, logits: bool = True, groups: RowGroups | None = None, check: bool = True) -> Unpadding:
    """
    Make a model compute no padding: the real tokens of each batch are computed as one packed row.

    ```py
    trainer = DPOTrainer(model, args=args, train_dataset=rows)
    for one in (trainer.model, trainer.ref_model):
        unpad(one)
    trainer.train()
    ```

    Call `unpad` on each model that a trainer runs, after the trainer is built. Rows may be padded
    left, right, on both sides or between tokens. Apart from rounding, results at positions with
    mask 1 are the same as in the padded pass. Results at other positions are 0. Generation is not
    packed. First, `unpad` probes the model for a few seconds, as `separate_samples` does.
    Afterwards the model uses the fastest attention that has passed the probe, usually Packplan's
    own.

    Args:
        model: Model of transformers, which may have adapters and may be wrapped for several ranks.
        logits: Whether logits at padding are returned too. False is for callers that read only the
            loss, since training calls with labels then return logits of shape (1, real tokens,
            vocabulary).
        groups: Groups of ranks that share packed rows (see `adapters.attention.shared_rows`); the
            ranks of a group have to pass the same batches. None if each rank computes its own rows.
        check: Whether the first call of each kind is computed two more times, with and without
            padding, to compare the results (docs/use-it-in/transformers.md).

    Raises:
        ModelError: The probe fails, or models of this kind cannot be packed.
        MismatchError: A first call differs from its padded pass. The call raises this error; on
            several ranks with whole weights, the next step of an optimizer does.
        ArgumentError: The model is hooked already, or is not a model of transformers.
    """
    inner = unwrap(model)
    with raising_together(inner):
        if any(module in HOOKED for module in inner.modules()):
            raise ArgumentError("host", "the model has hooks of unpad or use_plan already: leave this call out")
        if groups is None and is_bidirectional(inner.config):
            attention = AttentionChoice(VARLEN)
            set_attention(inner, attention)
        else:
            attention = set_isolating_attention(inner, named=NAME, groups=groups, logits=logits)
        asked = inner
        if find_sharded_weight(inner) is not None:
            kind = next(one for one in type(trained_part(inner)).__mro__ if not issubclass(one, FSDPModule))
            asked = build_small_copy(inner, attention, groups=groups, kind=kind)
        with sharing_by(None if groups is None else groups.degrees[-1]):
            stack, why_not = _find_stack(inner, asked, native=attention.native, logits=logits)
    first_calls = FirstCalls(attention.native) if check and groups is None else None
    if check and first_calls is None:
        log.warning("the first calls are not compared with their padded passes, since ranks share rows")
    calls = getattr(first_calls, "compare", None)
    heads = dict.fromkeys((_without_ranks(model), inner, inner.base_model))
    hooks = Unpadding(inner, stack, logits=logits, heads=heads, compare=calls, unpacked_sides=why_not)
    if first_calls is not None:
        hooks.handles += [first_calls, register_optimizer_step_pre_hook(first_calls.refuse_step)]
        weakref.finalize(inner, hooks.handles[-1].remove)  # torch keeps it for all optimizers
    hooks.native, hooks.groups = attention.native, groups
    return hooks


def separate_samples(
    model: Any, *, named: str | None = None, ready: bool = True, groups: RowGroups | None = None
) -> AttentionChoice:
    """
    Make a model attend only within each sample of a packed row; return the attention that it uses.

    A model loaded with `attn_implementation="packplan"` takes the fastest attention that passes the
    probe. A model that was loaded with another attention keeps that attention. The probe runs for
    some seconds, on a small copy of the model and then on the model itself. Gradients between
    samples have to be exactly 0, and the results of each sample have to equal those of the sample
    alone. `config.use_cache` is set to False, since transformers keeps samples apart only in calls
    without a cache.

    Args:
        model: Model of transformers, perhaps with adapters.
        named: Name of the attention; None takes the attention that the model was loaded with.
        ready: Whether the model itself can be probed. If not, or if this process holds only a part
            of its weights, only small copies are probed.
        groups: See `unpad`.

    Raises:
        ModelError: The probe fails.
    """
    config = trained_config(model.config)
    named = named or config._attn_implementation  # noqa: SLF001  # has no public name
    for one in (config, config.get_text_config()):
        if hasattr(one, "use_cache"):
            one.use_cache = False
    with raising_together(model):
        choice = set_isolating_attention(model, named=named, groups=groups)
        if ready and find_sharded_weight(model) is None:
            probe_ready_model(model, native=choice.native, named=named, groups=groups)
        elif groups is not None:
            probe_sharing_copy(model, choice, named=named, groups=groups)
    return choice


def set_isolating_attention(
    model: Any, *, named: str, groups: RowGroups | None = None, logits: bool = False
) -> AttentionChoice:
    """
    Set an attention that has kept samples apart in a small copy of the model; return the attention.

    Args:
        model: Model of transformers.
        named: Name of the attention to probe; `packplan` takes the fastest one that passes.
        groups: See `unpad`.
        logits: See `share_rows`.

    Raises:
        ModelError: The probe fails.
    """
    config = trained_config(model.config)
    attn_impl = AUTO if named == NAME else named
    on_cpu = next(model.parameters()).device.type == "cpu"
    verdict = probe_small_copy(config, attn_impl=attn_impl, on_cpu=on_cpu)
    choice = choose_attention(attn_impl, verdict, flash_installed=has_flash_package(attn_impl), on_cpu=on_cpu)
    if choice.leak is not None:
        raise ModelError.for_leak(verdict.model_type, named, choice.leak)
    if attn_impl == AUTO and choice.loaded_backend != config._attn_implementation:  # noqa: SLF001  # has no public name
        model.set_attn_implementation(choice.loaded_backend)
    if groups is not None:
        choice = attention_for_shared_rows(choice)
    set_attention(model, choice)
    if groups is not None:
        share_rows(model, groups, logits=logits)
    return choice


def is_bidirectional(config: Any) -> bool:
    """Return whether tokens also attend to later tokens, as in BERT."""
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)


def unwrap(model: Any) -> Any:
    """
    Return the model inside wrappers of DDP, DeepSpeed and PEFT.

    Raises:
        ModelError: Models of this kind cannot be packed.
        ArgumentError: *model* is not a model of transformers.
    """
    model = _without_ranks(model)
    adapters = getattr(model, "peft_config", {})
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if adapter.is_prompt_learning and adapter.peft_type == "PREFIX_TUNING":
            raise ModelError("probe", "prefix tuning needs a cache, which packed samples cannot have: use LoRA")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if isinstance(inner, torch.nn.DataParallel):
        raise ModelError("probe", "DataParallel copies the model: start a process for each GPU with torchrun")
    if not hasattr(inner, "base_model"):
        kind = type(inner).__name__
        own = "trainer.model" if hasattr(model, "get_train_dataloader") else "the model inside"
        raise ArgumentError("host", f"unpad takes a model of transformers, not a {kind}: pass {own}")
    if inner.config.is_encoder_decoder or getattr(inner.config, "add_cross_attention", False):
        name = inner.config.model_type
        raise ModelError("probe", f"{name} has an encoder, whose rows would stay padded: train it without unpad")
    return inner


def _without_ranks(model: Any) -> Any:
    """Return the model inside DDP or an engine of DeepSpeed."""
    while isinstance(model, DistributedDataParallel) or type(model).__module__.startswith("deepspeed."):
        model = model.module
    return model


def _find_stack(model: Any, asked: Any, *, native: str, logits: bool) -> tuple[TextStack, dict[str, str]]:
    """
    Return the first text stack whose hooks change results for the fewest sides of padding. Also
    return each side of padding that is not packed, with the reason.

    Args:
        model: Model of transformers without wrappers, set to keep samples of a row apart.
        asked: Model that computes the trial rows, either *model* or a small copy with the same
            modules.
        native: Attention of transformers that computes the padded rows.
        logits: See `unpad`.

    Raises:
        ModelError: With every text stack, results of rows that are padded on the right change.
    """
    tried: list[tuple[TextStack, dict[str, str]]] = []
    for stack, own in zip(_candidate_stacks(asked), _candidate_stacks(model), strict=True):
        hooks = Unpadding(asked, stack, logits=logits)
        reasons = {side: _hook_fault(asked, hooks, mask, native=native) for side, mask in _trial_masks(asked)}
        hooks.remove()
        tried.append((own, {side: reason for side, reason in reasons.items() if reason is not None}))
        if not tried[-1][1]:
            break
    best, why_not = min(tried, key=lambda one: ("right of" in one[1], len(one[1])))
    if "right of" in why_not:
        where = f"with hooks at {type(best.module).__name__} and positions by {best.positions}"
        raise ModelError("probe", f"{type(model).__name__} cannot leave padding out: {where}, {why_not['right of']}")
    best.unpacked_sides = frozenset(side for side in PADDINGS if side in why_not)
    for side, reason in why_not.items():
        level = logging.WARNING if side == "left of" else logging.INFO
        text = "calls with padding %s tokens are computed with padding, since results would differ: %s"
        log.log(level, text, side, reason)
    return best, why_not


def _candidate_stacks(model: Any) -> Iterator[TextStack]:
    """
    Yield each module of a model whose calls may be packed, once for each way to find samples and to
    count positions.
    """
    part = trained_part(model)
    padding = getattr(part.config.get_text_config(), "pad_token_id", None) or 0
    text_row = any(hasattr(module, "get_rope_index") for module in model.modules())
    for module in dict.fromkeys((part.get_decoder(), part.base_model)):
        for by_positions, positions in product((False, True), POSITIONS):
            yield TextStack(module, positions, padding, text_row, by_positions)


def _hook_fault(model: Any, hooks: Unpadding, mask: torch.Tensor, *, native: str) -> str | None:
    """
    Return a clause that says how hooks change the results of rows with *mask*, or which error they
    raise. Return None if the hooks do neither.
    """
    padding = getattr(trained_config(model.config).get_text_config(), "pad_token_id", None) or 0
    ids = _draw_ids(model).where(mask > 0, padding)
    batch = {"input_ids": ids, "attention_mask": mask, **draw_token_types(model, ids), "use_cache": False}
    with evaluation_mode(model), torch.enable_grad():
        try:
            return find_difference(hooks, model, batch, RealTokens.from_mask(mask), native=native)
        except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
            return f"it raises {error_text(error)}"


def _draw_ids(model: Any) -> torch.Tensor:
    """Return the same random token ids at each call; int64 of shape (rows, positions)."""
    plain = torch.tensor(ordinary_token_ids(trained_config(model.config)))
    generator = torch.Generator().manual_seed(_SEED)
    drawn = plain[torch.randint(len(plain), (len(_LENGTHS) + 1, _longest_probe(model.config) + 2), generator=generator)]
    return drawn.to(next(model.parameters()).device)


def _longest_probe(config: Any) -> int:
    """
    Return the number of tokens of the probe's longest row, which exceeds the local attention window
    of a bidirectional model.
    """
    return max(_LONGEST, (getattr(config, "local_attention", 0) if is_bidirectional(config) else 0) + 3)


def _trial_masks(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each side of padding, with a mask of this padding; int64 of shape (rows, positions)."""
    longest = _longest_probe(model.config)
    lengths = torch.tensor([*_LENGTHS, longest], device=next(model.parameters()).device)[:, None]
    columns = torch.arange(longest + 2, device=lengths.device)[None]
    right = (columns < lengths).long()
    yield "right of", right
    yield "left of", right.flip(1)
    yield "between", right * (columns % 5 != 2)


@attrs.frozen
class UnpaddedStep:
    """Losses of a trainer's batch with and without padding, and the difference of gradients."""

    loss: float
    """Loss without padding."""

    padded_loss: float
    """Loss with padding."""

    gradients: float
    """Norm of the difference of gradients, divided by the norm of the gradients with padding."""

    real: int
    """Number of positions that the packed calls computed, over all models."""

    padded: int
    """Number of positions of the padded batches that the packed calls received."""


def assert_unpadded_equal(trainer: Any, *, limit: float | None = None) -> UnpaddedStep:
    """
    Assert that a batch of a trainer has the same loss and gradients with and without padding.

    The trainer's first batch is computed twice with the trainer's loss: with padding, and without
    padding by the hooks of `unpad`. If no model has hooks, they are added for this comparison only.
    Dropout is off. Weights, gradients, random state and the trainer are restored afterwards.

    Args:
        trainer: Trainer of transformers or TRL; its reference model is compared too.
        limit: Largest allowed relative difference. None takes the rounding error of the trainer's
            precision.

    Raises:
        MismatchError: The loss or the gradients differ.
        ArgumentError: The batch has no padding, so nothing is compared.
        ModelError: The model cannot be hooked.
    """
    model = trainer.model
    models = [one for one in (model, getattr(trainer, "ref_model", None)) if one is not None]
    with ExitStack() as stack:
        hooks = [HOOKED[module] for one in models for module in one.modules() if module in HOOKED]
        for one in models if not hooks else ():
            hooks.append(unpad(one))
            stack.callback(hooks[-1].remove)
        stack.enter_context(trying_losses(trainer, batches=trainer.args.gradient_accumulation_steps))
        inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))  # noqa: SLF001  # GRPO draws answers here
        before = [attrs.evolve(one.counts) for one in hooks]
        found = _run(trainer, inputs)
        real = sum(one.counts.real - then.real for one, then in zip(hooks, before, strict=True))
        padded = sum(one.counts.padded - then.padded for one, then in zip(hooks, before, strict=True))
        for one in hooks:
            stack.enter_context(one.paused())
        due = _run(trainer, inputs)
        limit = rounding_limit_of(trainer) if limit is None else limit
        vars(trainer).update(accelerator=LocalAccelerator(trainer.accelerator))  # other ranks may not compute again
        apart = allow_for_cancelling(compare(found, due), due, model, lambda: _run(trainer, inputs), limit=limit)
    if not padded:
        fact = "the trainer's batch has no padding to leave out: raise per_device_train_batch_size"
        raise ArgumentError("packed_batch", fact)
    step = UnpaddedStep(found.loss, due.loss, apart.gradients, real, padded)
    if not max(apart.loss, apart.gradients) <= limit:
        fact = (
            f"without padding the loss is {step.loss:.7g} instead of {due.loss:.7g}, and gradients differ by "
            f"{step.gradients:.2g} of their norm (allowed: {limit:.0e})"
        )
        raise MismatchError("unlike_padded", fact, attrs.asdict(step))
    return step


def _run(trainer: Any, inputs: Any) -> Outcome:
    """Return the trainer's loss of a batch, and the gradients of the weights."""
    given = dict(inputs) if isinstance(inputs, Mapping) else inputs  # trainers take labels out
    loss = trainer.compute_loss(trainer.model, given)
    gradients = weight_gradients(trainer.model, loss)
    return Outcome(float(loss.detach()), gradients, add_gradients({}, gradients))
