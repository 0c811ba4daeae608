"""Samples of a data set: records are read from files, then encoded by ms-swift's template."""
