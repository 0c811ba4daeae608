"""
Reads a run's YAML and its overrides, and checks the values of Packplan's and the trainers' keys.
"""
