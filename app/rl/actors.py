"""Builder of a Ray actor's worker, imported before modules that take 7 s to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packplan.adapters.progress import loading_libraries


def build_in_actor(path: str, overrides: Sequence[str]) -> Any:
    """
    Build a worker of a run; see `app.wiring.training.policies.build_ray_worker`.

    Args:
        path: The run's YAML.
        overrides: Values of the command line over the YAML's.
    """
    with loading_libraries():
        from packplan.app.wiring.training.policies import build_ray_worker
    return build_ray_worker(path, overrides)
