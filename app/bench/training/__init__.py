"""`packplan bench train`: packed training against other ways to train."""
