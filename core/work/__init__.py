"""Work of samples and packs in FLOPs, and assignment of packs to ranks by work."""
