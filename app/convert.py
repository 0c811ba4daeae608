"""
Make a run of a command of ms-swift: `packplan convert train.sh`, or `... -- swift sft --model
...`.

Takes a command line, a shell script, a YAML or JSON for `swift sft`, or the args.json of an old run
(or the run's folder), executes nothing, and writes a run's YAML, with a line for each argument:
taken over, changed, not needed here, not supported and why, or refused.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import get_args

import attrs

from packplan.app.cli.command import add_logging_options, run_command, run_program
from packplan.app.wiring.conversion import Converted, convert_back, convert_source, run_faults, run_text, write_run
from packplan.core.conversion import DIFFERENT, Verdict
from packplan.core.errors import ConfigError, Fault


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="packplan convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
        metavar="run.yaml",
        help="what to write (default: run.yaml; swift.yaml with --back)",
    )
    parser.add_argument(
        "--back", action="store_true", help="the other way: make a YAML for swift sft, without packing, of a run's YAML"
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail, and write nothing, if something is changed or not supported"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    add_logging_options(parser)
    options = parser.parse_args(arguments)

    output = options.output or Path("swift.yaml" if options.back else "run.yaml")

    def command() -> None:
        if options.back:
            go_back(options.source, output, strict=options.strict)
            return
        converted = convert_source(options.source)
        faults = run_faults(converted) or (strict_faults(converted) if options.strict else ())
        if not faults:
            write_run(output, run_text(converted, output=str(output)))
        written = None if faults else output
        print(as_json(converted, written) if options.json else as_lines(converted, written))
        if faults:
            raise ConfigError(converted.source.name, faults)

    return run_command(command, verbose=options.verbose, quiet=options.quiet)


def go_back(source: list[str], output: Path, *, strict: bool) -> None:
    """
    Write the YAML of `swift sft` that trains a run's samples without packing, and print what
    differs.

    Args:
        source: The name of the run's YAML, alone.
        output: What to write.
        strict: Fail, and write nothing, if something of the run cannot be said to ms-swift.

    Raises:
        ConfigError: The run has faults, or trains what no file holds.
    """
    if len(source) > 1:
        raise ConfigError.of("--back", "takes one run's YAML")
    back, text = convert_back(Path(source[0]))
    missing = tuple(Fault(line.argument, line.reason) for line in back.lines if line.verdict in DIFFERENT)
    if strict and missing:
        raise ConfigError(source[0], missing)
    write_run(output, text)
    for line in back.lines:
        print(f"{line.verdict:<15}  {line.argument}  {line.reason}")
    print(f"start it with: swift sft {output}")


def strict_faults(converted: Converted) -> tuple[Fault, ...]:
    """Return what the run does otherwise than the command asks for."""
    return tuple(Fault(line.argument, line.reason) for line in converted.conversion.different)


def as_lines(converted: Converted, output: Path | None) -> str:
    """Return what became of each argument, for people; *output* is None where no run is written."""
    lines = converted.conversion.lines
    width = max(len(line.argument) for line in lines)
    listed = [f"{line.verdict:<15}  {line.argument:<{width}}  {line.reason}" for line in lines]
    counts = Counter(line.verdict for line in lines)
    always = ("taken over", "not needed here", "not supported")
    shown = [verdict for verdict in get_args(Verdict) if counts[verdict] or verdict in always]
    listed.append(f"{output or 'no run'}: {', '.join(f'{counts[verdict]} {verdict}' for verdict in shown)}")
    return "\n".join([*listed, *([] if output is None else [f"start it with: {converted.start} {output}"])])


def as_json(converted: Converted, output: Path | None) -> str:
    """Return the same for programs, as one document."""
    document = {
        "output": None if output is None else str(output),
        "start": None if output is None else f"{converted.start} {output}",
        "lines": [attrs.asdict(line) for line in converted.conversion.lines],
        "run": {name: dict(keys) for name, keys in converted.conversion.document.items()},
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
