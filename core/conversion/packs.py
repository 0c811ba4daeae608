"""
Samples of a pack -> the packs of a step of a converted run, where its command does not pack.

A step keeps the samples that it has, in the mean: its packs are the nearest whole number, and where
that would hold over a third more or fewer samples, samples do not share packs.
"""

from __future__ import annotations

from packplan.core.conversion.conversion import PACKING, Conversion, batch_keys, listed, samples_of_step

_NEAR = 1 / 3
"""Share by which a step of packs may differ from the samples that it had."""


def packs_of_step(samples: int, *, samples_per_pack: float) -> int | None:
    """
    Return the packs of a rank's step that hold its samples in the mean; None if no number does.

    Args:
        samples: Samples of the step without packs, >= 1.
        samples_per_pack: Mean over all packs.

    >>> packs_of_step(16, samples_per_pack=8.6), packs_of_step(4, samples_per_pack=8.6)
    (2, None)
    """
    packs = max(1, round(samples / samples_per_pack))
    return packs if abs(packs * samples_per_pack / samples - 1) <= _NEAR else None


def with_packs(
    conversion: Conversion, packs: int, *, samples_per_pack: float, steps: tuple[int, int], world_size: int
) -> Conversion:
    """
    Return a run whose samples share packs, and say how its steps change.

    Args:
        conversion: The run as its command has it.
        packs: Packs of a rank's step.
        samples_per_pack: Mean over all packs.
        steps: Optimizer steps of the run before and after.
        world_size: Ranks of the run.
    """
    training = conversion.document["training"]
    keys = {"training.packing": True, **batch_keys(packs, training)}
    samples, (before, after) = samples_of_step(training) * world_size, steps
    reason = (
        f"{listed(keys)}; a pack holds {samples_per_pack:.1f} samples in the mean, and a step "
        f"{packs * samples_per_pack * world_size:,.1f} where ms-swift's holds {samples:,}: {before:,} steps become "
        f"{after:,}; --packing false keeps ms-swift's batches"
    )
    return conversion.with_line(PACKING, "changed", reason, keys)


def without_packs(conversion: Conversion, why: str) -> Conversion:
    """Return the same run, and say why its samples share no packs."""
    (line,) = (line for line in conversion.lines if line.argument == PACKING)
    return conversion.with_line(PACKING, line.verdict, f"{line.reason}; {why}")
