"""
Test of whether a model keeps the samples of a pack apart, on a small copy of it.

`shrink` shrinks the configuration by rules, and `unknown` shrinks lengths without a rule by trial.
`small_model` builds the copy. `rows` compares a packed row with its samples alone, `images` does so
for a vision tower, and `states` finds layers that carry a state along the row. `probe` tries one
strategy after the other. `loaded` probes the model that is about to train, and `weights` loads
one to probe it.
"""

from packplan.adapters.probe.loaded import place_of, plain_ids, probe_loaded, probe_weights
from packplan.adapters.probe.probe import SmallProbe, probe_config
from packplan.adapters.probe.small_model import open_model_config
