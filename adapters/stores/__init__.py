"""
Stores lengths and plans on disk.

A manifest appears only when the files that it lists are complete. One process writes at a time.
"""
