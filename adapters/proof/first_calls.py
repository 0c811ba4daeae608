"""
Comparison of a hooked model's first call of each kind with a padded pass.

`unpad` tests equality on random tokens. This module compares the loss, the outputs, and the
gradient with respect to token embeddings once more, on the user's batch. Training afterwards is bit
for bit the same as without the comparison.

Ranks may have first calls of different kinds, so no rank waits for another rank during a
comparison. A rank that finds a difference writes it to the store of torch.distributed, and computes
with padding from then on. Every rank reads the store before it updates weights, so all ranks end
together. The store may be in the process of rank 0. So rank 0 waits at its end until the other
ranks have read the store, for at most `_HOLD_S` seconds.

If weights are sharded, no rank can compute a pass alone. So if one rank has a first call, all ranks
compare their calls: loss and outputs, without gradients. If a difference is found, all ranks end at
once.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.util import Finalize
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule

from packplan.adapters.attention import using_native_attention
from packplan.adapters.attention.packed_row import RealTokens
from packplan.adapters.models import find_sharded_weight, has_ranks
from packplan.adapters.proof.passes import Pass, difference_text, run_pass
from packplan.adapters.proof.steps import gather_from_ranks
from packplan.adapters.vision_tower import count_tower_runs
from packplan.core.errors import ArgumentError, MismatchError, ModelError, RunError

log = logging.getLogger(__name__)

_NUMBERS = count()
"""
Counter of `FirstCalls` in this process, which agrees between ranks, since all ranks hook
models in the same order.
"""

_MODELS = count()
"""Counter of models with sharded weights that this process was asked to hook."""

_ASKED_CALLS = 16
"""
Number of consecutive calls of known kinds, after which ranks with sharded weights stop telling each
other about new kinds.

Each such exchange makes a GPU wait for all ranks.
"""

_NEEDED = {"input_ids", "inputs_embeds", "attention_mask", "labels"}
"""Inputs that are never left out in the search for the input that causes a difference."""

_PATIENCE = timedelta(minutes=10)
"""Maximum time that a rank waits for the other ranks to reach the same model."""

_HOLD_S = 30
"""Maximum seconds that rank 0 waits at its end for ranks that lag behind in reading the store."""

_POLL_S = 0.01

_HOOKLESS = "without hooks"
"""Word by which a rank announces that its hooks are removed."""

NOT_PACKED = "the text stack gets no attention_mask of shape (rows, positions)"
"""Reason why a text stack is computed with padding although it could be packed."""


@attrs.define(eq=False)
class _StoredFact:
    """First difference that any rank has found, kept in the store of torch.distributed."""

    key: str
    """Key in the store, which is the same on all ranks."""

    store: Any = None
    num_reads: int = 0

    def join(self) -> Any:
        """
        Return the store. After the first call, rank 0 waits at its end until this rank has read the
        store as often as rank 0.

        The first call comes before gradients are reduced, so no rank has ended by then.
        """
        if self.store is not (store := _get_default_store()):
            self.store, self.num_reads = store, 0
            self._set_reads("0")
            if dist.get_rank() == 0:  # not by atexit, which forked processes skip
                Finalize(None, self._await_readers, (store, dist.get_world_size()), exitpriority=0)
        return store

    def leave(self) -> None:
        """Record that this rank no longer reads the store, so that rank 0 does not wait for it."""
        self.join()
        self._set_reads("inf")

    def tell(self, fact: str) -> None:
        """Write a difference to the store, unless another rank has written one."""
        self.join().compare_set(self.key, "", f"rank {dist.get_rank()}: {fact}")

    def read(self) -> str | None:
        """
        Return the difference that a rank has found; None if no rank has found one.

        Raises:
            RunError: The process of rank 0, which kept the store, has ended.
        """
        try:
            store = self.join()
            fact = store.get(self.key).decode() if store.check([self.key]) else None
            self.num_reads += 1
            self._set_reads(str(self.num_reads))
        except dist.DistError as error:
            fact = "rank 0 has ended, and what other ranks found is unknown, so no weight is updated: see its output"
            raise RunError("rank_gone", fact) from error
        return fact

    def _set_reads(self, number: str) -> None:
        self.store.set(f"{self.key}/reads/{dist.get_rank()}", number)

    def _await_readers(self, store: Any, world_size: int) -> None:
        """
        Wait at the end of rank 0, for at most `_HOLD_S`, until all ranks have read the store as
        often as rank 0.
        """
        deadline, names = time.monotonic() + _HOLD_S, [f"{self.key}/reads/{rank}" for rank in range(1, world_size)]
        with suppress(dist.DistError):
            joined = [name for name in names if store.check([name])]
            while time.monotonic() < deadline and any(float(store.get(name)) < self.num_reads for name in joined):
                time.sleep(_POLL_S)  # a store waits for keys, not for values


class FirstCalls:
    """Comparison of a model's calls with padded passes, once for each kind of call."""

    def __init__(self, native: str) -> None:
        """Begin without compared calls; *native* is the attention that computes padded passes."""
        self._native, self._key = native, f"packplan/unlike_padded/{next(_NUMBERS)}"
        self._stored = _StoredFact(self._key)
        self._kinds: set[Any] = set()
        self._has_met = False  # with the calls of the same model on other ranks
        self._calls_left: dict[Any, int] = {}  # by mode, until other ranks are asked no more

    def compare(
        self, hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens | None, *, meets: bool
    ) -> None:
        """
        Compare a call with its padded pass, if it is the first call of its kind.

        Args:
            hooks: `Unpadding` of the model.
            module: The model, its wrapper or its text stack.
            given: Arguments of the call by name.
            tokens: Real tokens of the batch; None if the call is not packed.
            meets: Whether ranks with sharded weights exchange their findings. Ranks do so at most
                once in each call, whether or not a batch is padded. So every rank takes part in the
                same number of exchanges.

        Raises:
            MismatchError: The passes differ, or ranks with sharded weights call the model
                differently. On several ranks with whole weights, `refuse_step` raises this error
                instead.
        """
        if has_ranks():
            self._stored.join()
        is_sharded = has_ranks() and find_sharded_weight(module) is not None
        if is_sharded and meets:
            self._meet_once()
        kind = None if tokens is None else self._kind_of(hooks, module, given, tokens)
        is_new = kind is not None and kind not in self._kinds
        if is_new:
            self._kinds.add(kind)
        if not (self._ask_ranks(module, given, tokens, is_new=is_new, meets=meets) if is_sharded else is_new):
            return
        fact = self._find_fact(hooks, module, given, tokens, together=is_sharded)
        if is_sharded:
            if isinstance(module, FSDPModule):
                module.unshard()  # if its hook came before this one
            _raise_first(fact)
        elif fact is not None and not has_ranks():
            raise MismatchError("unlike_padded", fact)
        elif fact is not None:
            log.error("%s; no rank updates weights", fact)
            hooks.is_paused = True
            self._stored.tell(fact)

    def _meet_once(self) -> None:
        """Raise MismatchError unless all ranks call this model with its hooks."""
        if not self._has_met and _HOOKLESS in _meet_ranks(self._key, ""):
            raise MismatchError(
                "ranks_disagree", "a rank computes this model with padding: call unpad(model) on every rank"
            )
        self._has_met = True

    def _ask_ranks(
        self, module: Any, given: dict[str, Any], tokens: RealTokens | None, *, is_new: bool, meets: bool = True
    ) -> bool:
        """
        Return whether any rank reports a new kind of call; False once ranks have stopped reporting.
        Every rank has to call this method the same number of times. MismatchError is raised if
        ranks run the vision tower different numbers of times.
        """
        mode = module, module.training, torch.is_grad_enabled()
        left = self._calls_left.get(mode, _ASKED_CALLS) if meets else 0
        found = gather_from_ranks((is_new, count_tower_runs(module, given))) if left > 0 else []
        runs = {runs for _, runs in found}
        if len(runs) > 1:
            fact = (
                f"ranks that share weights run the vision tower {min(runs)} to {max(runs)} times in a call, and would "
                "wait forever: call packplan.hf.ensure_vision_forward(model, inputs) on all ranks"
            )
            raise MismatchError("ranks_disagree", fact)
        is_due = any(is_new for is_new, _ in found)
        if meets:
            self._calls_left[mode] = _ASKED_CALLS if is_due else max(left - 1, 0)
        if is_new and not is_due:
            words = _describe_call(module, given, tokens)
            log.warning("%s is not compared with its padded pass, since ranks compare early calls only", words)
        return is_due

    def _find_fact(
        self, hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens | None, *, together: bool
    ) -> str | None:
        """
        Return a clause that says how a call differs from its padded pass, or log why it is not
        compared.
        """
        words = _describe_call(module, given, tokens)
        try:
            fact = find_difference(hooks, module, given, tokens, native=self._native, together=together)
        except Exception as error:
            if isinstance(error, ArgumentError) or (together and not isinstance(error, ModelError)):
                raise  # a refused call; or other ranks are inside of a pass, which this one cannot go on with
            why = getattr(error, "fact", error)  # without the remedy of a model that may not pack
            log.warning("%s is not compared with its padded pass: %s: %s", words, type(error).__name__, why)
            return None
        if fact is NOT_PACKED:
            log.warning("%s is computed with padding", words)
        if fact is None or fact is NOT_PACKED:
            return None
        why = "" if together or tokens is None else self._deciding_input(hooks, module, given, tokens)
        return f"{words} differs without padding: {fact}{why}"

    def _kind_of(self, hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens) -> Any:
        shapes = {name: getattr(one, "ndim", one is True) for name, one in given.items() if one is not None}
        sides, mode = frozenset(tokens.padding_places), module.training
        return module, mode, torch.is_grad_enabled(), hooks.omits_eval_logits, sides, frozenset(shapes.items())

    def _deciding_input(self, hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens) -> str:
        """
        Return a clause that names the first input without which a call equals its padded pass.
        """
        for name in sorted(given.keys() - _NEEDED):
            with suppress(Exception):
                others = {one: value for one, value in given.items() if one != name}
                if find_difference(hooks, module, others, tokens, native=self._native) is None:
                    return f"; without {name} the call agrees: leave {name} out"
        return ""

    def remove(self) -> None:
        """Write to the store that this rank has removed its hooks."""
        if has_ranks():
            _get_default_store().set(f"{self._key}/{dist.get_rank()}", _HOOKLESS)
            self._stored.leave()

    def refuse_step(self, *_: Any) -> None:
        """Raise MismatchError before weights are updated, if any rank has found a difference."""
        if has_ranks():
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # gradients are reduced now, so each rank has had its call
            if (fact := self._stored.read()) is not None:
                raise MismatchError("unlike_padded", fact)


def _describe_call(module: Any, given: dict[str, Any], tokens: RealTokens | None) -> str:
    names = ", ".join(sorted(name for name, one in given.items() if one is not None))
    sides = " and ".join(sorted(tokens.padding_places) if tokens else []) or "right of"
    mode = "training" if module.training else "evaluation"
    return f"the first call of {type(module).__name__} in {mode} with {names}, padded {sides} tokens,"


def _raise_first(fact: str | None) -> None:
    """
    Raise MismatchError with the difference of the first rank that has found one. Every rank has to
    call this function.
    """
    for rank, found in enumerate(gather_from_ranks(fact)):
        if found is not None:
            raise MismatchError("unlike_padded", f"rank {rank}: {found}")


@contextmanager
def raising_together(model: torch.nn.Module) -> Iterator[None]:
    """
    If the model's weights are sharded, an error on one rank makes all other ranks raise a
    ModelError.

    If each rank has all weights, the context does nothing, so one rank may enter it alone.
    """
    if not has_ranks() or find_sharded_weight(model) is None:
        yield
        return
    fault = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # raised again, once the other ranks know
        fault = error
    failure = "" if fault is None else f"{type(fault).__name__}: {getattr(fault, 'fact', fault)}"[:300]
    try:
        facts = _meet_ranks(f"packplan/models/{next(_MODELS)}", failure)
    finally:
        if fault is not None:
            raise fault
    for rank, fact in enumerate(facts):
        if fact:
            raise ModelError("probe", f"rank {rank} failed while preparing the model: {fact}")


def _meet_ranks(key: str, word: str) -> list[str]:
    """
    Wait, without a collective, until all ranks have called this function; return each rank's word.

    Args:
        key: Prefix of keys in the store, the same on all ranks.
        word: Text that the other ranks receive.

    Raises:
        MismatchError: A rank has not called this function within `_PATIENCE`.
    """
    store, rank = _get_default_store(), dist.get_rank()
    store.set(f"{key}/{rank}", word)
    keys = [f"{key}/{one}" for one in range(dist.get_world_size())]
    try:
        store.wait(keys, _PATIENCE)
    except dist.DistStoreError as error:
        absent = ", ".join(str(one) for one, name in enumerate(keys) if not store.check([name]))
        fact = f"rank {rank} waited for rank {absent} to call this model without padding: call unpad on every rank"
        raise MismatchError("ranks_disagree", fact) from error
    return [store.get(name).decode() for name in keys]


def find_difference(
    hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens | None, *, native: str, together: bool = False
) -> str | None:
    """
    Return a clause that says how a packed call differs from its padded pass; None if it does not.

    Args:
        hooks: `Unpadding` of the model.
        module: The model, its wrapper or its text stack.
        given: Arguments of the call by name.
        tokens: Real tokens of the batch; None if this call is not packed, and so not compared.
        native: Attention of transformers that computes the padded pass.
        together: Whether weights are sharded, so that all ranks compute the same passes, without
            gradients.
    """
    if together and "use_cache" in given:  # without gradients that is generation
        given = {**given, "use_cache": False}
    call, counts = partial(module, **given), type(hooks.counts)()

    def call_with_another_seed() -> Any:
        torch.manual_seed(0)
        return call()

    def run_padded(one: Callable[[], Any]) -> Pass:
        return run(one, tokens, hooks.trial(padded=True), using_native_attention(hooks.model, native))

    run, found, fact = partial(run_pass, hooks.model, hooks.stack.module, keeps=given.get("logits_to_keep")), None, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and not together):
        expected = run_padded(call)
        try:
            found = run(call, tokens, hooks.trial(counts))
        except (torch.OutOfMemoryError, ArgumentError):
            raise
        except Exception as error:
            fact = f"it raises {type(error).__name__}: {error}"
            if together:
                raise MismatchError("unlike_padded", f"without padding {fact}") from error
        if found is not None and tokens is not None:
            fact = difference_text(found, expected) if counts.calls else NOT_PACKED
        if any(gather_from_ranks(fact) if together else [fact]):
            again = run_padded(call_with_another_seed)
            if found is not None and fact is not None and difference_text(again, expected) is not None:
                raise ModelError(
                    "probe", "the model's results are random even without dropout and noise, so they cannot be compared"
                )
    return fact
