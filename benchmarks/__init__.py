"""Benchmarks that measure the figures of the documentation: `python -m benchmarks COMMAND`."""

import packplan.adapters  # prepares what transformers and swift import
