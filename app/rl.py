"""
Reinforcement learning with verifiable rewards (GRPO), each phase computed in sharded microbatches.

Each step draws prompts, answers each several times, scores the answers, and trains the policy towards those that beat the others
to their prompt. Answers differ in length: `policy.sequence_packing` or `policy.dynamic_batching` say how they become
microbatches. Workers are the ranks of torchrun, this process, or Ray actors (--ray-workers).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from app.command import add_logging_options, positive_number, program, run_command

KEPT = (
    "the steps so far are in rl.jsonl, the policy where grpo.save_every wrote it; a run does not go on: start it anew"
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog=program("rl"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="run.yaml", help="the run; see docs/rl.md")
    parser.add_argument(
        "--ray-workers", type=positive_number, default=0, metavar="N",
        help="start N Ray actors as workers (extra: rl), on the cluster of RAY_ADDRESS or on this machine",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what an earlier run left in training.output_dir"
    )
    add_logging_options(parser)
    options = parser.parse_args(arguments)

    def command() -> None:
        from app import grpo, wiring
        from core.errors import ConfigError

        config = wiring.read_config(options.config, rl=True)
        if options.quiet:
            config = wiring.without_progress(config)
        grpo.require_runnable(config)
        if grpo.is_first_rank():
            grpo.make_room(Path(config.training.output_dir), overwrite=options.overwrite)
        samples = wiring.open_samples(config)["train"]
        if samples.sees_images:
            raise ConfigError.of("model.model", "reads images, but app.rl trains models of text: name one of these")
        with wiring.open_workers(config, options.config, samples, ray_workers=options.ray_workers) as workers:
            grpo.run(config, workers, samples)

    return run_command(command, verbose=options.verbose, quiet=options.quiet, kept=KEPT)


if __name__ == "__main__":
    raise SystemExit(main())
