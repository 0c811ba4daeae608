"""Workers that compute shards of a batch together: ranks of torchrun, or Ray actors."""
