"""
Makes the tiny models and the data set that the examples train on, and trains: `packplan demo`.
"""
