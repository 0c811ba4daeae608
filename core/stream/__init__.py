"""
Packing during training: the buffer of arriving samples that packs them.
"""

from __future__ import annotations

from packplan.core.stream.progress import (
    RankState,
    StreamProgress,
    StreamSegment,
    StreamState,
    reassign,
    unread_places,
)
from packplan.core.stream.shard import (
    PACKER_VERSION,
    CarryOptions,
    Item,
    Order,
    ShardState,
    StreamCounts,
    admit_first,
    flush_buffer,
    read_items,
    take_pack,
)

__all__ = [
    "PACKER_VERSION",
    "CarryOptions",
    "Item",
    "Order",
    "RankState",
    "ShardState",
    "StreamCounts",
    "StreamProgress",
    "StreamSegment",
    "StreamState",
    "admit_first",
    "flush_buffer",
    "read_items",
    "reassign",
    "take_pack",
    "unread_places",
]
