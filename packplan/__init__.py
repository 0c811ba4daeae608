"""
Packplan groups samples of unequal length into packs of a fixed token budget. A plan is made once,
and is the same on every rank.

>>> import packplan as pp
>>> plan = pp.plan([60, 20, 50, 30, 40, 40], 80)
>>> plan.packs.tolist()
[[0, 1], [2, 3], [4, 5]]
>>> plan.schedule(world_size=2, epochs=3).total_steps
6

Each name of this module is imported when it is first used. The names need only attrs, binpacking,
numpy and scipy; `write_report` also needs the extra `report`. Training needs another extra: `pip
install 'packplan[train]'`.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packplan.adapters.report import write_report as write_report
    from packplan.core.align import AlignedPlan as AlignedPlan
    from packplan.core.align import align_plan as align_plan
    from packplan.core.batch import partial_window as partial_window
    from packplan.core.batch import resolve_accumulation as resolve_accumulation
    from packplan.core.bounds import lower_bound as lower_bound
    from packplan.core.context_parallel import chunk_positions as chunk_positions
    from packplan.core.context_parallel import cu_seqlens as cu_seqlens
    from packplan.core.context_parallel import padded_length as padded_length
    from packplan.core.errors import ArgumentError as ArgumentError
    from packplan.core.metrics import packing_metrics as packing_metrics
    from packplan.core.packers import ALGORITHMS as ALGORITHMS
    from packplan.core.packers import pack as pack
    from packplan.core.packs import Packs as Packs
    from packplan.core.packs import plan_checksum as plan_checksum
    from packplan.core.plan import RawPlan as RawPlan
    from packplan.core.plan import build_raw_plan as build_raw_plan
    from packplan.core.policy import PlanPolicy as PlanPolicy
    from packplan.core.schedule import EpochSchedule as EpochSchedule
    from packplan.core.shard import shard_dynamic as shard_dynamic
    from packplan.core.shard import shard_packed as shard_packed
    from packplan.core.surface import Plan as Plan
    from packplan.core.surface import plan as plan
    from packplan.core.work.model import WorkModel as WorkModel

__version__ = "0.1.0"

_NAMES = MappingProxyType(
    {
        "packplan.adapters.report": ("write_report",),
        "packplan.core.align": ("AlignedPlan", "align_plan"),
        "packplan.core.batch": ("partial_window", "resolve_accumulation"),
        "packplan.core.bounds": ("lower_bound",),
        "packplan.core.context_parallel": ("chunk_positions", "cu_seqlens", "padded_length"),
        "packplan.core.errors": ("ArgumentError",),
        "packplan.core.metrics": ("packing_metrics",),
        "packplan.core.packers": ("ALGORITHMS", "pack"),
        "packplan.core.packs": ("Packs", "plan_checksum"),
        "packplan.core.plan": ("RawPlan", "build_raw_plan"),
        "packplan.core.policy": ("PlanPolicy",),
        "packplan.core.schedule": ("EpochSchedule",),
        "packplan.core.shard": ("shard_dynamic", "shard_packed"),
        "packplan.core.surface": ("Plan", "plan"),
        "packplan.core.work.model": ("WorkModel",),
    }
)
"""
Module -> public names that it defines. The imports under `TYPE_CHECKING` list the same names for
type checkers.
"""

_MODULES = MappingProxyType({name: module for module, names in _NAMES.items() for name in names})

__all__ = sorted(_MODULES)  # noqa: PLE0605  # a list of names that __getattr__ defines


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
