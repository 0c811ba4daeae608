"""
Keys of a run's YAML as classes, their faults, and advice on unknown keys.

Some keys enter fingerprints, or are compared between ranks.
"""
