"""Training over a stream: its data set and its trainer."""
