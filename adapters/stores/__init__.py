"""Lengths and plans on disk: each file complete or absent, one writer at a time."""
