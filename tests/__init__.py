"""Tests; adapters come first, because they prepare what transformers and swift import."""

import packplan.adapters
