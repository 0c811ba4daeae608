"""Measuring lengths: seconds and bytes, for `app.bench lengths` and `app.bench records`."""
