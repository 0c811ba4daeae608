"""`packplan plan`: a module for each of its commands, and one that opens stored splits."""
