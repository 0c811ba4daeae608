"""
Packs in torch's loaders.

`rows` has packs of tokenized rows and their collator, `positions` the kinds of their
tokens. `batches` has the batch samplers that serve a schedule, and needs no torch.
"""
