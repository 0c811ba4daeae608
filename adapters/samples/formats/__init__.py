"""Readers of records by file format, and conversion of formats that cannot be read in any order."""
