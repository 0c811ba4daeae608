"""
Parts of a run, built from its configuration.

`commands`, `runs`, `policies`, `stores` and `length_tables` load no torch; the others do.
"""
