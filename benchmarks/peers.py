"""Packing functions of other packages that a user could install instead of Packplan."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from packplan.core.lengths import IntArray

MAX_TOKENS = 4_000_000_000
"""Maximum number of tokens for TRL, which packs the tokens themselves, of two bytes each."""


@attrs.frozen
class Peer:
    """Planner of another package."""

    package: str

    module: str
    """Module that is imported before processes are forked."""

    prepare: Callable[[IntArray, int], Callable[[], Any]]
    """Function of lengths and capacity that returns the call to measure; the call returns packs."""

    @property
    def is_installed(self) -> bool:
        """Whether the package can be imported; optional packages may be missing."""
        return find_spec(self.module.partition(".")[0]) is not None


def _binpacking(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    from binpacking import to_constant_volume

    samples = list(enumerate(lengths.tolist()))
    return lambda: to_constant_volume(samples, capacity, weight_pos=1)


def _lightbinpack(lengths: IntArray, capacity: int, *, strategy: str) -> Callable[[], Any]:
    from lightbinpack import pack

    samples = lengths.tolist()
    return lambda: pack(samples, capacity, strategy=strategy)


def _ms_swift(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    from swift.dataset.packing import PackingDataset

    data = {"lengths": lengths.tolist()}
    template = SimpleNamespace(max_length=capacity)

    class Data(dict):  # type: ignore[type-arg]
        """Columns by name; the length is the number of rows, as in `datasets`."""

        def __len__(self) -> int:
            return len(self["lengths"])

    return lambda: PackingDataset(template, Data(data), packing_length=capacity)


def _trl(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    import pyarrow as pa
    from datasets import Dataset, disable_caching
    from trl.data_utils import pack_dataset

    disable_caching()
    if lengths.sum() > MAX_TOKENS:
        message = f"packs tokens, but {int(lengths.sum()):,} tokens do not fit into memory"
        raise MemoryError(message)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.array(np.zeros(ends[-1], dtype=np.int8))
    column = pa.LargeListArray.from_arrays(pa.array(ends), tokens)
    data = Dataset(pa.table({"input_ids": column}))
    return lambda: pack_dataset(data, seq_length=capacity, strategy="bfd", map_kwargs={"keep_in_memory": True})


PEERS = {
    "binpacking": Peer("binpacking", "binpacking", _binpacking),
    "lightbinpack-ffd": Peer("lightbinpack", "lightbinpack", partial(_lightbinpack, strategy="ffd")),
    "lightbinpack-obfd": Peer("lightbinpack", "lightbinpack", partial(_lightbinpack, strategy="obfd")),
    "ms-swift": Peer("ms-swift", "swift.dataset.packing", _ms_swift),
    "trl-bfd": Peer("trl", "trl.data_utils", _trl),
}
"""Name in the table -> planner."""
