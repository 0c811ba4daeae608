"""
Packs of a plan as files that other tools read: plain Parquet, Megatron-Bridge, LLaMA-Factory.

Every export holds whole packs of text, in the order of the plan or of an epoch, and carries the
plan's checksum. It is written whole or not at all, one pack at a time in memory beside a batch of
finished ones.
"""

from __future__ import annotations

from packplan.adapters.exports.llama_factory import export_llama_factory
from packplan.adapters.exports.marks import exported_plan
from packplan.adapters.exports.parquet import export_megatron_bridge, export_parquet

__all__ = ["export_llama_factory", "export_megatron_bridge", "export_parquet", "exported_plan"]
