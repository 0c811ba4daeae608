"""
`packplan COMMAND …`, also from a folder that has packages called app, adapters or core of its own.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("adapters", "app", "core")


def main() -> int:
    """
    Run the command; return its exit status, 2 if other packages of its packages' names would be
    imported.
    """
    folder = Path(__file__).parent
    for name in PACKAGES:
        if (found := place(name)) != (folder / name).resolve():
            print(
                f"error: Packplan's package {name} is {folder / name}, but {found} would be imported: take that "
                "folder off PYTHONPATH, and start packplan by its own name, not by python -m",
                file=sys.stderr,
            )
            return 2
    from app import answer_ctrl_c

    answer_ctrl_c()
    from app.__main__ import main as command
    from app.cli.command import run_program

    return run_program(command)


def place(name: str) -> Path | None:
    """Return the folder of the package that `import name` would take, or None if there is none."""
    spec = find_spec(name)
    return None if spec is None else Path(next(iter(spec.submodule_search_locations or [spec.origin or ""]))).resolve()


if __name__ == "__main__":
    sys.exit(main())
