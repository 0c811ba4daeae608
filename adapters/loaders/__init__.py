"""
Packs in torch's loaders.

`rows` says what a row is. `packs` has the data set of packs, its collator and the loader. `batches`
has the batch samplers that serve a schedule, and needs no torch.
"""
