"""Records: how they are converted into samples, and how the samples are measured."""
