"""Training on a stream, which is packed while training: data set and trainer."""
