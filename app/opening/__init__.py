"""
Functions that build the parts of a run from its configuration.

The modules `commands`, `runs`, `policies`, `stores` and `length_tables` do not import torch; the
other modules do.
"""
