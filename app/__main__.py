"""
Plan packs, and train them: `packplan COMMAND ...`.

`packplan COMMAND --help` describes a command. The exit status is 0 after success, 2 for an error in
the input, and 3 for a failed check. The status is 1 for a bug in Packplan or a closed pipe, 130 for
Ctrl-C, and 143 for SIGTERM.
"""

import argparse
import sys
from importlib import import_module
from types import MappingProxyType

from packplan import __version__
from packplan.app.cli.command import run_program

COMMANDS = MappingProxyType(
    {
        "probe": ("packplan.app.probe", "prove that a model keeps packed samples apart, or show where they mix"),
        "plan": ("packplan.app.plan.__main__", "measure samples, plan packs, and inspect plans, before training"),
        "check": ("packplan.app.check", "compare packed training with unpacked training, on your own model"),
        "sft": ("packplan.app.sft", "fine-tune a model on the packs of a plan, or of a stream"),
        "plugin": ("packplan.app.plugin", "write a plugin that trains planned packs inside swift sft"),
        "rl": ("packplan.app.rl", "train on the model's own answers with TRL, in packed microbatches"),
        "measure": ("packplan.app.measure", "write a table with the exact lengths of records, for any tool"),
        "export": ("packplan.app.export", "write the rows of an ms-swift command with their lengths"),
    }
)
"""Command -> its module, which is imported only when the command is called, and its help text."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names; return its exit status."""
    listed = "\n".join(f"  {name:<8}{does}" for name, (_, does) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="packplan",
        description=__doc__,
        epilog=f"commands, which need pip install 'packplan[train]':\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"packplan {__version__}")
    parser.add_argument("command", choices=COMMANDS, help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options = parser.parse_args(arguments)
    status: int = import_module(COMMANDS[options.command][0]).main(options.arguments)
    return status


if __name__ == "__main__":
    sys.exit(run_program(main))
