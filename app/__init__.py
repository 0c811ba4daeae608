"""Commands: gather, decide, apply."""
