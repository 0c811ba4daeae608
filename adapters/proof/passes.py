"""
Comparison of a model's packed call with its padded pass, on a batch of the user's data.

`run_pass` computes a call without dropout and noise, and restores random state, buffers and
gradients afterwards. `difference_text` compares the results of two passes by sample.
"""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import Any

import attrs
import torch
from torch.autograd.graph import GradientEdge
from torch.nn.functional import pad
from torch.utils._pytree import keystr, tree_flatten_with_path

from packplan.adapters.attention.packed_row import RealTokens
from packplan.adapters.proof.comparison import compare_values, difference_limit, experts_may_differ
from packplan.adapters.proof.gradients import open_source
from packplan.adapters.proof.steps import restoring_training_state
from packplan.core.equality import ProbeResult, loss_difference

_SEED = 13
"""
Seed of the random weights of outputs, whose weighted sum is differentiated if a call has no loss.
"""

_SKIPPED = re.compile("(cross_)?attentions|past_key_values|image|video|rope_deltas")
"""Name pattern of outputs that a packed call need not return in the padded form."""

_STATES, _GRADIENT = "last hidden state", "gradient of the embeddings"


@attrs.define(eq=False)
class Pass:
    """Results of a forward pass, and the largest difference that rounding may cause."""

    values: dict[str, list[torch.Tensor]] = attrs.field(factory=dict)
    """
    Name of an output -> values of each sample, of shape (tokens, width), or (1, width) if pooled.
    """

    scalars: dict[str, float] = attrs.field(factory=dict)

    isolation: float = 0.0
    """See `ProbeResult`."""

    limit: float = 0.0

    median: bool = False
    """See `compare_values`."""


def run_pass(
    model: Any,
    stack: Any,
    call: Callable[[], Any],
    tokens: RealTokens | None,
    *contexts: AbstractContextManager[Any],
    keeps: Any = None,
) -> Pass:
    """
    Compute a call and the gradient of its loss. Without a loss, compute the gradient of a fixed sum
    of outputs.

    Args:
        model: Model of transformers without wrappers.
        stack: Text stack of the model, which runs inside the call.
        call: Function that calls the model, its wrapper, or the stack.
        tokens: Real tokens of the batch; None reads no results.
        contexts: Contexts in which the call runs.
        keeps: Value of the call's `logits_to_keep`: number of last columns that have logits, or
            indices of the columns; None or 0 for all.
    """
    run, outputs = Pass(), {}
    sources: list[GradientEdge] = []

    def note_source(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return embedded
        edge, embedded = open_source(embedded)
        sources.append(edge)
        return embedded

    def note_results(_: Any, __: Any, output: Any) -> None:
        outputs[_STATES] = output[0]
        run.limit, run.median = difference_limit(model), experts_may_differ(model)  # under the call's autocast

    with ExitStack() as inside:
        for context in (restoring_training_state(model), *contexts):
            inside.enter_context(context)
        inside.enter_context(stack.get_input_embeddings().register_forward_hook(note_source))
        inside.enter_context(stack.register_forward_hook(note_results))
        leaves, _ = tree_flatten_with_path(call())
        if tokens is None:
            return run
        named = {keystr(path).strip("[]'"): one for path, one in leaves if isinstance(one, torch.Tensor)}
        outputs |= {name: one for name, one in named.items() if one.is_floating_point() and not _SKIPPED.match(name)}
        columns = torch.arange(tokens.shape[1], device=tokens.places.device)
        kept = columns[-keeps:] if isinstance(keeps, int) else columns if keeps is None else columns[keeps]
        _read_outputs(run, outputs, sources[-1:], tokens, kept)
    return run


def _read_outputs(
    run: Pass, outputs: Mapping[str, torch.Tensor], sources: list[GradientEdge], tokens: RealTokens, kept: torch.Tensor
) -> None:
    """
    Store the outputs, their gradient and the gradients between samples in *run*, split by sample.

    Args:
        run: Pass in which the results are stored.
        outputs: Name -> output of the call.
        sources: Gradient edges of the call's embedded tokens; empty without gradients.
        tokens: Real tokens of the batch.
        kept: Columns of the batch that have logits.
    """
    terms, owners, draw = [], [], torch.Generator().manual_seed(_SEED)
    run.scalars = {name: float(one.detach()) for name, one in outputs.items() if one.dim() == 0}
    for name, value in outputs.items():
        values, samples = _by_sample(value, tokens, kept)
        if samples is not None:
            run.values[name] = _split(values.detach(), samples)
        if samples is not None and values.requires_grad:
            terms.append((values @ torch.randn(values.shape[1], generator=draw).to(values)).float())
            owners.append(samples)
    if not (terms and sources):
        return
    results, readers = torch.cat(terms), torch.cat(owners)
    weights = torch.randn(len(results), generator=draw).to(results)

    def gradient_of(result: torch.Tensor, weight: torch.Tensor | None) -> Any:
        (found,) = torch.autograd.grad([result], sources, [weight], retain_graph=True, allow_unused=True)
        return (readers[:0, None], readers[:0]) if found is None else _by_sample(found, tokens)

    loss = next(((one, None) for one in outputs.values() if one.dim() == 0 and one.requires_grad), (results, weights))
    run.values[_GRADIENT] = _split(*gradient_of(*loss))
    for bit in range(int(readers.max()).bit_length()):
        for side in (0, 1):  # a set of samples, whose results are to reach no other sample
            sizes, of = gradient_of(results, weights * ((readers >> bit & 1) == side))
            own = (of >> bit & 1) == side
            if bool(sizes[~own].any()):
                run.isolation = max(run.isolation, float(sizes[~own].abs().max() / sizes[own].abs().max()))


def _by_sample(value: torch.Tensor, tokens: RealTokens, kept: torch.Tensor | None = None) -> Any:
    """
    Return the values of real tokens or of rows, and the sample index of each. The indices are None
    for other tensors.

    Args:
        value: Tensor of shape (rows, positions, …), (rows * positions, …), (1, tokens, …), (tokens,
            …), (rows, kept columns, …) or (rows, …).
        tokens: Real tokens of the batch.
        kept: Columns of the batch that have logits.
    """
    places, (rows, columns), samples = tokens.places, tokens.shape, tokens.row.sample_ids
    if kept is not None and len(kept) < columns and value.dim() > 2 and tuple(value.shape[:2]) == (rows, len(kept)):
        order = torch.full((columns,), -1, device=kept.device).index_copy(0, kept, torch.arange(len(kept)).to(kept))
        at = order[places % columns]
        inside = at >= 0
        own = (places // columns * len(kept) + at)[inside]
        return value.flatten(0, 1)[own].reshape(len(own), -1), samples[inside]
    if tuple(value.shape) == (rows, columns - 1):  # values for next tokens
        value = pad(value, (0, 1))
    if tuple(value.shape[:2]) in ((rows, columns), (1, len(places))):
        value = value.flatten(0, 1)
    if value.dim() and len(value) in (rows * columns, len(places)):
        return (value[places] if len(value) == rows * columns else value).reshape(len(places), -1), samples
    if value.dim() and len(value) == rows:
        own = places[tokens.row.boundaries[:-1]] // columns
        return value[own].flatten(1), torch.arange(len(own), device=own.device)
    return value, None


def _split(values: torch.Tensor, samples: torch.Tensor) -> list[torch.Tensor]:
    """Return the values of each sample; shape (values, width)."""
    return list(torch.split(values, samples.bincount().tolist()))


def difference_text(found: Pass, expected: Pass) -> str | None:
    """
    Return a clause that says how two passes differ by more than rounding; None if they do not.

    Args:
        found: Results of the packed pass.
        expected: Padded pass. Values of the padded pass that are not finite are not compared.
    """
    if found.isolation:
        return ProbeResult(found.isolation, 0.0).reason_against_packing(limit=expected.limit)
    scale = expected.values.get(_STATES) or [*chain(*expected.values.values())]
    differences, largest = {}, max(float(one.abs().max()) for one in scale)
    for name, due in expected.values.items():
        mine = found.values.get(name, [])
        if [len(one) for one in mine] != [len(one) for one in due]:
            differences[name] = math.inf
        elif all(bool(one.isfinite().all()) for one in due):
            differences[name] = max(compare_values(mine, due, median=expected.median), default=0.0)
    for name, number in expected.scalars.items():
        if math.isfinite(number) and not expected.median:
            differences[name] = loss_difference(found.scalars.get(name, math.inf), number, term_size=largest)
    beyond = {name: size for name, size in differences.items() if not size <= expected.limit}
    worst = sorted(beyond, key=beyond.__getitem__, reverse=True)[:3]
    texts = ", ".join(f"{name} by {beyond[name]:.2g}" for name in worst)
    return f"{texts}, relative to the largest value of each (allowed: {expected.limit:.0e})" if texts else None
