"""One rank of the group that `test_rank_group` talks to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(scene: str, out: str) -> None:
    import numpy as np

    from adapters.torch_group import TorchGroup
    from core.errors import PackplanError, PlanTooShortError

    group = TorchGroup(use_cpu=True, timeout_s=60)

    def build():
        if scene == "fails":
            raise PlanTooShortError(3, 8)
        if scene == "dies":
            os._exit(9)
        if scene == "slow":
            sys.stdin.read()
        return {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "empty": np.zeros(0, dtype=np.int64)}

    try:
        arrays = group.from_rank_zero(build, timeout_s=2 if scene == "slow" else 60)
        said = {
            "arrays": {name: [array.tolist(), str(array.dtype), array.shape] for name, array in arrays.items()},
            "gathered": group.gather(f"from {group.rank}"),
            "any": [group.any(group.rank == 1), group.any(False)],  # noqa: FBT003
        }
    except PackplanError as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    Path(out, f"{group.rank}.json").write_text(json.dumps(said))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
