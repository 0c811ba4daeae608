"""
Whether a model keeps the samples of a pack apart, proven on a small copy of it.

`shrink` makes the copy's configuration, `unknown` puts lengths to work that no rule knows,
`small_model` builds it, `rows` measures a packed row against its samples alone, `images` what a
tower sees, `states` finds layers that carry a state along the row, `probe` tries one strategy after
the other. `loaded` asks the model that is about to train.
"""

from __future__ import annotations

from packplan.adapters.probe.loaded import limit_of, place_of, probe_loaded
from packplan.adapters.probe.probe import probe_config
from packplan.adapters.probe.small_model import open_model_config

__all__ = ["limit_of", "open_model_config", "place_of", "probe_config", "probe_loaded"]
