"""
Packs in torch's loaders.

`rows` has the data set of packs and its collator, `positions` the types of tokens. `batches` has
the batch samplers that serve a schedule, and needs no torch.
"""
