"""
Reinforcement learning with verifiable rewards (GRPO), each phase computed in sharded microbatches.

Each step draws prompts, answers each several times, scores the answers, and trains the policy
towards those that beat the others to their prompt. Answers differ in length:
`policy.sequence_packing` or `policy.dynamic_batching` say how they become microbatches. Workers are
the ranks of torchrun, this process, or Ray actors (--ray-workers).
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import (
    add_config_arguments,
    add_logging_options,
    command_parser,
    parse_arguments,
    positive_number,
    run_command,
    run_program,
)
from packplan.app.rl.actors import build_in_actor
from packplan.app.wiring import stores
from packplan.core.errors import ConfigError

KEPT = (
    "the steps so far are in rl.jsonl; training.resume_from_checkpoint=last goes on from the newest checkpoint, if one "
    "was saved (grpo.save_every)"
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("rl", __doc__)
    add_config_arguments(parser, about="the run; see docs/rl.md")
    parser.add_argument(
        "--ray-workers", type=positive_number, default=0, metavar="N",
        help="start N Ray actors as workers (extra: rl), on the cluster of RAY_ADDRESS or on this machine",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what an earlier run left in training.output_dir"
    )
    add_logging_options(parser)
    options = parse_arguments(parser, arguments)

    def command() -> None:
        with ExitStack() as stack:
            with nullcontext() if options.ray_workers else stores.ranks_refuse_together():
                config = stores.read_config(options.config, options.overrides, rl=True)
                stores.require_inputs(config, loads=True)

                with loading_libraries():
                    from packplan.app.rl import checkpoints, loop
                    from packplan.app.wiring import training

                if options.quiet:
                    config = training.without_progress(config)
                attention = training.decide_attention(config, isolated=config.policy.sequence_packing.enabled)
                if options.overwrite and config.training.resume_from_checkpoint:
                    reason = "goes on with what --overwrite removes: choose one"
                    raise ConfigError.at("training.resume_from_checkpoint", reason)
                if checkpoints.is_first_rank():
                    stack.enter_context(stores.training_alone(Path(config.training.output_dir)))
                    if not config.training.resume_from_checkpoint:
                        stores.open_policy_folder(config).make_room(overwrite=options.overwrite)
                samples = training.open_samples(config)["train"]
                if samples.sees_images and config.grpo.engine_command:
                    raise ConfigError.at("grpo.engine_command", "answers text, but the model reads images: remove it")
            stack.enter_context(checkpoints.named_at_failure(config))
            workers = stack.enter_context(
                training.open_workers(
                    config,
                    samples,
                    attention,
                    ray_workers=options.ray_workers,
                    build_in_actor=partial(build_in_actor, options.config, options.overrides),
                )
            )
            loop.run(config, workers, samples)

    return run_command(command, verbose=options.verbose, quiet=options.quiet, kept=KEPT)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
