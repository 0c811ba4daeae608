"""Measurements for forecasts of a run: the memory of a traced step, and the seconds of steps."""
