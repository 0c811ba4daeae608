"""Forecasts of runs: the timing that fits a run, and what follows from it."""
