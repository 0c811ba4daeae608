"""
Make a run of a command of ms-swift: `python -m app.convert train.sh`, or `... -- swift sft --model
...`.

Takes a command line, a shell script, a YAML or JSON for `swift sft`, or the args.json of an old run
(or the run's folder), executes nothing, and writes a run's YAML, with a line for each argument:
taken over, not needed here, or not supported and why.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import attrs

from app.cli.command import add_logging_options, program, run_command, run_program
from app.wiring.conversion import Converted, convert_source, require_run, run_text, write_run
from core.errors import ConfigError, Fault


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog=program("convert"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        default=Path("run.yaml"),
        metavar="run.yaml",
        help="what to write (default: run.yaml)",
    )
    parser.add_argument("--strict", action="store_true", help="fail, and write nothing, if something is not supported")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    add_logging_options(parser)
    options = parser.parse_args(arguments)

    def command() -> None:
        converted = convert_source(options.source)
        if options.strict:
            require_all(converted)
        require_run(converted)
        write_run(options.output, run_text(converted, output=str(options.output)))
        print(as_json(converted, options.output) if options.json else as_lines(converted, options.output))

    return run_command(command, verbose=options.verbose, quiet=options.quiet)


def require_all(converted: Converted) -> None:
    """
    Refuse a run that does not do all that the command asks for; ConfigError with what it lacks.
    """
    if missing := converted.conversion.unsupported:
        raise ConfigError(converted.source.name, tuple(Fault(line.argument, line.reason) for line in missing))


def as_lines(converted: Converted, output: Path) -> str:
    """Return what became of each argument, for people."""
    lines = converted.conversion.lines
    width = max(len(line.argument) for line in lines)
    listed = [f"{line.verdict:<15}  {line.argument:<{width}}  {line.reason}" for line in lines]
    counts = Counter(line.verdict for line in lines)
    summed = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("taken over", "not needed here", "not supported"))
    return "\n".join([*listed, f"{output}: {summed}", f"start it with: {converted.start} {output}"])


def as_json(converted: Converted, output: Path) -> str:
    """Return the same for programs, as one document."""
    document = {
        "output": str(output),
        "start": f"{converted.start} {output}",
        "lines": [attrs.asdict(line) for line in converted.conversion.lines],
        "run": {name: dict(keys) for name, keys in converted.conversion.document.items()},
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
