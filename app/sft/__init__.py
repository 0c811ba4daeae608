"""
Fine-tune a model on the packs of a plan, or of a stream: `packplan sft run.yaml`.

Under torchrun, rank 0 measures and plans while the other ranks wait. Then all ranks train.
"""

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import (
    add_config_arguments,
    add_logging_options,
    command_parser,
    parse_arguments,
    run_command,
)
from packplan.app.opening.runs import raising_on_all_ranks, read_config, require_inputs


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("sft", __doc__)
    add_config_arguments(parser)
    add_logging_options(parser)
    options = parse_arguments(parser, arguments)

    def command() -> bool:
        with raising_on_all_ranks():
            config = read_config(options.config, options.overrides)
            require_inputs(config, loads=True)

            with loading_libraries():
                from packplan.app.opening.ranks import join_ranks
                from packplan.app.opening.trainers import hide_trainer_progress
                from packplan.app.sft.stream import prepare_stream, train_stream
                from packplan.app.sft.train import train

            if options.quiet:
                config = hide_trainer_progress(config)
        with join_ranks(config) as group:
            if config.custom.trainer_variant == "rollout":
                train_stream(config, trainer := prepare_stream(config, group))
                return trainer.was_terminated
            return train(config, group)[0].was_terminated

    return run_command(command, verbose=options.verbose, quiet=options.quiet)
