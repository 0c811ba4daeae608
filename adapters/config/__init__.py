"""
Reads a run's YAML and its overrides, and checks their values against our keys and ms-swift's.
"""
