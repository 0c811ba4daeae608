"""What else a user would install to pack samples: real packages, called as they are meant to be."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from packplan.core.lengths import IntArray

MAX_TOKENS = 4_000_000_000
"""A peer that packs tokens, not lengths, is not asked for more: one byte each, twice."""


@attrs.frozen
class Peer:
    """Another planner."""

    name: str

    package: str

    module: str
    """What to import before processes are forked, so that it is imported once."""

    call: Callable[[IntArray, int], Callable[[], Any]]
    """From lengths and capacity: its input, made; returns what is timed."""

    num_packs: Callable[[Any], int]

    @property
    def title(self) -> str:
        """Name and installed version."""
        return f"{self.name} {version(self.package)}"

    def load(self) -> None:
        """Import the package."""
        import_module("packplan.adapters.torchvision_shim")  # before transformers and swift
        import_module(self.module)


def _binpacking(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    from binpacking import to_constant_volume

    samples = list(enumerate(lengths.tolist()))
    return lambda: to_constant_volume(samples, capacity, weight_pos=1)


def _ms_swift(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    from swift.dataset.packing import PackingDataset

    data = {"lengths": lengths.tolist()}
    template = SimpleNamespace(max_length=capacity)

    class Data(dict):  # type: ignore[type-arg]
        """As long as its rows; by column, as in `datasets`."""

        def __len__(self) -> int:
            return len(self["lengths"])

    return lambda: PackingDataset(template, Data(data), packing_length=capacity)


def _trl(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    import pyarrow as pa
    from datasets import Dataset, disable_caching
    from trl.data_utils import pack_dataset

    disable_caching()
    if lengths.sum() > MAX_TOKENS:
        message = f"packs tokens, and {int(lengths.sum()):,} are more than fit in memory"
        raise MemoryError(message)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.array(np.zeros(ends[-1], dtype=np.int8))
    column = pa.LargeListArray.from_arrays(pa.array(ends), tokens)
    data = Dataset(pa.table({"input_ids": column}))
    return lambda: pack_dataset(data, seq_length=capacity, strategy="bfd", map_kwargs={"keep_in_memory": True})


PEERS = {
    peer.name: peer
    for peer in (
        Peer("binpacking", "binpacking", "binpacking", _binpacking, len),
        Peer("ms-swift", "ms-swift", "swift.dataset.packing", _ms_swift, len),
        Peer("trl-bfd", "trl", "trl.data_utils", _trl, len),
    )
}
"""By name."""
