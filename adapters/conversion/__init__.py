"""
A command of ms-swift: what its script or file says, which arguments there are, and what ms-swift
finds out about its model.
"""
