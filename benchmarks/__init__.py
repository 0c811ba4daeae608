"""Measurements behind the figures of the documentation: `python -m benchmarks COMMAND`."""

import packplan.adapters  # noqa: F401  # prepares what transformers and swift import
