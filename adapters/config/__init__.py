"""
A run's YAML: its layers, overrides and values, checked against our keys and those of ms-swift.
"""
