"""Profiles of hypothesis, and the models and data that tests train on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test reaches for a hub or a network.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=60, **_COMMON)
settings.register_profile("ci", max_examples=150, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=5000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """A folder with `data/` and `models/`, made once."""
    from app.demo.__main__ import make

    folder = tmp_path_factory.mktemp("demo")
    make(folder, seed=0, num_train=40, num_val=9)
    return folder
