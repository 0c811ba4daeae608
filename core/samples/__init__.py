"""Conversion of records into samples, and measurements of samples."""
