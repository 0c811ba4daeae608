"""
Measurements for the forecast of a run: a step's memory, by tracing, and the seconds of steps.
"""
