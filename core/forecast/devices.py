"""Peaks of devices, for forecasts of runs that nothing was measured of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from packplan.core.forecast.fit import StepTime, Timing

PEAK_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "B200": 2250e12, "H200": 989e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
        "L40": 181e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12,
        "T4": 65e12,
    }
)  # fmt: skip
"""
Device -> FLOPs a second of dense products of 16 bits, as its maker states them. The first name that
a device's own name contains is taken.
"""

CPU = "CPU"

CORE_FLOPS = 80e9
"""FLOPs a second of a CPU core: 32 of float32 in a cycle, at 2.5 GHz."""

USED_SHARE = 0.4
"""Share of a device's peak that training is guessed to use."""


def guessed_timing(device: str, *, cores: int = 1) -> Timing:
    """
    Return the timing of a device by its peak, which is a guess.

    Args:
        device: Name that contains one of `PEAK_FLOPS`; any other counts as a CPU.
        cores: Cores of a rank on a CPU.

    >>> guessed_timing("NVIDIA H100 80GB HBM3").basis
    'a guess: 40 % of the 989 TFLOP/s of H100'
    """
    name = next((one for one in PEAK_FLOPS if one in device), CPU)
    peak = PEAK_FLOPS.get(name, CORE_FLOPS * cores)
    each = 1 / (USED_SHARE * peak)
    basis = f"a guess: {USED_SHARE:.0%} of the {peak / 1e12:.3g} TFLOP/s of {name}".replace("%", " %")
    return Timing(StepTime(0.0, 0.0, each, each, each), basis)
