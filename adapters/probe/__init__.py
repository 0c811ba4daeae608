"""
Probe: a test of whether a model keeps the samples of a pack apart.

`shrink` makes the model's configuration small, by rules and by trial. `small_model` builds a small
copy of the model from this configuration. `probe_row` compares a packed row with its samples alone,
on the copy or on the model that will be trained. `probe_row` also compares images computed in one
pass with each image alone. `probe` tries one strategy after another, and finds layers that carry a
state along the row.
"""
