"""How records lie in files of each format, and how a file without random access is rewritten."""
