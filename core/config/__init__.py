"""
Keys of a run's YAML as classes, their faults, advice on unknown keys, and the keys that enter
fingerprints or are compared between ranks.
"""
