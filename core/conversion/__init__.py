"""A command of `swift sft` -> a run of this project, and back; nothing is executed."""

from __future__ import annotations

from packplan.core.conversion.arguments import Argument, Given, read_keys, read_resolved, read_words
from packplan.core.conversion.back import Back, to_swift
from packplan.core.conversion.convert import Conversion, Line, ModelFacts, World, convert, require_consistent
from packplan.core.conversion.launch import Launch, find_launch
from packplan.core.conversion.shell import Command, Word, read_script

__all__ = [
    "Argument",
    "Back",
    "Command",
    "Conversion",
    "Given",
    "Launch",
    "Line",
    "ModelFacts",
    "Word",
    "World",
    "convert",
    "find_launch",
    "read_keys",
    "read_resolved",
    "read_script",
    "read_words",
    "require_consistent",
    "to_swift",
]
