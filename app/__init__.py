"""
Commands of `packplan`.

Each command calls functions of `core` on what `adapters` read, and writes the results through
`adapters`. `python -m packplan.app.COMMAND` imports this package first. So Ctrl-C prints one line
instead of a traceback, even while other modules are being imported.
"""

import sys
from types import TracebackType

import packplan.adapters  # prepares what transformers and swift import


def install_ctrl_c_hook() -> None:
    """Install an exception hook that prints one line for Ctrl-C, and no traceback."""
    sys.excepthook = _print_interrupt


def _print_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def main() -> int:
    """Run `packplan COMMAND ...`; return its exit status."""
    install_ctrl_c_hook()
    from packplan.app.__main__ import main as command
    from packplan.app.cli.command import run_program

    return run_program(command)


# `python -m` is called `-m` until it has found the module. A program that imports this package
# keeps its own handling of Ctrl-C.
if sys.argv[:1] == ["-m"]:
    install_ctrl_c_hook()

if __name__ == "app":  # imported by its own name, from a checkout
    from packplan.checkout import alias_installed_modules

    alias_installed_modules(__name__)
