"""
Readers of records, one for each file format; formats without random access are converted first.
"""
