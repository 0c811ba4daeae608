"""Lengths and plans on disk: each file is complete or absent, and one process writes at a time."""
