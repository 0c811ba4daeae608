"""
Functions of the project that `packplan sft app/demo.yaml` calls: `python -m tools.way`.

The program trains two steps of the demo and prints three lists of functions:

- functions that are called up to the end of the first step;
- functions that read and encode the packs of the second step;
- functions that the first `training_step` of the second step calls.

Each list has a line for each file, with the functions in order of their first call, and ends with
their number. Command-line arguments override keys of the YAML.
"""

import functools
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from packplan.app.__main__ import main
from tools.demo.__main__ import CONFIG, FOLDER, make
from tools.size import PRODUCT, ROOT

FUNCTION = 0x1
"""Flag of the code of a function, `CO_OPTIMIZED`; code of modules and classes lacks it."""


@functools.cache
def name_file(code: CodeType) -> str | None:
    """Return the file of a function in core, adapters or app; None for other functions."""
    path = Path(code.co_filename).resolve()
    inside = code.co_flags & FUNCTION and any(path.is_relative_to(ROOT / part) for part in PRODUCT)
    # A comprehension, a generator expression and a lambda belong to the function around them.
    return str(path.relative_to(ROOT)) if inside and code.co_name[0] != "<" else None


PARTS = ("to the end of the first step", "from packs of the second step to training_step", "its training_step")
TO_STEP, IN_STEP = 1, 2
"""Indices of the second and the third part."""


class Way:
    """Functions that each part of a run calls, in order of their first call."""

    def __init__(self) -> None:
        self.parts: list[dict[CodeType, None]] = [{} for _ in PARTS]
        self._part = 0
        self._num_steps = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """
        Note which function is called, as the profile function of `sys.setprofile`.

        Args:
            frame: Frame of the function.
            event: Kind of event: `call`, `return`, or another event, which is ignored. A generator
                has a call and a return for each item.
            _: Result of the function.
        """
        code = frame.f_code
        if event not in ("call", "return") or self._part == len(PARTS) or name_file(code) is None:
            return
        if event == "return":
            self._part += self._part == IN_STEP and code.co_name == "training_step"
            return
        self._num_steps += code.co_name == "get_batch_samples"
        if self._num_steps > 1:
            self._part = max(self._part, IN_STEP if code.co_name == "training_step" else TO_STEP)
        self.parts[self._part][code] = None


def describe(calls: dict[CodeType, None], title: str) -> str:
    """Return a line with the functions of each file, and a last line with *title* and counts."""
    files: dict[str | None, list[str]] = {}
    for code in calls:
        files.setdefault(name_file(code), []).append(code.co_qualname)
    lines = [f"  {file}: {', '.join(names)}" for file, names in files.items()]
    return "\n".join([*lines, f"{title}: {len(calls)} functions in {len(files)} files"])


def record(folder: Path) -> Way:
    """Train two steps with the empty output folder *folder*, and return the called functions."""
    way = Way()
    threading.setprofile(way.note)
    sys.setprofile(way.note)
    try:
        status = main(
            ["sft", str(CONFIG), "--quiet", f"training.output_dir={folder}", "training.max_steps=2", *sys.argv[1:]]
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if status:
        raise SystemExit(status)
    return way


if __name__ == "__main__":
    make(FOLDER, seed=0, num_train=240, num_val=40)
    with tempfile.TemporaryDirectory() as output:
        found = record(Path(output))
    for called, part in zip(found.parts, PARTS, strict=True):
        print(describe(called, part))
