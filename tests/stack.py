"""What the server of `tests.processes` imports once: the libraries, and the adapters, but no command."""

from __future__ import annotations

from adapters import (  # noqa: F401
    dynamic_dataset,
    packed_equality,
    policy_worker,
    ray_workers,
    stream_trainer,
    swift_arguments,
    swift_samples,
    swift_trainer,
    torch_group,
)
