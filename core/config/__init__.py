"""
The keys of a run's YAML as frozen classes, checks of their values, and advice on unknown keys.

The package also selects the keys that enter fingerprints and those that ranks compare.
"""
