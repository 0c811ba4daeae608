"""`packplan plan`: one module for each of its commands, and the stored splits that they open."""
