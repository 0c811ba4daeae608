"""
Write a plugin that trains planned packs inside an ms-swift command.

Run `packplan plugin swift -o plugin.py`, then
`swift sft ... --packing true --external_plugins plugin.py`: see docs/use-it-in/swift.md. Types of
`swift rlhf` other than dpo and kto use the plugin without `--packing`: they train ms-swift's own
batches, without computing padding. The arguments may end with an ms-swift command, as in
`packplan plugin swift -o plugin.py swift sft --model ...`. This command is then planned first, and
the plugin refuses every other plan.
"""

from pathlib import Path
from typing import Any

from packplan.app.cli.command import add_logging_options, command_parser, parse_ranks, run_command, run_program
from packplan.app.opening.commands import resolve_command, split_command
from packplan.app.opening.policies import policy_of_split
from packplan.app.opening.stores import find_stored_plan, write_new_file
from packplan.app.plan.build import add_left_out_option, build_command
from packplan.app.plan.stored import setting_differences
from packplan.app.planning.log_lines import row_checksum
from packplan.core.errors import ConfigError, CorruptArtefactError, Difference, NotBuiltError

_TEXT = '''"""Trains the packs of a plan inside ms-swift: swift sft ... --packing true --external_plugins {name}"""

from packplan.app.plugin import install

{plan}install({options})
'''


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("plugin", __doc__)
    parser.add_argument("tool", choices=["swift"], help="tool that trains: swift means ms-swift")
    parser.add_argument(
        "source", nargs="?", metavar="swift sft ...",
        help="an ms-swift command, at the end: the plugin then trains only the plan of this command",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="plugin.py", default=Path("plugin.py"),
        help="name of the file to write (default: plugin.py)",
    )  # fmt: skip
    parser.add_argument(
        "--any-version", action="store_true", help="let the plugin run with untested versions of the tool"
    )
    add_left_out_option(parser)
    parser.add_argument("--no-check", action="store_true", help="do not compare the first pack with its samples alone")
    parser.add_argument(
        "--sequence-parallel-size", choices=["auto"], metavar="auto",
        help="split each pack longer than --packing_length over as many ranks as it needs",
    )  # fmt: skip
    parser.add_argument(
        "--max-sequence-parallel-size", type=parse_ranks, metavar="N",
        help="most ranks that may share a pack, a power of two (default: the largest that divides their number)",
    )  # fmt: skip
    parser.add_argument("--world-size", type=parse_ranks, metavar="N", help="ranks (default: as in the command)")
    add_logging_options(parser)
    own, words = split_command(arguments, skip=1)
    options = parser.parse_intermixed_args(own)

    def command() -> None:
        output: Path = options.output
        given: dict[str, Any] = {}
        plan = ""
        most: int | None = options.max_sequence_parallel_size
        if most is not None and (not options.sequence_parallel_size or most & (most - 1)):
            reason = f"is {most}, but has to be a power of two, and needs --sequence-parallel-size auto"
            raise ConfigError.for_key("--max-sequence-parallel-size", reason)
        if options.sequence_parallel_size:
            given["degrees"] = most or options.sequence_parallel_size
        if options.source:
            config = resolve_command(
                [options.source, *words], world_size=options.world_size, degrees=given.get("degrees", 1)
            )
            train = build_command(config, most_left_out=options.allow_left_out)[0]
            plan = f"# Plan {row_checksum(train)[:12]}. The checksum also covers the length of each row.\n"
            given["checksum"] = row_checksum(train, with_lengths=True)
        if options.any_version:
            given["any_version"] = True
        if options.no_check:
            given["check"] = False
        if options.allow_left_out is not None:
            given["max_left_out"] = options.allow_left_out / 100
        called = ", ".join(f"{name}={value!r}" for name, value in given.items())
        write_new_file(output, _TEXT.format(name=output.name, plan=plan, options=called))
        print(f"{output}: add --packing true --external_plugins {output} to swift sft, pt, or rlhf (dpo, kto)")
        print("other types of swift rlhf use the plugin without --packing, and then compute no padding")

    return run_command(command, verbose=options.verbose, quiet=options.quiet, for_host=True)


def install(**options: Any) -> None:
    """
    Install the plugin in ms-swift, with functions that read stored lengths and plans; see
    `adapters.swift.install`.
    """
    from packplan.adapters import swift
    from packplan.app.opening.command_rows import take_stored_lengths

    swift.install(take_stored=take_stored_lengths, find_changes=find_changes, **options)


def find_changes(pipeline: Any) -> list[str]:
    """
    Return each argument of a pipeline of ms-swift that has changed since its plan was stored, with
    both values.
    """
    from packplan.adapters.swift.command import run_of_arguments

    arguments = pipeline.args
    config = run_of_arguments(arguments, arguments.global_world_size)
    try:
        plan, lengths = find_stored_plan(Path(arguments.packplan_output_dir), "train")
    except (NotBuiltError, CorruptArtefactError):  # stored elsewhere, or unreadable: the checksum's error says enough
        return []
    key = policy_of_split(config, "train").fingerprint(str(plan.key.inputs["lengths"]))
    found, data = [*plan.key.differences(key)], " and ".join(config.custom.train_jsonl)
    if lengths is not None:
        found = [*setting_differences(config, lengths), *found]
        then = " and ".join(one.file for one in lengths.origin.files)
        found = [Difference("custom.train_jsonl", then, data)] * (then != data) + found
    return [*map(str, found)]


if __name__ == "__main__":
    raise SystemExit(run_program(main))
