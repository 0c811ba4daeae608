"""Benchmarks: `python -m app.bench planner`."""
