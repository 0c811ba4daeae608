"""
Data sets, samplers and collators that serve packs to torch's data loaders.

`rows` reads, compares and pads rows. `packs` has the data set of packs, its collator and the
loader. `batches` has the batch samplers of packs, and needs no torch.
"""
