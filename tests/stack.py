"""What the server of `tests.processes` imports once, and tests of training too: libraries and adapters, but no command."""

from __future__ import annotations

import gc

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

# A million objects that live as long as the process: trainers collect garbage at each start, and would look at all of them.
gc.collect()
gc.freeze()
