"""Tests that probe each model once: its probes take longer than the rest of a case."""

import hashlib
import os
import pickle
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from packplan.adapters.hf import unpad

_PROBE, _FIND = unpad.probe_small_copy, unpad._find_stack
_FACTS = attrgetter("module", "positions", "by_positions")


def keep_verdicts() -> None:
    """From here on, let `unpad` and `use_plan` take verdicts of other processes of a session."""
    unpad.probe_small_copy, unpad._find_stack = _probe_once, _find_once


def _once(asked: Any, answer: Callable[[], Any], is_kept: Callable[[Any], bool]) -> Any:
    kept = Path(os.environ["VERDICTS_OF_TESTS"], hashlib.sha256(repr(asked).encode()).hexdigest())
    if kept.exists():
        return pickle.loads(kept.read_bytes())  # noqa: S301  # our own
    if is_kept(found := answer()):  # a fault may be planted
        whole = kept.with_suffix(f".{os.getpid()}")
        whole.write_bytes(pickle.dumps(found))
        whole.rename(kept)
    return found


def _probe_once(config: Any, **options: Any) -> Any:
    asked = type(config), config.to_json_string(use_diff=False), sorted(options.items())
    return _once(asked, lambda: _PROBE(config, **options), lambda verdict: verdict.passes)


def _find_once(model: Any, asked: Any, **options: Any) -> Any:
    """Find the stack of a model without hooks by its place among those that may be packed."""
    own = [{"forward"} & vars(one).keys() or one._forward_hooks or one._forward_pre_hooks for one in asked.modules()]
    if dist.is_initialized() or any(own):
        return _FIND(model, asked, **options)
    found, stacks = [], [*unpad._candidate_stacks(model)]

    def find_place() -> int | None:
        found.append(_FIND(model, asked, **options))
        return None if found[0][1] else [*map(_FACTS, stacks)].index(_FACTS(found[0][0]))

    config = model.config.to_json_string(use_diff=False), model.config._attn_implementation
    key = type(model), repr(asked), {one.dtype for one in model.parameters()}, config, sorted(options.items())
    place = _once(key, find_place, lambda number: number is not None)
    return found[0] if found else (stacks[place], {})
