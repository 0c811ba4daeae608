"""From samples to aligned plans: lengths are measured once, and rank 0 plans for all ranks."""
