"""
Plan a run before you pay for it: `build` measures and plans as training would.

The other commands use the stored lengths and plan. `time` trains some steps, on the run's own
hardware. All other commands need no GPU and load no weights. They also accept an ms-swift command
in place of a run's YAML: `packplan plan build swift sft --model ...`.
"""

import argparse

from packplan.app.cli.command import add_logging_options, command_parser, parse_arguments, run_command, run_program
from packplan.app.opening.commands import split_command
from packplan.app.plan import build, diff, fit, report, show, time, verify, whatif

COMMANDS = {
    "build": (build, "measure and plan"),
    "show": (show, "show the figures of the stored plan"),
    "whatif": (whatif, "show the same figures for other packing lengths and numbers of ranks"),
    "report": (report, "write a page about the stored plan, with plots"),
    "diff": (diff, "compare two plans: inputs, samples, packs and steps"),
    "time": (time, "predict how long training takes, from a few steps that are trained now"),
    "fit": (fit, "predict the memory of a step, and the longest packing length that fits"),
    "verify": (verify, "check that stored lengths and plan match the data, model and YAML"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("plan", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        add_logging_options(command)
        command.set_defaults(run=module.run, parser=command)
    own, words = split_command(arguments)
    options = parse_arguments(parser, own)
    options.overrides += words
    return run_command(lambda: options.run(options), verbose=options.verbose, quiet=options.quiet, for_host=bool(words))


if __name__ == "__main__":
    raise SystemExit(run_program(main))
