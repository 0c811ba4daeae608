"""
Packs in torch's loaders.

`rows` has the data set of packs, its collator and the loader. `batches` has the batch samplers that
serve a schedule, and needs no torch.
"""
