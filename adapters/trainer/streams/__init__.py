"""Training over a stream: its data set, its answers, and its trainer."""
