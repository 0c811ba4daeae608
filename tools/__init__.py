"""Programs for maintainers: page writers and a line counter. They are not installed."""
