"""From samples to aligned plans: measured once, planned by rank 0, shared with the others."""
