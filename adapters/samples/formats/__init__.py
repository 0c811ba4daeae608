"""
Reads data files of each format. A file without random access is first converted to a copy.
"""
