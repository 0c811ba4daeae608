"""Reads the records of a data set from files, and encodes them with ms-swift's template."""
