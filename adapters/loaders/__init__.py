"""
Packs in torch's loaders.

`rows` has packs of tokenized rows and their collator, `positions` those of tokens and images.
`batches` has the batch samplers that serve a schedule, and needs no torch.
"""
