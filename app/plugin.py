"""
Write the plugin that trains planned packs inside another tool's own command.

`packplan plugin swift -o plugin.py`, then `swift sft ... --packing true --external_plugins
plugin.py`: see docs/use-it-in/swift.md.
"""

from __future__ import annotations

from pathlib import Path

from packplan.app.cli.command import add_logging_options, command_parser, run_command
from packplan.app.wiring.stores import write_new

_TEXT = '''"""Trains the packs of a plan inside ms-swift: swift sft ... --packing true --external_plugins {name}"""

from packplan.adapters.swift import install

install({options})
'''


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("plugin", __doc__)
    parser.add_argument("tool", choices=["swift"], help="the tool that trains: swift is ms-swift")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="plugin.py", default=Path("plugin.py"),
        help="name of the file to write (default: plugin.py)",
    )  # fmt: skip
    parser.add_argument(
        "--any-version", action="store_true", help="let it try versions of the tool that it was not shown with"
    )
    add_logging_options(parser)
    options = parser.parse_args(arguments)

    def command() -> None:
        output: Path = options.output
        write_new(output, _TEXT.format(name=output.name, options="any_version=True" if options.any_version else ""))
        print(f"{output}: add --packing true --external_plugins {output} to a command of swift sft, pt, or rlhf (dpo)")

    return run_command(command, verbose=options.verbose, quiet=options.quiet)
