"""
Readers of data files by format; files without random access are first converted to a copy.
"""
