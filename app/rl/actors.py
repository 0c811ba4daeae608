"""What a Ray actor calls to build its worker: it is imported before what takes 7 s to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packplan.adapters.progress import loading_libraries


def build_in_actor(path: str, overrides: Sequence[str]) -> Any:
    """
    Build a worker of a run; see `app.wiring.training.policies.build_ray_worker`.

    Args:
        path: The run's YAML.
        overrides: What the command line sets over the YAML.
    """
    with loading_libraries():
        from packplan.app.wiring.training.policies import build_ray_worker
    return build_ray_worker(path, overrides)
