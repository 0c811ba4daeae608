"""
Comparison of a model's results for packed samples with its results for each sample alone.

The probe, `packplan check` and `packplan.testing` call `run_alone`, which computes each sample by
itself. Then they call `packed_and_alone`, which computes the packed rows and returns the
differences. Callers pass the model, the samples, and the function by which a trainer calls the
model. `difference_limit` returns the largest allowed difference for a model of any size.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch.autograd.graph import GradientEdge

from packplan.adapters.attention.varlen import compute_dtype
from packplan.adapters.models import Gradients, add_gradients, difference_norms, find_sharded_weight, weight_gradients
from packplan.adapters.proof.batches import PackedBatch, Sample, Shape, shape_text
from packplan.adapters.proof.gradients import Dependence, WatchedPass, changed_embeddings, watching_embeddings
from packplan.core.batch import IGNORED_LABEL
from packplan.core.equality import EQUALITY_LIMITS, Precision, ProbeResult, loss_difference, rounding_limit
from packplan.core.errors import ModelError

_LARGEST_CHANGE = 0.02
"""
Largest relative change of embeddings by which cancelled gradients are found: a few rounding units
of bfloat16. A larger change would hide faults of gradients where the limit is large.
"""

_MIN_TOKENS = 8
"""Minimum number of tokens of a sample whose median difference is compared."""

_TF32 = 2.0**-10
"""Relative rounding step of float32 products that PyTorch may compute in TF32."""

_OTHER_EXPERTS = 0.1
"""
Difference that another choice of experts may add to the median difference of a sample's tokens.

The largest difference measured was 0.07.
"""

Call = Callable[..., Any]
"""A model, or a function by which a trainer calls the model."""


@attrs.frozen(eq=False)
class Outcome:
    """Logits, losses and gradients of some samples."""

    loss: float
    """Sum of the samples' weighted losses."""

    gradients: Gradients
    """Gradients of `loss`, by the name of the weight."""

    norms: float = 0.0
    """Norm of the gradients; if samples were computed alone, the sum of their gradients' norms."""

    logits: Sequence[torch.Tensor] = ()
    """Logits of each sample; float32 or wider, of shape (tokens, vocabulary)."""

    losses: Sequence[float] = ()
    """Mean loss of each sample."""

    scale: float = 1.0
    """Largest absolute logit, whose rounding limits the precision of losses."""


@attrs.frozen
class Comparison:
    """
    Relative differences between two outcomes; infinite if a value of an outcome is not finite.
    """

    logits: tuple[float, ...]
    """
    Largest difference of each sample's logits, or the median over its tokens (see `compare`),
    divided by the largest absolute logit of all samples alone.
    """

    losses: tuple[float, ...]
    """Difference of each sample's mean loss; empty if medians of logits are compared."""

    loss: float
    """Difference of the sum of the weighted losses."""

    gradients: float
    """Norm of the difference of the gradients, divided by `norms` of the expected outcome."""

    difference: float
    """Norm of the difference of the gradients."""

    weight: str
    """Name of the weight whose gradient differs most."""

    dependences: tuple[Dependence, ...] = ()
    """For each tested sample, the dependence of its logits on other samples."""

    @property
    def worst(self) -> ProbeResult:
        """Largest dependence on another sample, and largest differences."""
        isolation = max((one.isolation for one in self.dependences), default=0.0)
        return ProbeResult(isolation, max(self.logits), max(self.losses, default=0.0), self.gradients)


def packed_and_alone(
    model: torch.nn.Module,
    packed: PackedBatch,
    samples: Sequence[Sample],
    *,
    alone: Outcome,
    call: Call | None = None,
    readers: Iterable[int] | None = None,
    sources: Iterable[tuple[GradientEdge, int]] = (),
    step: Callable[[], tuple[float, Gradients]] | None = None,
    median: bool = False,
) -> Comparison:
    """
    Compute packed rows, and compare their samples with the same samples alone.

    Args:
        model: Model in evaluation mode, whose attention keeps packed samples apart.
        packed: Packed rows, with the arguments of the model.
        samples: The rows' samples, in their order.
        alone: Outcome of `run_alone`. Without gradients in *alone*, gradients of weights are not
            compared.
        call: Function by which a trainer calls the model; None calls the model itself.
        readers: Indices of samples whose dependence on other samples is computed; None takes all.
        sources: Gradient edges of the rows' pixels, each with the index of its sample.
        step: Function that computes loss and gradients of the rows as training does. With None,
            both are computed from the samples' weighted losses.
        median: See `compare`.

    Raises:
        ModelError: The model does not return logits of each token, or the logits have no gradient
            although there are *readers*.
    """
    readers = range(len(samples)) if readers is None else [*readers]
    with torch.set_grad_enabled(bool(readers or alone.gradients)):
        watched, logits = run_watched(model, packed, call=call)
    watched.sources.extend(sources)
    dependences = tuple(watched.logit_dependences(logits, readers)) if readers else ()
    own = [logits[place] for place in packed.places]
    found = read_outcome(model, own, samples, with_gradients=bool(alone.gradients and step is None))
    if alone.gradients and step is not None:
        del watched, logits, own
        loss, gradients = step()
        found = attrs.evolve(found, loss=loss, gradients=gradients)
    return attrs.evolve(compare(found, alone, median=median), dependences=dependences)


def run_watched(
    model: torch.nn.Module, packed: PackedBatch, *, call: Call | None = None
) -> tuple[WatchedPass, torch.Tensor]:
    """
    Compute packed rows; return the pass with the recorded embeddings, and the logits.

    Args:
        model: Model to call.
        packed: Packed rows, with the arguments of the model.
        call: Function by which a trainer calls the model; None calls the model itself.

    Raises:
        ModelError: The model does not return logits of each token.
    """
    with watching_embeddings(model, packed) as watched:
        return watched, read_logits((call or model)(**watched.inputs), packed.shape)


def read_outcome(
    model: torch.nn.Module,
    logits: Sequence[torch.Tensor],
    samples: Sequence[Sample],
    *,
    with_gradients: bool = True,
    keep_logits: bool = True,
) -> Outcome:
    """
    Return logits, losses and gradients of samples from the logits of one forward pass.

    Args:
        model: Model that has computed the logits.
        logits: Logits of each sample; shape (tokens, vocabulary).
        samples: Samples in the order of *logits*.
        with_gradients: Whether to compute the gradients of the weights.
        keep_logits: Whether to keep the logits and the loss of each sample.
    """
    losses, weighted = [], []
    for own, sample in zip(logits, samples, strict=True):
        targets = sample.targets.to(own.device)
        each = F.cross_entropy(_widen(own), targets, ignore_index=IGNORED_LABEL, reduction="none")
        supervised = max(1, int((targets != IGNORED_LABEL).sum()))
        losses.append(float(each.detach().double().sum()) / supervised)
        weighted.append(each.sum() / supervised if sample.weights is None else (each * sample.weights.to(each)).sum())
    loss = torch.stack(weighted).sum()
    found = weight_gradients(model, loss) if with_gradients else {}
    values = [_widen(own.detach()) for own in logits]
    scale = max(float(own.abs().max()) for own in values)
    if not keep_logits:
        values, losses = [], []
    return Outcome(float(loss.detach()), found, add_gradients({}, found), values, losses, scale)


def run_alone(
    model: torch.nn.Module,
    samples: Sequence[Sample],
    *,
    call: Call | None = None,
    with_gradients: bool = True,
    keep_logits: bool = True,
) -> Outcome:
    """
    Return logits, losses and gradients of samples that are computed one by one, the last one first.

    The order is reversed because a layer may keep a state between calls. In the order of the row,
    the layer's state would be the same as in the row, and would hide a leak.

    Args:
        model: Model to call.
        samples: Samples to compute.
        call: Function by which a trainer calls the model; None calls the model itself.
        with_gradients: Whether to compute the gradients of the weights.
        keep_logits: Whether to keep the logits and the loss of each sample.
    """
    total: Gradients = {}
    norms, found = 0.0, []
    for sample in reversed(samples):
        with torch.set_grad_enabled(with_gradients):
            logits = read_logits((call or model)(**sample.inputs), (1, len(sample.targets)))
            one = read_outcome(model, [logits[0]], [sample], with_gradients=with_gradients, keep_logits=keep_logits)
        norms += add_gradients(total, one.gradients)
        found.append(attrs.evolve(one, gradients={}))
    found.reverse()
    return Outcome(
        loss=math.fsum(one.loss for one in found),
        gradients=total,
        norms=norms,
        logits=[own for one in found for own in one.logits],
        losses=[own for one in found for own in one.losses],
        scale=max((one.scale for one in found), default=0.0),
    )


def compare(found: Outcome, expected: Outcome, *, median: bool = False) -> Comparison:
    """
    Return the relative differences between an outcome and the expected outcome.

    Args:
        found: Outcome of packed samples.
        expected: Outcome of the same samples alone.
        median: Whether to compare each sample's median token difference instead of the largest one.
            Losses are then not compared; see `experts_may_differ`.
    """
    by_weight = difference_norms(found.gradients, expected.gradients)
    difference = math.hypot(*by_weight.values())
    pairs = () if median else zip(found.losses, expected.losses, strict=True)
    return Comparison(
        logits=tuple(compare_values(found.logits, expected.logits, median=median)),
        losses=tuple(_finite_or_inf(loss_difference(*pair, term_size=expected.scale)) for pair in pairs),
        loss=_finite_or_inf(loss_difference(found.loss, expected.loss, term_size=expected.scale)),
        gradients=_finite_or_inf(difference / expected.norms if expected.norms else math.inf if difference else 0.0),
        difference=difference,
        weight=max(by_weight, key=by_weight.__getitem__, default=""),
    )


def allow_for_cancelling(
    apart: Comparison, expected: Outcome, model: torch.nn.Module, again: Callable[[], Outcome], *, limit: float
) -> Comparison:
    """
    Return a comparison without differences of gradients that are rounding errors of larger terms.

    Terms of a gradient may cancel, such as those of two equal answers in DPO. Then only their
    rounding errors are left, and these may exceed any share of the gradient's norm. So if gradients
    differ by more than *limit*, they are computed again with embeddings that are changed by
    *limit*, but by at most 2 %. Gradients may then differ by as much as this change causes.

    Args:
        apart: Differences from *expected*.
        expected: Outcome of the samples alone.
        model: Model that computes the outcomes.
        again: Function that computes *expected* again.
        limit: Largest allowed relative difference.
    """
    if apart.gradients <= limit or find_sharded_weight(model) is not None:
        return apart
    with changed_embeddings(model, min(limit, _LARGEST_CHANGE)):
        caused = math.hypot(*difference_norms(again().gradients, expected.gradients).values())
    if not 0 < caused < math.inf:
        return apart
    return attrs.evolve(apart, gradients=min(apart.gradients, limit * apart.difference / caused))


def compare_values(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, median: bool = False
) -> list[float]:
    """
    Return each sample's largest difference, relative to the largest expected value of all samples.

    Args:
        found: Values of each sample; shape (tokens, width).
        expected: Values of the same samples alone.
        median: Whether to compare each sample's median token difference instead of the largest one.
    """
    scale = max((float(own.abs().max()) for own in expected), default=0.0) or 1.0
    pairs = zip(found, expected, strict=True)
    return [reduce_differences((_widen(mine) - own).abs().amax(-1) / scale, median=median) for mine, own in pairs]


def reduce_differences(tokens: torch.Tensor, *, median: bool) -> float:
    """
    Return the largest or median difference of a sample's tokens; infinity if a difference is not
    finite.

    Args:
        tokens: Difference of each token; shape (tokens,).
        median: Whether to take the median, since rounding may choose other experts for some tokens.
            The median counts as 0 for samples of fewer than `_MIN_TOKENS` tokens.
    """
    if not bool(tokens.isfinite().all()):
        return math.inf
    if not median:
        return float(tokens.max())
    return float(tokens.median()) if len(tokens) >= _MIN_TOKENS else 0.0


def read_logits(output: Any, shape: Shape) -> torch.Tensor:
    """
    Return the logits in a model's output; shape (rows, tokens, vocabulary).

    Args:
        output: A tensor, or an output with a field `logits`.
        shape: Number of rows, and number of tokens of each row.

    Raises:
        ModelError: The output has no logits of this shape.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if not isinstance(logits, torch.Tensor):
        fact = f"the model returns {type(output).__name__} without logits, so its samples cannot be compared: load it "
        raise ModelError("host", f"{fact}with a head that computes logits, and leave use_liger_kernel off")
    rows, tokens = shape
    if logits.numel() == 0 or logits.shape[:-1].numel() != rows * tokens:
        raise ModelError("probe", f"the model returns logits of shape {tuple(logits.shape)} for {shape_text(shape)}")
    return logits.reshape(rows, tokens, -1)


def compute_precision(model: torch.nn.Module) -> Precision:
    """
    Return the precision of a model's products: autocast's precision if autocast is on, else the
    precision of the weights.
    """
    names: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    return names.get(compute_dtype(next(model.parameters())), "float32")


def difference_limit(model: torch.nn.Module, precision: Precision | None = None, *, experts: bool = True) -> float:
    """
    Return the largest allowed relative difference between packed samples and samples alone.

    Args:
        model: Model to call.
        precision: Precision of the model's products; None takes `compute_precision`.
        experts: Whether medians are compared. Their limit is larger if rounding may choose other
            experts.
    """
    precision = precision or compute_precision(model)
    rounding = rounding_limit(_rounding_step(precision), layers=_count_layers(model))
    return max(EQUALITY_LIMITS[precision], rounding + (_OTHER_EXPERTS if experts and experts_may_differ(model) else 0))


def experts_may_differ(model: torch.nn.Module) -> bool:
    """
    Return whether rounding may make a model choose other experts for a token.

    Rounding may change the choice if router scores are rounded to 16 bits or TF32.
    """
    has_experts = any("expert" in name for name, _ in model.named_modules())
    return has_experts and _rounding_step(compute_precision(model)) >= _TF32


def _count_layers(model: torch.nn.Module) -> int:
    """Return the number of layers in the configuration, else in the longest list of modules."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lists = (len(one) for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    return max(1, getattr(text, "num_hidden_layers", None) or max(lists, default=1))


def _rounding_step(precision: Precision) -> float:
    """Return the relative step to which products are rounded."""
    if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
        return _TF32
    return float(torch.finfo(getattr(torch, precision)).eps)


def _widen(values: torch.Tensor) -> torch.Tensor:
    """Return values as float32, or unchanged if their dtype is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
