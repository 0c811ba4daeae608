"""Records, their conversion into samples, and measurements of samples."""
