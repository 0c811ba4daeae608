"""
Reinforcement learning on the model's own answers (GRPO), by TRL's `GRPOTrainer`.

Answers differ in length. `policy.sequence_packing` or `policy.dynamic_batching` decides how answers
are divided into microbatches. Keys of `grpo.` set everything else in TRL, such as resuming,
adapters, FSDP or vLLM.
"""

import sys
from pathlib import Path

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import (
    add_config_arguments,
    add_logging_options,
    command_parser,
    parse_arguments,
    run_command,
    run_program,
)
from packplan.app.opening.runs import raising_on_all_ranks, read_rl_config, require_inputs


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("rl", __doc__)
    add_config_arguments(parser, about="YAML of the run; see docs/rl.md")
    add_logging_options(parser)
    options = parse_arguments(parser, arguments)

    def command() -> bool:
        with raising_on_all_ranks():
            config = read_rl_config(options.config, options.overrides)
            sys.path.append(str(Path(options.config).resolve().parent))  # reward functions may stand there
            require_inputs(config, loads=True)
            with loading_libraries():
                from packplan.app.opening import grpo
                from packplan.app.opening.ranks import hold_output_lock, open_rank_group
        with open_rank_group(config.grpo) as group, hold_output_lock(config, group, key="grpo.output_dir"):
            return bool(grpo.train(config, group, quiet=options.quiet).was_terminated)

    return run_command(command, verbose=options.verbose, quiet=options.quiet)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
