"""Equal work in every step: by FLOPs of many ways, and by the clock on two ranks."""
