"""Packs of text rows as arrays, checked against their plan, and tables of many of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.adapters.loaders.rows import IGNORED_LABEL, PackOfRows, RowsOfPacks, flatten, refuse_unlearned
from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import ArgumentError
from packplan.core.lengths import IntArray
from packplan.core.surface import Plan

BATCH_PACKS, BATCH_TOKENS = 1000, 2**24
"""Packs and tokens after which a batch is written: a row group, or a batch of Arrow."""

_MEDIA = re.compile(r"(?:^|_)(?:image|video|audio|pixel)s?(?:_|$)")
"""Names of columns that belong to images, videos or sounds; tensors of other names count too."""

_TEXT = ("input_ids", "labels", "position_ids")

Columns = Mapping[str, Any]
"""Values of one row of a file by column."""


@attrs.frozen(eq=False)
class TextPack:
    """One pack of text; arrays are int32, and have a value for each token where not said else."""

    pack: int
    """Pack index in the plan."""

    samples: list[int]
    """Sample indices, in the order of the pack."""

    lengths: NDArray[np.int32]
    """Tokens of each sample; shape (num_samples,)."""

    input_ids: NDArray[np.int32]

    labels: NDArray[np.int32]
    """Learned token at each place, or -100; the first token of each sample is not learned."""

    position_ids: NDArray[np.int32]
    """Positions that start at 0 with every sample."""


class TextPacks:
    """Packs of text in the order in which they are exported."""

    def __init__(self, rows: Any, plan: Plan, *, order: Sequence[int] | IntArray | None, target: Path) -> None:
        """
        Check what can be checked before anything is written.

        Args:
            rows: Tokenized rows by index.
            plan: Plan of the lengths of these rows.
            order: Pack indices, as an epoch of a schedule has them; None for the plan's order.
            target: File or folder that is to be written.

        Raises:
            ArgumentError: The number of rows is not the plan's, *order* names no pack or one that
                the plan lacks, or *target* exists.
        """
        self.plan, self.target, self._packs = plan, target, RowsOfPacks(rows, plan)
        self.order = np.arange(len(plan.packs)) if order is None else np.asarray(order)
        whole = self.order.ndim == 1 and self.order.size > 0 and self.order.dtype.kind in "iu"
        if not whole or self.order.min() < 0 or self.order.max() >= len(plan.packs):
            fact = f"order has to list pack indices from 0 to {len(plan.packs) - 1:,}, at least one"
            raise ArgumentError("host", fact, {"num_packs": len(plan.packs)})
        if target.exists() or target.is_symlink():
            fact = f"{target} exists: an export replaces nothing, so give it another path or remove it"
            raise ArgumentError("host", fact, {"path": str(target)})

    def __iter__(self) -> Iterator[TextPack]:
        """
        Yield packs.

        Raises:
            StaleError: A row is not as long as it was planned.
            ArgumentError: One is no sample, has media, or none of all teaches a token.
        """
        described = f"writing {self.target.name}"
        learned: dict[int, int] = {}
        for number in progress(self.order.tolist(), desc=described, unit=" packs", leave=False, delay=BRIEF_S):
            pack = self._text_pack(self._packs[number])
            starts = np.cumsum(pack.lengths) - pack.lengths
            learned |= zip(pack.samples, np.add.reduceat(pack.labels != IGNORED_LABEL, starts, dtype=int), strict=True)
            yield pack
        refuse_unlearned(np.array(list(learned.values())))

    def tables(self, schema: Any, columns: Callable[[TextPack], Columns]) -> Iterator[Any]:
        """
        Yield Arrow tables of about a thousand packs.

        Args:
            schema: Arrow schema of the tables.
            columns: Function that returns a pack's row.
        """
        pyarrow = load_pyarrow()
        batch: list[Columns] = []
        num_tokens = 0
        for pack in self:
            batch.append(columns(pack))
            num_tokens += pack.input_ids.size
            if len(batch) == BATCH_PACKS or num_tokens >= BATCH_TOKENS:
                yield pyarrow.Table.from_pydict(_by_column(batch, schema.names), schema)
                batch, num_tokens = [], 0
        if batch:
            yield pyarrow.Table.from_pydict(_by_column(batch, schema.names), schema)

    def _text_pack(self, pack: PackOfRows) -> TextPack:
        samples = self.plan.packs[pack.pack]
        _refuse_media(samples, pack.rows)
        flat = flatten(pack.rows)
        if extra := flat.keys() - set(_TEXT):
            raise _no_place(f"the rows of pack {pack.pack:,}", extra)
        arrays = {name: flat[name][0].numpy().astype(np.int32) for name in _TEXT}
        return TextPack(pack.pack, samples, self.plan.lengths[samples].astype(np.int32), **arrays)


def _by_column(batch: list[Columns], names: Iterable[str]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in batch] for name in names}


def _refuse_media(samples: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
    for sample, row in zip(samples, rows, strict=True):
        if found := [name for name, value in row.items() if _MEDIA.search(name) and _holds(value)]:
            raise _no_place(f"row {sample:,}", found)


def _holds(value: Any) -> bool:
    """Return whether a column has a value in this row: neither None nor an empty list or array."""
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


def _no_place(whose: str, columns: Iterable[str]) -> ArgumentError:
    names = ", ".join(sorted(columns))
    fact = f"{whose} has {names}, but this format holds text only: export rows without it"
    return ArgumentError("host", fact, {"columns": names})


def load_pyarrow() -> Any:
    """Return pyarrow; ArgumentError if it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        fact = "exports need pyarrow, which is not installed: pip install 'packplan[hf]'"
        raise ArgumentError("host", fact) from None
    return pa
