"""
Work of samples and packs in FLOPs of the model's layers, and assignment of packs to ranks by work.
"""
