"""
Verdict on whether packs of a model can be trained, and by which strategy; see
`core.equality.PackingVerdict`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import attrs
import torch

from packplan.adapters.attention import NAME, ROWS_NAME, project_patches, set_attention, takes_packed_images
from packplan.adapters.attention.packed_row import run_by_sample
from packplan.adapters.families import trained_config
from packplan.adapters.probe.probe_row import ProbeRow, probe_images
from packplan.adapters.probe.shrink import (
    FIRST_ID,
    LONGEST,
    VOCABULARY,
    NewValues,
    key_path_text,
    possible_lengths,
    shrink_by_trial,
    shrink_config,
)
from packplan.adapters.probe.small_model import SmallModels, error_text, hiding_warnings
from packplan.adapters.proof.comparison import Outcome, compare_values, packed_and_alone, run_alone
from packplan.adapters.proof.modules import NamedModule, first_different_module, first_leak
from packplan.adapters.versions import has_flash_package
from packplan.core.equality import (
    AUTO,
    EQUALITY_LIMITS,
    FLEX,
    NATIVE,
    AttentionChoice,
    PackingVerdict,
    Precision,
    ProbeResult,
    StrategyTrial,
    yield_trials,
)
from packplan.core.errors import ModelError, verb_for

log = logging.getLogger(__name__)

LENGTHS = (33, 3, LONGEST, 51)
"""
Number of tokens of each sample that the probe packs. Some samples are longer than the windows of
the copy, and one is shorter than usual convolution kernels.
"""

_ROUNDS = 4
"""Maximum number of classes of state-carrying layers to find in a model."""


_UNREACHED = (
    "the probe cannot build a small copy of the model with smaller values of settings that may carry state from sample "
    "to sample"
)


def probe_small_copy(
    config: Any, *, attn_impl: str = AUTO, trust_remote_code: bool = False, on_cpu: bool = True
) -> PackingVerdict:
    """
    Return the verdict on a model, from a small copy of the model with random weights.

    Args:
        config: Configuration of the user's model, as transformers loads it.
        attn_impl: Value of `model.attn_impl`.
        trust_remote_code: Whether Python code in the model's folder may run.
        on_cpu: Whether the model trains on a CPU. If False, attentions that need a GPU are probed
            on the GPU.
    """
    return SmallProbe(config, trust_remote_code=trust_remote_code, on_cpu=on_cpu).verdict(attn_impl)


@contextlib.contextmanager
def _using_one_thread() -> Iterator[None]:
    """
    Compute on one thread inside this context. Copies are small, and results on one thread do not
    depend on the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@attrs.frozen(eq=False)
class _SmallCopies:
    """
    Small copies of a model on one device and in one precision, with results of each sample alone.
    """

    build: Callable[[str], Any]
    """Function that builds a copy with the given attention implementation of transformers."""

    native: str
    """
    Name of the attention implementation of transformers that computes samples alone: sdpa if its
    logits differ from eager's logits by at most `limit`, else eager.
    """

    limit: float
    """Largest allowed relative difference between packed samples and the same samples alone."""

    row: ProbeRow

    alone: Outcome
    """Outcome of the row's samples, each computed alone."""

    @classmethod
    def from_builder(cls, build: Callable[..., Any], device: str, precision: Precision) -> _SmallCopies:
        """
        Compute each sample alone, and choose eager or sdpa as the native attention.

        Args:
            build: Function that builds a copy with a given attention of transformers, on the CPU in
                float32.
            device: Device of the copies.
            precision: Precision of the copies.
        """

        def build_on_device(attention: str) -> Any:
            return build(attention=attention).to(device, getattr(torch, precision))

        model, native, limit = build_on_device("eager"), "eager", EQUALITY_LIMITS[precision]
        row = _draw_row(model)
        try:
            alone = run_alone(model, row.samples)
        except Exception as error:
            raise ModelError("probe", f"a small copy of the model does not run ({error_text(error)})") from error
        with contextlib.suppress(ModelError, ValueError, RuntimeError):
            # Torch's attention has no soft cap and no sinks.
            own = run_alone(build_on_device(NATIVE), row.samples, with_gradients=False)
            if max(compare_values(own.logits, alone.logits)) <= limit:
                native = NATIVE
        return cls(build_on_device, native, limit, row, alone)

    def build_packing_copy(self, trial: StrategyTrial, split: tuple[str, ...] = ()) -> Any:
        """
        Return a copy that packs samples by a strategy.

        Args:
            trial: Strategy to pack by.
            split: Names of classes of layers that run sample by sample.

        Raises:
            ModelError: The model does not support the attention.
        """
        model = self.build(self.native)
        attention = AttentionChoice(trial.attention, native=self.native, split=split, keeps_rows=trial.keeps_rows)
        if attention.loaded_backend != self.native:
            model.set_attn_implementation(trial.attention)
        set_attention(model, attention)
        if model.config._attn_implementation not in (trial.attention, NAME, ROWS_NAME):  # noqa: SLF001  # no public question
            raise ModelError("probe", f"the model's code runs only its own attention, not {trial.attention}")
        return model

    def measure_copy(self, trial: StrategyTrial, split: tuple[str, ...] = ()) -> tuple[Any, ProbeResult, str | None]:
        """
        Return a packing copy, its probe result, and the reason against packing, which may be None.
        """
        model = self.build_packing_copy(trial, split)
        measured = packed_and_alone(model, self.row.packed, self.row.samples, alone=self.alone).worst
        return model, measured, measured.reason_against_packing(limit=self.limit)


@attrs.define(eq=False)
class SmallProbe:
    """Probe of one model, which tries one attention after another on small copies."""

    config: Any = attrs.field(converter=trained_config)
    """Configuration of the user's model, as transformers loads it."""

    trust_remote_code: bool = False
    """Whether Python code in the model's folder may run."""

    on_cpu: bool = True
    """
    Whether the model trains on a CPU. If False, GPU-only attentions are probed on the GPU.
    """

    device: str = "cpu"
    """Device of the copies."""

    precision: Precision = "float32"
    """Precision of the copies."""

    _copies: dict[tuple[str, Precision], _SmallCopies] = attrs.field(factory=dict, init=False)

    _verdicts: dict[StrategyTrial, PackingVerdict] = attrs.field(factory=dict, init=False)

    def verdict(self, attn_impl: str) -> PackingVerdict:
        """Return the verdict on a model under one value of `model.attn_impl`."""
        with hiding_warnings(), _using_one_thread():
            try:
                return self._find_verdict(attn_impl)
            except ModelError as error:
                return _blank_verdict(self.config, attn_impl, "", error.fact)

    @cached_property
    def mixing_module(self) -> str | None:
        """
        Name and class of the first module that mixes samples in a copy with transformers' own
        attention; None if no such module is found.

        A module also counts as mixing samples if its result for a packed sample differs from its
        result for the sample alone.
        """
        with hiding_warnings(), _using_one_thread():
            try:
                copies = self._copies_for()
                where = _find_mixing_module(copies.build(copies.native), copies)
                return None if where is None else str(where)
            except Exception:  # whatever the code of a family raises; the verdict stands
                log.debug("the module that mixes samples was not found", exc_info=True)
                return None

    @cached_property
    def _build_copy(self) -> Callable[..., Any]:
        """
        Function that builds a copy; ModelError if the probe's samples may not reach every mechanism
        of any copy.
        """
        build_one = SmallModels(self.config, trust_remote_code=self.trust_remote_code).build
        return partial(build_one, new_values=_find_short_lengths(self.config, build_one))

    def _copies_for(self, trial: StrategyTrial | None = None) -> _SmallCopies:
        """Return the copies on which a trial runs; without a trial, the copies on `device`."""
        where: tuple[str, Precision] = (self.device, self.precision)
        if trial is not None and not self.on_cpu and self.device == "cpu":
            if trial.attention == FLEX:
                where = ("cuda", "float32")
            elif trial.strategy == "flash":  # it computes only in 16 bits
                where = ("cuda", "bfloat16")
        if where not in self._copies:
            self._copies[where] = _SmallCopies.from_builder(self._build_copy, *where)
        return self._copies[where]

    def _find_verdict(self, attn_impl: str) -> PackingVerdict:
        refused, native = [], self._copies_for().native
        flash = not self.on_cpu and has_flash_package(attn_impl)
        for trial in yield_trials(attn_impl, native=native, flash=flash):
            if trial not in self._verdicts:
                blank = _blank_verdict(self.config, trial.attention, native, "")
                self._verdicts[trial] = _try_strategy(self._copies_for(trial), trial, blank)
            if self._verdicts[trial].passes:
                return self._verdicts[trial]
            refused.append(self._verdicts[trial])
        measured = [(one.measured, one) for one in reversed(refused) if one.measured is not None]
        if not measured:
            return attrs.evolve(refused[-1], attention=attn_impl)
        return min(measured, key=lambda one: (one[0].isolation, one[0].equality))[1]


def split_state_layers(model: Any, row: ProbeRow) -> tuple[str, ...]:
    """
    Make layers that carry a state run sample by sample; return the names of these layers' classes.

    The classes of such layers are found one after another.

    Args:
        model: Model to which `keep_rows` was applied.
        row: Packed row with which the layers are tested.
    """
    found: set[str] = set()
    for _ in range(_ROUNDS):
        try:
            leak = first_leak(model, row.packed)
        except Exception:
            if not found:
                raise
            break  # the found layers cannot run sample by sample; the next measurement shows why
        kind = None if leak is None or leak[1] is None else _class_to_split(model, leak[1].name, found)
        if kind is None:
            break
        run_by_sample(model, {kind})
        found.add(kind)
    return tuple(sorted(found))


def _class_to_split(model: Any, name: str, found: set[str]) -> str | None:
    """
    Return the class name of the innermost module, from the module *name* outwards, whose class is
    neither from torch nor in *found*. Return None if that module is a model.
    """
    module = model.get_submodule(name)
    while type(module).__module__.startswith("torch.") or type(module).__name__ in found:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return None if not name or hasattr(module, "get_input_embeddings") else type(module).__name__


def _find_mixing_module(model: Any, copies: _SmallCopies) -> NamedModule | None:
    packed = copies.row.packed
    leak = first_leak(model, packed)
    if leak is not None:
        return leak[1]
    pairs = zip(packed.places, copies.row.samples, strict=True)
    found = (first_different_module(model, packed, one.inputs, place, limit=copies.limit) for place, one in pairs)
    return next(filter(None, found), None)


def _find_short_lengths(config: Any, build: Callable[..., Any]) -> NewValues:
    """
    Return smaller values for numbers of a configuration that may be lengths and that no rule
    shrinks.

    Raises:
        ModelError: A number that may be a length cannot shrink, and is not a size of weights.
    """
    text = config.get_text_config()
    part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    found = possible_lengths(shrink_config(config.to_dict()), text=part)

    def runs_with(tried: NewValues) -> bool:
        try:
            model = build(attention="eager", new_values=tried)
            run_alone(model, _draw_row(model).samples, with_gradients=False)
        except Exception:  # noqa: BLE001  # whatever the code of a family raises
            return False
        return True

    shorter, left = shrink_by_trial(tuple(found), runs_with)
    if left:
        model = build(attention="eager", new_values=shorter)
        axes = {size for one in (*model.parameters(), *model.buffers()) for size in one.shape}
        if unreached := [key_path_text(path, found[path]) for path in left if found[path] not in axes]:
            raise ModelError("probe", f"{_UNREACHED}: {', '.join(unreached)}")
    return shorter


def _draw_row(model: Any) -> ProbeRow:
    return ProbeRow.draw(model, LENGTHS, ids=range(FIRST_ID, VOCABULARY))


def _try_strategy(copies: _SmallCopies, trial: StrategyTrial, blank: PackingVerdict) -> PackingVerdict:
    """
    Return the verdict on a strategy. If a trial that keeps rows fails, layers that carry a state
    are searched for. If there are any, the trial is repeated with these layers run sample by
    sample. If a vision model passes, its images are compared too.
    """
    carriers: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()
    try:
        model, measured, why_not = copies.measure_copy(trial)
    except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
        return attrs.evolve(blank, reason=error_text(error))
    if why_not and trial.keeps_rows:
        # If its layers cannot be split, the numbers without splitting stand.
        with contextlib.suppress(Exception):
            carriers = split_state_layers(model, copies.row)
            if carriers:
                model, measured, why_not = copies.measure_copy(trial, carriers)
                carriers, split = (), carriers
    if why_not is None and getattr(model.config, "vision_config", None) is not None:
        project_patches(model)  # as in the model that trains
        try:
            images = probe_images(model, native=copies.native)
            why_not = images.reason_against_packing(limit=copies.limit)
            measured = images if why_not else measured
        except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
            if takes_packed_images(model, "vision_config"):  # all images of a row in one pass
                return attrs.evolve(
                    blank, reason=f"a small copy of the model cannot compute images ({error_text(error)})"
                )
            not_exercised = ("images",)
    if why_not is not None:
        if carriers:
            verbs = verb_for(len(carriers), "carries", "carry"), verb_for(len(carriers), "does", "do")
            why_not += f"; {' and '.join(carriers)} {verbs[0]} state along the row, and {verbs[1]} not run by sample"
        return attrs.evolve(blank, split=split, measured=measured, reason=why_not)
    keeps = trial.keeps_rows and trial.strategy != "own"  # the model's own code finds the samples of a row
    return attrs.evolve(
        blank, strategy=trial.strategy, split=split, keeps_rows=keeps or bool(split), measured=measured,
        reason="packed samples do not influence each other, and have the same results as alone",
        not_exercised=not_exercised,
    )  # fmt: skip


def _blank_verdict(config: Any, attention: str, native: str, reason: str) -> PackingVerdict:
    return PackingVerdict(
        config.model_type, None, attention, native, split=(), keeps_rows=False, measured=None, reason=reason
    )
