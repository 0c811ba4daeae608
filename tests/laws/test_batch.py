"""The effective batch is kept exactly, and steps are counted as the trainer runs them."""

import re

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from packplan.core.batch import partial_window, resolve_accumulation
from packplan.core.errors import ArgumentError

small = st.integers(1, 12)


def resolve(effective=None, per_device=1, accumulation=None, world_size=1, forced=1):
    names = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    given = dict(zip(names, (effective, per_device, accumulation, world_size), strict=True))
    return resolve_accumulation(**given, forced_batch_size=forced)


@given(effective=st.integers(1, 200), per_device=small, accumulation=st.none() | small, world_size=small, forced=small)
# Divisible by the ranks, but not by the batches that each of them forms.
@example(effective=6, per_device=1, accumulation=None, world_size=2, forced=2)
def test_a_wanted_effective_batch_is_realised_exactly_or_refused(
    effective, per_device, accumulation, world_size, forced
):
    """Ranks times batch times accumulation equals the effective batch size."""
    unit = world_size * forced
    event(f"divisible: {effective % unit == 0}")
    if effective % unit:
        with pytest.raises(ArgumentError, match="divisible"):
            resolve(effective, per_device, accumulation, world_size, forced)
        return

    resolved = resolve(effective, per_device, accumulation, world_size, forced)

    assert effective == resolved.effective_batch_size == unit * resolved.gradient_accumulation_steps


@given(small, st.none() | small, small)
def test_an_unset_effective_batch_keeps_what_the_user_implied(per_device, accumulation, world_size):
    """Packing takes over what per-device batch and accumulation gave; padding keeps both."""
    packed = resolve(None, per_device, accumulation, world_size)
    padded = resolve(None, per_device, accumulation, world_size, forced=per_device)

    accumulation = accumulation or 1
    assert per_device * accumulation == packed.gradient_accumulation_steps
    assert accumulation == padded.gradient_accumulation_steps
    assert world_size * per_device * accumulation == packed.effective_batch_size == padded.effective_batch_size


@pytest.mark.parametrize(("effective", "nearest"), [(7, "6 or 9"), (2, "3")])
def test_an_indivisible_batch_names_the_nearest_ones(effective, nearest):
    with pytest.raises(ArgumentError, match=f"divisible by 3 ranks; .* to {nearest}$") as raised:
        resolve(effective, world_size=3)
    assert nearest == raised.value.details["nearest"]
    with pytest.raises(ArgumentError, match="3 ranks x 4 per device"):
        resolve(effective, world_size=3, forced=4)


@given(batches=st.integers(1, 300), accumulation=st.integers(1, 40))
def test_windows_partition_the_batches_of_an_epoch(batches, accumulation):
    """Cutting an epoch's batches into windows, the last is partial if it is shorter."""
    windows = [min(accumulation, batches - start) for start in range(0, batches, accumulation)]

    window = partial_window(per_rank_batches=batches, gradient_accumulation_steps=accumulation)

    assert (windows[-1] if windows[-1] < accumulation else None) == (window and window.remainder)
    if window is None:
        return
    assert [window.remainder, accumulation] == [*map(int, re.findall(r"\d+", str(window)))]
    near = [one for one in range(1, 2 * accumulation + 1) if 2 * one >= accumulation and not batches % one]
    event(f"another is even: {bool(near)}")
    even = window.even_accumulation
    assert even is None or even in near
    assert min((abs(one - accumulation) for one in near), default=None) == (even and abs(even - accumulation))
