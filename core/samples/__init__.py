"""Records, the samples that they become, and measurements of samples."""
