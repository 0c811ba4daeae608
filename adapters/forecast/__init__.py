"""Forecasts of a run: the memory of a step, traced; seconds of steps, measured and kept."""
