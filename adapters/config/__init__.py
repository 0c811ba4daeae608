"""
A run's YAML: its layers, overrides and values, checked against this project's keys and ms-swift's.
"""
