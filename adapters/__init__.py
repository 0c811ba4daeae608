"""Everything outside: one thing a file."""
