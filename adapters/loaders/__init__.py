"""
Packs in torch's loaders.

`rows` reads, compares and pads rows. `packs` has the data set of packs, its collator and the
loader. `batches` has the batch samplers that serve a schedule, and needs no torch.
"""
