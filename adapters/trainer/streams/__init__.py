"""Training on a stream, which is packed during training: its data set and its trainer."""
