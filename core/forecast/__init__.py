"""Forecast of a run's time: measured steps -> seconds by term -> seconds of its steps and parts."""

from __future__ import annotations

from packplan.core.forecast.choice import REPEATS, calibration_packs
from packplan.core.forecast.fit import Calibration, MeasuredStep, StepTerms, StepTime, Timing, fit
from packplan.core.forecast.forecast import Pause, RunForecast, forecast_run

__all__ = [
    "REPEATS",
    "Calibration",
    "MeasuredStep",
    "Pause",
    "RunForecast",
    "StepTerms",
    "StepTime",
    "Timing",
    "calibration_packs",
    "fit",
    "forecast_run",
]
