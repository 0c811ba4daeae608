"""
How near the work that is read from a model's config.json comes to what torch counts, of each
architecture that transformers knows.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import attrs

from packplan.core.errors import ConfigError
from packplan.core.work import WorkModel

ROWS = (60, 480)
"""Tokens of the rows that are computed."""

NEAR = 0.02

Verdict = Literal["near", "off", "not known", "not counted"]


@attrs.frozen
class Counted:
    """A family's work beside what torch counts."""

    family: str
    verdict: Verdict

    ratios: tuple[float, ...]
    """FLOPs by the config.json over torch's, of each of `ROWS`; none unless both are known."""

    reason: str
    """What is not known, or why there is nothing to count."""


def counted_families(names: list[str]) -> list[Counted]:
    """
    Return the verdict on small copies of families, of all without names; text alone, under eager
    attention.
    """
    from packplan.adapters.probe.families import family_names

    return [_counted(name) for name in names or family_names()]


def _counted(family: str) -> Counted:
    """Build a family's small copy, and hold its work against torch's counter."""
    from packplan.adapters.probe.families import default_config
    from packplan.adapters.probe.small_model import build_small, quiet

    try:
        with quiet():
            model = build_small(default_config(family), attention="eager")
    except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
        return Counted(family, "not counted", (), _line(error))
    # The kernels that compute experts together are not counted.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    try:
        work = WorkModel.from_config(json.loads(json.dumps(model.config.to_dict(), default=str)))
    except ConfigError as error:
        return Counted(family, "not known", (), _line(error))
    try:
        ratios = tuple(float(work.of_positions(num, num**2)) / _torch_counts(model, num) for num in ROWS)
    except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
        return Counted(family, "not counted", (), _line(error))
    near = all(abs(ratio - 1) <= NEAR for ratio in ratios)
    return Counted(family, "near" if near else "off", ratios, "")


def _torch_counts(model: Any, num_tokens: int) -> int:
    """Return the operations of a forward pass over a row of text."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.full((1, num_tokens), 5), use_cache=False)
    operations: int = counter.get_total_flops()
    return max(1, operations)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
