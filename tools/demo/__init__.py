"""The tiny models and the data set that the examples train on: `python -m tools.demo`."""
