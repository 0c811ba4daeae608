"""
Measures what the forecast of a run needs: a step's memory, by tracing, and the seconds of steps.
"""
