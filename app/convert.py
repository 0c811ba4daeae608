"""
Make a run of a command of ms-swift: `packplan convert train.sh`, or `... -- swift sft --model
...`.

Takes a command line, a shell script, a YAML or JSON for `swift sft`, or the args.json of an old run
(or the run's folder), executes nothing, and writes a run's YAML, with a line for each argument:
taken over, changed, not needed here, not supported and why, or refused.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import get_args

import attrs

from packplan.app.cli.command import add_logging_options, command_parser, run_command, run_program
from packplan.app.wiring.conversion import Converted, convert_source, run_faults, run_text
from packplan.app.wiring.stores import write_new
from packplan.core.conversion import Verdict
from packplan.core.errors import ConfigError, Fault


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("convert", __doc__)
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a script, a YAML, an args.json or a run's folder; or a command, after --",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="run.yaml",
        default=Path("run.yaml"),
        help="name of the YAML to write (default: run.yaml)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail, and write nothing, if something is changed or not supported"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    add_logging_options(parser)
    options = parser.parse_args(arguments)

    output: Path = options.output

    def command() -> None:
        converted = convert_source(options.source)
        faults = run_faults(converted)
        if options.strict and not faults:
            faults = tuple(Fault(line.argument, line.reason) for line in converted.conversion.different)
        if not faults:
            write_new(output, run_text(converted, output=str(output)))
        written = None if faults else output
        print(as_json(converted, written) if options.json else as_lines(converted, written))
        if faults:
            raise ConfigError(converted.source.name, faults)

    return run_command(command, verbose=options.verbose, quiet=options.quiet)


def as_lines(converted: Converted, output: Path | None) -> str:
    """Return a line for each argument, for people; *output* is None where no run is written."""
    lines = converted.conversion.lines
    width = max(len(line.argument) for line in lines)
    listed = [f"{line.verdict:<15}  {line.argument:<{width}}  {line.reason}" for line in lines]
    counts = Counter(line.verdict for line in lines)
    always = ("taken over", "not needed here", "not supported")
    shown = [verdict for verdict in get_args(Verdict) if counts[verdict] or verdict in always]
    listed.append(f"{output or 'no run'}: {', '.join(f'{counts[verdict]} {verdict}' for verdict in shown)}")
    return "\n".join([*listed, *([] if output is None else [f"start it with: {converted.start} {output}"])])


def as_json(converted: Converted, output: Path | None) -> str:
    """Return the conversion for programs, as one document."""
    document = {
        "output": None if output is None else str(output),
        "start": None if output is None else f"{converted.start} {output}",
        "lines": [attrs.asdict(line) for line in converted.conversion.lines],
        "run": {name: dict(keys) for name, keys in converted.conversion.document.items()},
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
