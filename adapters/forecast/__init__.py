"""
Measurements that a run is forecast from: a step's memory by tracing, and the seconds of steps.
"""
