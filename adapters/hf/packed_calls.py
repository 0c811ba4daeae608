"""
Hooks that make a model compute a padded batch as one row without padding.

Before the text stack of a model runs, the real tokens of all rows are joined into one row. In this
row, each token attends only within its own sample. After the text stack has run, its results are
put back at their places in the batch. So a trainer can collate batches, compute its loss and read
outputs as usual.

The hooks are PyTorch's module hooks, and no code of transformers is changed. A call passes through
unchanged in these cases:

- its mask is missing, not two-dimensional, or masks nothing;
- the caller passes a cache or requests one without gradients, as generation does;
- its rows are packed already;
- its padding is on a side on which the model's results depend on the padding.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from threading import local
from types import MappingProxyType
from typing import Any, Literal, NoReturn, get_args
from weakref import WeakKeyDictionary

import attrs
import torch
from transformers import Cache
from transformers.loss.loss_utils import ForCausalLMLoss

from packplan.adapters.attention import attention_names, using_native_attention
from packplan.adapters.attention.packed_row import Padding, RealTokens, using_row
from packplan.adapters.attention.shared_rows import RowGroups
from packplan.adapters.models import replace_attributes
from packplan.adapters.proof.steps import NOISE
from packplan.core.batch import IGNORED_LABEL
from packplan.core.equality import NATIVE
from packplan.core.errors import ArgumentError, PackplanError, counted

log = logging.getLogger(__name__)

Positions = Literal["columns", "counted", "ids"]
"""
Rule by which positions are counted if the caller passes no position ids. With `columns`, a position
is the token's column, and with `counted`, the number of real tokens before the token. With `ids`
(RoBERTa), it is the padding id plus the number of ids so far that are not padding.
"""

POSITIONS: tuple[Positions, ...] = get_args(Positions)

_BOUNDARIES = ("cu_seq", "seq_idx")
"""Name prefixes of arguments that mark the beginnings of samples in a packed row."""

_SCORES = "fused_lm_head"
"""
Argument by which TRL requests the log-probability of each label instead of logits. Tokens without a
label get 0.
"""

_NOT_BY_TOKEN = ("pixel", "image", "video", "attentions", "past_key_values", "pooler_output")
"""Name prefixes of arguments and outputs whose first axes are not rows and positions."""


HOOKED: WeakKeyDictionary[torch.nn.Module, Unpadding] = WeakKeyDictionary()
"""Module of a hooked text stack -> its hooks."""


@attrs.define
class UnpadCounts:
    """Numbers of a hooked model's packed calls, and of their positions with and without padding."""

    calls: int = 0
    """Number of forward calls that ran as one packed row."""

    real: int = 0
    """Number of positions that the packed calls computed, without padding."""

    padded: int = 0
    """Number of positions of the padded batches that the packed calls received."""


@attrs.define(eq=False)
class TextStack:
    """Module whose calls are packed, with the rules for its positions and padding."""

    module: Any
    positions: Positions = "columns"

    padding_id: int = 0
    """Token id of padding, used if `positions` is "ids"."""

    text_row: bool = False
    """
    Whether multimodal position ids start with a row of text positions, before time, height and
    width.
    """

    by_positions: bool = False
    """Whether the model's own attention starts a sample wherever positions do not increase by 1."""

    unpacked_sides: frozenset[Padding] = frozenset()
    """
    Sides of tokens on which padding is not left out, since the model's results depend on this
    padding.
    """

    _signature: inspect.Signature = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._signature = inspect.signature(self.module.forward)

    def bind_arguments(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call, by parameter name."""
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        return given

    def find_real_tokens(self, given: dict[str, Any], known: RealTokens | None = None) -> RealTokens | None:
        """
        Return the real tokens of a call's batch; None if the call cannot be packed.

        Args:
            given: Arguments of the call by name.
            known: Real tokens that an outer call has found, used if they belong to this call's
                mask.
        """
        mask, values = given.get("attention_mask"), given.get("input_ids")
        values = given.get("inputs_embeds") if values is None else values
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or values is None or values.shape[:2] != mask.shape:
            return None
        if any(name.startswith(_BOUNDARIES) for name in given) or _is_generation(given):
            return None
        tokens = known if known is not None and known.mask is mask else RealTokens.from_mask(mask)
        if tokens.has_sample_numbers or len(tokens.places) in (0, mask.numel()):
            return None
        if self._positions_restart(given.get("position_ids"), tokens):
            return None
        passes = self.unpacked_sides and self.unpacked_sides & tokens.padding_places
        return None if passes or self._would_join_rows(given, tokens) else tokens

    def _would_join_rows(self, given: dict[str, Any], tokens: RealTokens) -> bool:
        """Return whether a model that finds samples by positions would join two batch rows."""
        if not self.by_positions:
            return False
        text = self._packed_positions(given, tokens).reshape(-1, len(tokens.places))[0]
        return bool(((text.diff() == 1) & (tokens.row.sample_ids.diff() == 1)).any())

    def _positions_restart(self, positions: torch.Tensor | None, tokens: RealTokens) -> bool:
        """
        Return whether text positions decrease within a batch row, as in a row that is packed
        already.
        """
        if positions is None or (positions.dim() == 3 and positions.shape[0] != 4):
            return False
        text = positions[0] if positions.dim() == 3 else positions
        steps = tokens.take(text.expand(tokens.shape))[0].diff()
        return bool(((steps < 0) & (tokens.row.sample_ids.diff() == 0)).any())

    def pack(self, given: dict[str, Any], tokens: RealTokens) -> dict[str, Any]:
        """Return the arguments of a call with its real tokens as one row."""
        packed = {name: _take_tokens(name, value, tokens) for name, value in given.items() if name != "cache_position"}
        # With a mask of ones, transformers does not look for samples in the positions.
        ones = given["attention_mask"].new_ones(1, len(tokens.places))
        packed["attention_mask"] = None if self.by_positions else ones
        if "position_ids" in self._signature.parameters:
            packed["position_ids"] = self._packed_positions(given, tokens)
        if {"use_cache", "past_key_values"} & set(self._signature.parameters):
            packed["use_cache"] = False
        return packed

    def _packed_positions(self, given: dict[str, Any], tokens: RealTokens) -> torch.Tensor:
        """Return the position ids of the real tokens in the padded batch; shape (…, 1, tokens)."""
        positions = given.get("position_ids")
        if positions is None:
            return tokens.take(self._default_positions(given))
        if positions.dim() == 2:
            return tokens.take(positions.expand(tokens.shape))
        taken = tokens.take(positions.expand(-1, *tokens.shape), axis=1)
        if not self.text_row:
            return taken
        return torch.cat([tokens.restarting_positions[None], taken[-3:]])

    def _default_positions(self, given: dict[str, Any]) -> torch.Tensor:
        """Return the positions that the model computes by default; int64 of the mask's shape."""
        mask, ids = given["attention_mask"], given.get("input_ids")
        columns: torch.Tensor = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        if self.positions == "counted":
            return torch.cumsum(mask != 0, 1) - 1
        if self.positions == "ids" and ids is not None:
            real = torch.ne(ids, self.padding_id).long()
            return real.cumsum(1) * real + self.padding_id
        return columns + self.padding_id + 1 if self.positions == "ids" else columns

    def put_results_back(self, output: Any, tokens: RealTokens, *, keep_packed: bool) -> Any:
        """
        Put the results of a packed call back at their places in the padded batch.

        Args:
            output: Output of the module.
            tokens: Real tokens of the call.
            keep_packed: Whether to leave the last hidden state packed, for a head that computes
                only real tokens.
        """
        if not isinstance(output, dict):
            states, *others = (_put_back(one, tokens) for one in output)
            if getattr(self.module, "pooler", None) is not None:
                others[:1] = [self._pool(states)]
            return states, *others
        for name in list(output):
            if name.startswith(_NOT_BY_TOKEN) or (keep_packed and name == "last_hidden_state"):
                continue
            output[name] = _put_back(output[name], tokens)
        if output.get("pooler_output") is not None:
            output["pooler_output"] = self._pool(output["last_hidden_state"])
        return output

    def _pool(self, states: torch.Tensor) -> torch.Tensor:
        """Return the pooler's output for the first position of each row; shape (rows, width)."""
        pooled: torch.Tensor = self.module.pooler(states)
        return pooled if pooled.dim() == 2 else self.module.pooler_activation(pooled[:, 0])  # as in ALBERT


def _is_generation(given: dict[str, Any]) -> bool:
    """
    Return whether a call generates text: it has a cache, or requests a cache without gradients.
    """
    return any(map(_is_cache, given.values())) or bool(given.get("use_cache") and not torch.is_grad_enabled())


def _is_cache(value: Any) -> bool:
    """
    Return whether an argument is a cache: an object of a cache class, or a tuple with the keys and
    values of each layer.
    """
    if isinstance(value, (tuple, list)):
        return any(isinstance(one, (tuple, list)) and all(isinstance(k, torch.Tensor) for k in one) for one in value)
    return isinstance(value, Cache) or type(value).__name__.endswith("Cache")


def _take_tokens(name: str, value: Any, tokens: RealTokens) -> Any:
    """
    Return the real tokens of an argument of shape (rows, positions, …), or any other argument
    unchanged.
    """
    if not isinstance(value, torch.Tensor) or name.startswith((*_NOT_BY_TOKEN, "position_ids", "attention_mask")):
        return value
    if name.endswith("token_type_ids"):  # one row may stand for all
        value = value.expand(tokens.shape)
    return tokens.take(value) if value.dim() >= 2 and tuple(value.shape[:2]) == tokens.shape else value


def _put_back(value: Any, tokens: RealTokens) -> Any:
    """
    Return outputs of shape (1, tokens, …) or (tokens, …) at their places in the batch, and other
    outputs unchanged.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(_put_back(one, tokens) for one in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    if tuple(value.shape[:2]) == (1, len(tokens.places)):
        return tokens.put_back(value)
    return tokens.put_back_flat(value) if value.shape[0] == len(tokens.places) else value


class _Thread(local):
    """State of a hooked model's running calls in one thread."""

    outermost: Any = None
    """Outermost module whose running call is packed."""

    asked: Any = None
    """
    Outermost module whose call is running, packed or not. Ranks that share weights wait for each
    other only in calls of this module.
    """

    read: RealTokens | None = None
    """Real tokens of the outermost call, so that its text stack need not read the mask again."""

    headed: RealTokens | None = None
    """Real tokens of a call whose labels are packed too."""

    reads_padding = False
    """Whether the caller reads results at padding; the call is then computed with padding."""

    trial: UnpadCounts | None = None
    """Counts of the running trial; None outside of trials."""

    is_padded = False
    """Whether calls of the trial are computed with padding."""

    def __init__(self) -> None:
        self.open: list[tuple[RealTokens | None, ExitStack]] = []


class Unpadding:
    """
    Hooks that leave padding out of a model's calls; `unpad` returns them.

    `remove` removes the hooks. Inside `with hooks.paused():` calls are computed with padding.
    """

    def __init__(
        self,
        model: Any,
        stack: TextStack,
        *,
        logits: bool,
        heads: Collection[Any] = (),
        compare: Callable[..., None] | None = None,
        unpacked_sides: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.counts = UnpadCounts()
        """Counts of packed calls and their positions since the hooks were added."""

        self.unpacked_sides = unpacked_sides
        """Side of real tokens on which padding is still computed -> the reason."""

        self.omits_eval_logits = False
        """Whether evaluation, like training, omits logits of padding if `logits` is False."""

        self.native = NATIVE
        """Name of the attention of transformers for comparisons and for `generate_batch`."""

        self.groups: RowGroups | None = None
        """Groups of ranks that share packed rows; None if each rank has rows of its own."""

        self.model, self.stack = model, stack
        self._attention = attention_names(model.config)  # under which rows are proven apart
        self.is_paused = False
        """Whether all calls are computed with padding."""

        self._compare, self._thread = compare, _Thread()
        self._loss = getattr(model, "loss_function", None)
        self._logits = logits or self._loss is not ForCausalLMLoss
        self._callers = {one: TextStack(one) for one in (*heads, stack.module)}
        hooked = [(stack.module, self._pack, self._put_back)]
        hooked += [(one, self._enter, self._leave) for one in self._callers]
        uncompiled: Any = torch.compiler.disable  # rows would each need a program of their own
        self.handles: list[Any] = []
        """Handles of all hooks, by which `remove` removes them."""

        for module, before, after in hooked:
            # Before the hook of `shared_rows`, which cuts the packed row.
            self.handles.append(module.register_forward_pre_hook(uncompiled(before), prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(uncompiled(after), with_kwargs=True, always_call=True))
        for one in self._callers:
            vars(one).update(__reduce_ex__=_refuse_copy, generate_batch=self._generate_batch)
        HOOKED[stack.module] = self

    def __repr__(self) -> str:
        name, counts = type(self.model).__name__, self.counts
        computed = f"{counted(counts.calls, 'packed call')}, {counts.real:,} of {counted(counts.padded, 'position')}"
        return f"Unpadding({name}: {computed} computed)"

    def remove(self) -> None:
        """Remove the hooks; the model keeps its attention."""
        for handle in self.handles:
            handle.remove()
        for one in self._callers:
            for name in ("__reduce_ex__", "generate_batch"):
                vars(one).pop(name, None)
        HOOKED.pop(self.stack.module, None)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which calls are computed with padding."""
        return replace_attributes(self, is_paused=True)

    def trial(self, counts: UnpadCounts | None = None, *, padded: bool = False) -> AbstractContextManager[None]:
        """
        Return a context in which this thread's calls are counted in *counts*, and computed with
        padding if *padded*.
        """
        return replace_attributes(self._thread, trial=counts or UnpadCounts(), is_padded=padded)

    @property
    def is_trial(self) -> bool:
        """
        Whether calls of this thread are inside of `trial`, for a comparison and not for training.
        """
        return self._thread.trial is not None

    def _pack(self, module: Any, args: Any, kwargs: Any) -> Any:
        if module is not self.stack.module:
            _refuse_copy()
        given, now = self.stack.bind_arguments(args, kwargs), self._thread
        if now.outermost is not None:  # the caller gave no cache: the model made this one
            given = {name: one for name, one in given.items() if name != "use_cache" and not _is_cache(one)}
        wants_weights = given.get("output_attentions", getattr(self.stack.module.config, "output_attentions", False))
        if wants_weights and not self._runs_padded:
            reason = "unpad computes no attention weights: call the model, or set its config, without output_attentions"
            raise ArgumentError("host", reason)
        tokens = None if self._runs_padded else self.stack.find_real_tokens(given, now.read)
        inside = ExitStack()
        now.open.append((tokens, inside))
        if tokens is None:
            return None
        inside.enter_context(using_row(tokens.row))
        embeddings = self.stack.module.get_input_embeddings()
        if hasattr(embeddings, NOISE):  # NEFTune's noise shrinks with the positions of a row
            alpha = getattr(embeddings, NOISE) * math.sqrt(len(tokens.places) / tokens.shape[1])
            inside.enter_context(replace_attributes(embeddings, **{NOISE: alpha}))
        counts = now.trial or self.counts
        counts.calls += 1
        counts.real += len(tokens.places)
        counts.padded += tokens.shape[0] * tokens.shape[1]
        return (), self.stack.pack(given, tokens)

    @property
    def _runs_padded(self) -> bool:
        if self.is_paused or self._thread.is_padded or self._thread.reads_padding:
            return True
        now = attention_names(self.model.config)
        if now != self._attention:
            found, tested = (" and ".join(dict.fromkeys(one.values())) for one in (now, self._attention))
            log_once(
                f"calls are computed with padding, since the attention is {found}: set {tested}, which unpad has tested"
            )
        return now != self._attention

    def _generate_batch(self, *args: Any, **options: Any) -> Any:
        """Generate in continuous batches, which require an attention of transformers."""
        with using_native_attention(self.model, self.native), self.paused():
            return type(self.model).generate_batch(self.model, *args, **options)

    def _put_back(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG002  # torch passes them
        if not self._thread.open:  # the call was refused
            return None
        tokens, inside = self._thread.open.pop()
        inside.close()
        if tokens is None or output is None:  # None: the call raised an error
            return None
        return self.stack.put_results_back(output, tokens, keep_packed=self._thread.headed is not None)

    def _enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self.is_paused or self._thread.outermost is not None or module not in self._callers:
            return None
        given = self._callers[module].bind_arguments(args, kwargs)
        tokens = self.stack.find_real_tokens(given)
        if self._compare is not None and not (self.is_trial or _is_generation(given)):
            self._compare(self, module, given, tokens, meets=self._thread.asked is None)
        self._thread.asked = module if self._thread.asked is None else self._thread.asked
        if tokens is None:
            return None
        self._thread.outermost, self._thread.read = module, tokens
        return None if module is self.stack.module else self._pack_labels(module, given, tokens)

    def _pack_labels(self, module: Any, given: dict[str, Any], tokens: RealTokens) -> Any:
        """
        Return arguments without labels that no token predicts; None if the call has no labels of
        the batch's shape. Labels are packed if the head reads only real tokens.
        """
        labels, mask, now = given.get("labels"), given["attention_mask"] != 0, self._thread
        if _pools_padding(self.model, given, mask):
            now.reads_padding = True
            log_once(
                "calls that score a masked token are computed with padding: attention_mask has to be 1 at the "
                "last token that is not pad_token_id"
            )
        if labels is None or labels.shape != tokens.shape or given.get("shift_labels") is not None:
            return None
        learned, shifts = labels != IGNORED_LABEL, bool(self._loss is ForCausalLMLoss or given.get(_SCORES))
        firsts = mask & (mask.cumsum(1) == 1) & shifts
        lost = learned[:, 1:] & ~firsts[:, 1:] & ~mask[:, :-1] if shifts else learned & ~mask
        facts = (lost, learned & ~mask, (learned & firsts)[:, 1:])
        is_lost, is_hidden, is_first = torch.stack([one.any() for one in facts]).tolist()
        now.reads_padding |= is_lost
        if is_lost:
            log_once("calls in which padding predicts a label are computed with padding: set the label to -100")
        if is_first:
            log_once("the label of the first token after left padding is left out of the loss: no token predicts it")
        labels, keeps = labels.masked_fill(firsts, IGNORED_LABEL), given.get("logits_to_keep")
        reads_logits = isinstance(keeps, torch.Tensor) or keeps or not (module.training or self.omits_eval_logits)
        asked = given.get(_SCORES) or not (self._logits or reads_logits)
        if asked and not (is_hidden or self.stack.by_positions or self._runs_padded):
            now.headed, labels = tokens, tokens.take(labels)
        return (), {**given, "labels": labels}

    def _leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG002  # torch passes them
        now = self._thread
        now.asked = None if now.asked is module else now.asked
        if now.outermost is not module:
            return None
        tokens, now.outermost, now.read, now.headed, now.reads_padding = now.headed, None, None, None, False
        if tokens is None or output is None or not kwargs.get(_SCORES):
            return None
        for name, value in list(output.items()):
            if isinstance(value, torch.Tensor) and value.shape == (1, len(tokens.places) - 1):
                output[name] = tokens.put_back(torch.nn.functional.pad(value, (0, 1)))[:, :-1]
        return output


def _refuse_copy(*_: int) -> NoReturn:
    raise PackplanError("call remove() on the result of unpad before copying or pickling the model: it has hooks")


@cache
def log_once(fact: str) -> None:
    """Log a warning only once in this process."""
    log.warning("%s", fact)


def _pools_padding(model: Any, given: dict[str, Any], mask: torch.Tensor) -> bool:
    """
    Return whether a sequence classifier would score a token whose mask is 0. The classifier finds
    the last token of a row by token ids, not by the mask.
    """
    if not hasattr(model, "score"):
        return False
    ids, padding = given.get("input_ids"), getattr(model.config.get_text_config(), "pad_token_id", None)
    real = torch.ones_like(mask) if ids is None or padding is None else ids != padding
    last = (torch.arange(mask.shape[1], device=mask.device) * real).argmax(1, keepdim=True)
    return bool((~mask.gather(1, last)[:, 0] & mask.any(1)).any())
