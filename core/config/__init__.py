"""
Keys of a run's YAML as classes, their faults, advice on unknown keys, and what of them enters
fingerprints and is compared between ranks.
"""
