"""Strategies that laws are stated over."""

from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from packplan.core.batch import largest_degree
from packplan.core.schedule import EpochSchedule

capacities, packing_lengths = st.integers(1, 200), st.integers(2, 120)


@lru_cache(maxsize=1000)
def _integers(most: int, min_size: int, max_size: int) -> st.SearchStrategy[list[int]]:
    """Lists of numbers from 1; built once, since building takes longer than drawing."""
    return st.lists(st.integers(1, most), min_size=min_size, max_size=max_size)


@st.composite
def packable(draw: st.DrawFn, *, min_size: int = 0, max_size: int = 60) -> tuple[list[int], int]:
    """Lengths that a packer takes, and a capacity; few distinct lengths, so ties are frequent."""
    capacity = draw(capacities)
    few = draw(_integers(capacity, 1, 4))
    # Up to the capacity a length of its own, beyond it one of the few: one draw for each sample.
    drawn = draw(_integers(2 * capacity, min_size, max_size))
    return [number if number <= capacity else few[number % len(few)] for number in drawn], capacity


@st.composite
def packable_arrays(draw: st.DrawFn) -> tuple[list[int], int]:
    """Up to some hundred lengths of a shape that leaves gaps to the bound, and a capacity."""
    capacity = draw(st.integers(2, 200))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low = max(1, capacity // draw(st.sampled_from([2, 3, 4, 8, 200])))
    high = max(low, capacity // draw(st.sampled_from([1, 2, 3])))
    return rng.integers(low, high + 1, draw(st.integers(1, 120))).tolist(), capacity


@st.composite
def raw_lengths(draw: st.DrawFn, *, min_size: int = 1, max_size: int = 50) -> tuple[list[int], int]:
    """Lengths of a data set, long ones and ones of exactly the packing length among them."""
    packing_length = draw(packing_lengths)
    # A third is shorter, a third up to 3 times as long, and a third exactly of the packing length.
    drawn = draw(_integers(6 * packing_length, min_size, max_size))
    return [_raw_length(number - 1, packing_length) for number in drawn], packing_length


def _raw_length(number: int, packing_length: int) -> int:
    kind, rest = divmod(number, 2 * packing_length)
    return (1 + rest % (packing_length - 1), packing_length + 1 + rest, packing_length)[kind]


@st.composite
def pack_lists(draw: st.DrawFn) -> list[list[int]]:
    """Disjoint packs in canonical order."""
    labels = draw(st.lists(st.integers(0, 6), min_size=1, max_size=30))
    packs: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        packs.setdefault(label, []).append(index)
    return list(packs.values())


def plain_schedule(num_packs: int, world_size: int = 1, **fields: Any) -> EpochSchedule:
    """Return a schedule of one epoch of one batch a step that drops nothing, but for *fields*."""
    plain = {"dataloader_drop_last": False, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    return EpochSchedule(num_packs=num_packs, world_size=world_size, **plain | fields)


@st.composite
def schedules(draw: st.DrawFn, *, differing: bool = False, shared: bool = False) -> EpochSchedule:
    """
    Schedules of whole runs, padded or assigned by work; epochs may have packs of their own, and
    ranks may share packs.
    """
    world_size, batch_size = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 1, 2, 3]))
    if shared:
        world_size, batch_size = draw(st.sampled_from([2, 4, 8, 6, 3, 1])), 1
    drop_last = draw(st.booleans())
    sizes = st.integers(world_size * batch_size if drop_last else 1, 24 if differing else 40)
    num_packs: Any = draw(st.tuples(sizes, sizes, sizes) if differing else sizes)
    works: Any = None
    if batch_size == 1 and draw(st.booleans()):
        drawn = np.array(draw(st.lists(st.integers(0, 9), min_size=40, max_size=40)))
        works = (lambda epoch: drawn[: num_packs[epoch]]) if differing else drawn[:num_packs]
    degrees: Any = None
    tokens: Any = None
    if shared:
        degrees = np.array(draw(st.lists(st.sampled_from([1, 1, 1, 2, 4, 16]), min_size=40, max_size=40)))[:num_packs]
        each = draw(st.none() | st.lists(st.integers(5, 8), min_size=40, max_size=40))
        tokens = None if each is None else degrees * np.array(each)[:num_packs]
    return EpochSchedule(
        num_packs=num_packs, world_size=world_size, dataloader_drop_last=drop_last, batch_size=batch_size, works=works,
        degrees=degrees, tokens=tokens,
        max_degree=draw(st.sampled_from([None, 1, largest_degree(world_size)])) if shared else None,
        gradient_accumulation_steps=draw(st.integers(1, 4)), seed=draw(st.integers(0, 3)), shuffle=draw(st.booleans()),
        num_train_epochs=draw(st.sampled_from([1, 2, 3, 0.4, 1.5, 2.1])),
        sync_at=draw(st.sampled_from(["step", "microbatch"])),
    )  # fmt: skip
