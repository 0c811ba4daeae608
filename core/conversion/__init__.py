"""A command of `swift sft` -> a run of this project; nothing is executed."""

from __future__ import annotations

from packplan.core.conversion.arguments import Argument, Given, read_keys, read_resolved, read_words, refuse_rlhf
from packplan.core.conversion.contradictions import require_consistent
from packplan.core.conversion.conversion import (
    DIFFERENT,
    Conversion,
    Line,
    ModelFacts,
    Verdict,
    World,
    samples_of_step,
)
from packplan.core.conversion.convert import convert, ranks_of_devices
from packplan.core.conversion.exported import with_exported_data
from packplan.core.conversion.launch import CONVERTED, PLANNED, Launch, find_launch, ranks_and_nodes
from packplan.core.conversion.launchers import as_torchrun, read_hosts
from packplan.core.conversion.packs import packs_of_step, with_packs, without_packs
from packplan.core.conversion.shell import Command, Word, read_script

__all__ = [
    "CONVERTED",
    "DIFFERENT",
    "PLANNED",
    "Argument",
    "Command",
    "Conversion",
    "Given",
    "Launch",
    "Line",
    "ModelFacts",
    "Verdict",
    "Word",
    "World",
    "as_torchrun",
    "convert",
    "find_launch",
    "packs_of_step",
    "ranks_and_nodes",
    "ranks_of_devices",
    "read_hosts",
    "read_keys",
    "read_resolved",
    "read_script",
    "read_words",
    "refuse_rlhf",
    "require_consistent",
    "samples_of_step",
    "with_exported_data",
    "with_packs",
    "without_packs",
]
