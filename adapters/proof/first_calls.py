"""
Comparison of a hooked model's first call of each kind with its padded pass.

What `unpad` proved on tokens of its own is compared once more on the user's batch: loss, outputs,
and the gradient with respect to the embeddings of the tokens. Training then goes on bit by bit as
without the comparison.

Ranks may have first calls of different kinds, so no rank waits for another one here. A rank that
finds a difference computes with padding from then on, and writes it to the store of
torch.distributed. Every rank reads the store before it updates weights, so all end together.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from packplan.adapters.attention import using_native_attention
from packplan.adapters.attention.rows import RealTokens
from packplan.adapters.proof.passes import Pass, difference_text, run_pass
from packplan.core.errors import MismatchError, ModelError

log = logging.getLogger(__name__)

_NUMBERS = count()
"""Number of each comparison in this process; ranks hook their models in the same order."""

_NEEDED = {"input_ids", "inputs_embeds", "attention_mask", "labels"}
"""Inputs that a call is not tried without."""

NOT_PACKED = "it is given no mask of rows and positions"
"""Reason why a text stack that could be packed is not."""


class FirstCalls:
    """Comparison of the first call of each kind, before the call itself."""

    def __init__(self, native: str) -> None:
        """Let the attention *native* of transformers compute padded passes."""
        self._native, self._key = native, f"packplan/unlike_padded/{next(_NUMBERS)}"
        self._kinds: set[Any] = set()

    def compare(self, hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens) -> None:
        """
        Compare a call with its padded pass if it is the first of its kind.

        Args:
            hooks: `Unpadding` of the model.
            module: The model, its wrapper or its text stack.
            given: Arguments of the call by name.
            tokens: Real tokens of the batch.

        Raises:
            MismatchError: They differ. On several ranks, `refuse_step` raises it.
        """
        shapes = {name: getattr(one, "ndim", one is True) for name, one in given.items() if one is not None}
        sides, mode = " and ".join(sorted(tokens.padding_places)) or "right of", module.training
        kind = module, mode, torch.is_grad_enabled(), hooks.omits_eval_logits, sides, frozenset(shapes.items())
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        words = f"the first call of {type(module).__name__} in {'training' if mode else 'evaluation'} with"
        words = f"{words} {', '.join(sorted(shapes))}, padded {sides} tokens,"
        if any(isinstance(one, (FSDPModule, FullyShardedDataParallel)) for one in module.modules()):
            log.warning("%s is not compared with its padded pass: ranks share the weights", words)
            return
        try:
            fact = find_difference(hooks, module, given, tokens, native=self._native)
        except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
            log.warning("%s is not compared with its padded pass: %s: %s", words, type(error).__name__, error)
            return
        if fact is NOT_PACKED:
            log.warning("%s is computed padded", words)
        elif fact is not None:
            fact = f"{words} differs without padding: {fact}{self._deciding_input(hooks, module, given, tokens)}"
            if not _has_ranks():
                raise MismatchError("unlike_padded", fact)
            log.error("%s; no rank updates weights", fact)
            hooks.is_paused = True
            _get_default_store().compare_set(self._key, "", f"rank {dist.get_rank()}: {fact}")

    def _deciding_input(self, hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens) -> str:
        """Return a clause on the first input without which a call is that of its padded pass."""
        for name in sorted(given.keys() - _NEEDED):
            with suppress(Exception):
                others = {one: value for one, value in given.items() if one != name}
                if find_difference(hooks, module, others, tokens, native=self._native) is None:
                    return f"; without {name} it does not, so leave {name} out"
        return ""

    def refuse_step(self, *_: Any) -> None:
        """Raise MismatchError if a rank has found a difference, before weights are updated."""
        if _has_ranks():
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # gradients are reduced now, so each rank has had its call
            if _get_default_store().check([self._key]):
                raise MismatchError("unlike_padded", _get_default_store().get(self._key).decode())


def _has_ranks() -> bool:
    """Return whether other ranks run; those of a traced step are fake."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def find_difference(hooks: Any, module: Any, given: dict[str, Any], tokens: RealTokens, *, native: str) -> str | None:
    """
    Return how a packed call differs from its padded pass, as a clause; None if it does not.

    Args:
        hooks: `Unpadding` of the model.
        module: The model, its wrapper or its text stack.
        given: Arguments of the call by name.
        tokens: Real tokens of the batch.
        native: Attention of transformers that computes the padded pass.
    """
    call, counts = partial(module, **given), type(hooks.counts)()

    def call_with_another_seed() -> Any:
        torch.manual_seed(0)
        return call()

    def run_padded(one: Callable[[], Any]) -> Pass:
        return run(one, tokens, hooks.trial(padded=True), using_native_attention(hooks.model, native))

    run = partial(run_pass, hooks.model, hooks.stack.module, keeps=given.get("logits_to_keep"))
    expected = run_padded(call)
    try:
        found = run(call, tokens, hooks.trial(counts))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
        return f"it raises {type(error).__name__}: {error}"
    fact = difference_text(found, expected) if counts.calls else NOT_PACKED
    if fact is not None and difference_text(run_padded(call_with_another_seed), expected) is not None:
        raise ModelError("probe", "its results change with the random state, without dropout and noise too")
    return fact
