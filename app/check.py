"""
Compare packed training with unpacked training on your own model and data:
`packplan check run.yaml`.

The command compares packs of the run's plan with each of their samples alone. It uses the run's
model, template and attention backend. Positions, labels, logits, losses and gradients have to be
equal, and no gradient may pass between samples. The exit status is 0 if all checks pass, and 3 if a
check fails.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING

import attrs
from rich.table import Table

from packplan.adapters.model_folder import config_model_type
from packplan.adapters.progress import loading_libraries, progress
from packplan.app.cli.command import (
    add_config_arguments,
    add_logging_options,
    command_parser,
    parse_arguments,
    parse_positive,
    plain_console,
    run_command,
    run_program,
)
from packplan.app.opening.runs import read_config, require_inputs
from packplan.core.config.run import RunConfig
from packplan.core.equality import CHECKS, Deviation, Verdict, judge, pack_kind, packs_to_compare
from packplan.core.errors import ConfigError, MismatchError, counted
from packplan.core.samples.tables import num_media

if TYPE_CHECKING:
    from packplan.adapters.trainer.trainer import PlanTrainer
    from packplan.app.planning.split import PlannedSplit

log = logging.getLogger("packplan.app.check")


@attrs.frozen
class Report:
    """Results of comparing packs with each of their samples alone."""

    model: str
    model_type: str
    attn_impl: str
    precision: str
    packs: tuple[tuple[int, str, int], ...]
    """Pack index, kind (such as text) and number of samples of each compared pack."""

    verdicts: tuple[Verdict, ...]
    records: tuple[str, ...]
    """File and line of each verdict's worst sample; empty if the verdict is about a whole pack."""

    not_compared: Mapping[str, str]
    """Name of each check that was left out -> the reason."""

    @property
    def passed(self) -> bool:
        """Whether every check is within its limit."""
        return not self.failures

    @property
    def failures(self) -> list[Verdict]:
        """Verdicts that exceed their limits."""
        return [verdict for verdict in self.verdicts if not verdict.passed]


def check(config: RunConfig, *, num_packs: int) -> Report:
    """
    Compare packs of a run's plan with each of their samples alone.

    Args:
        config: The run.
        num_packs: Maximum number of packs to compare.

    Raises:
        PackplanError: The run has a fault, no pack has several samples, or a stored file is
            damaged.
    """
    from packplan.app.opening.ranks import join_ranks
    from packplan.app.sft.train import prepare

    if not config.training.packing:
        raise ConfigError.for_key("training.packing", "is false: nothing is packed, so there is nothing to compare")
    with join_ranks(config) as group:
        # Here one rank compares whole rows. Ranks that share rows are probed before their first
        # step.
        training = attrs.evolve(config.training, resume_from_checkpoint=None, sequence_parallel_size=1)
        trainer, splits = prepare(attrs.evolve(config, training=training), group, may_leak=True)
        return compare_packs(config, trainer, splits["train"], num_packs=num_packs)


def compare_packs(config: RunConfig, trainer: PlanTrainer, train: PlannedSplit, *, num_packs: int) -> Report:
    """
    Compare packs with their samples alone, with a trainer that is already prepared; see `check`.

    Args:
        config: The run.
        trainer: Trainer of the run, ready to train.
        train: The planned split `train` of the run.
        num_packs: Maximum number of packs to compare.
    """
    from packplan.adapters.trainer.equality import PackComparison

    chosen = packs_to_compare(train.raw.packs, train.table, count=num_packs)
    if not chosen:
        reason = "leaves no pack of several samples, so there is nothing to compare: raise it"
        raise ConfigError.for_key("template.max_length", reason)
    comparison = PackComparison(trainer, train.encoder.encode)
    findings: list[Deviation] = []
    for pack in progress(chosen, desc="comparing", unit=" packs"):
        findings += comparison.deviations(pack)
    precision, without = trainer.precision, comparison.no_gradients_reason
    verdicts = judge(findings, precision=precision, limit=comparison.limit)
    images, where = num_media(train.table), train.encoder.records.location
    return Report(
        model=config.model.model, model_type=config_model_type(config.model), attn_impl=trainer.attention.name,
        precision=precision, verdicts=verdicts,
        packs=tuple(
            (pack, pack_kind(images[train.raw.packs[pack]].tolist()), len(train.raw.packs[pack])) for pack in chosen
        ),
        records=tuple("" if (one := verdict.worst.sample) is None else str(where(one)) for verdict in verdicts),
        not_compared=dict.fromkeys(("step loss", "gradients", "isolation"), without) if without else {},
    )  # fmt: skip


def print_report(report: Report) -> None:
    """Print a report as a table."""
    kinds = Counter(kind for _, kind, _ in report.packs)
    console = plain_console(140)
    console.print(
        f"{report.model} ({report.model_type}), {report.attn_impl}, {report.precision}: "
        f"{counted(len(report.packs), 'pack')} of {counted(sum(number for _, _, number in report.packs), 'sample')} "
        f"({', '.join(f'{number} {kind}' for kind, number in kinds.items())})"
    )
    table = Table()
    for name in ("check", "worst", "limit", "", "where"):
        table.add_column(name, justify="right" if name in {"worst", "limit"} else "left", overflow="fold")
    for verdict, record in zip(report.verdicts, report.records, strict=True):
        worst = verdict.worst
        places = [f"pack {worst.pack}", "" if worst.sample is None else f"sample {worst.sample}", record, worst.detail]
        where = ", ".join(filter(None, places)) if worst.value else "everywhere"
        word, style = ("equal", "") if verdict.passed else ("DIFFERS", "bold red")
        table.add_row(verdict.check, f"{worst.value:.3g}", f"<= {verdict.limit:.3g}", word, where, style=style)
    console.print(table, soft_wrap=False)
    for name, why in report.not_compared.items():
        console.print(f"{name}: not compared, since {why}")
    for verdict in report.failures:
        console.print(f"{verdict.check}: {CHECKS[verdict.check]}")


def as_json(report: Report) -> str:
    """Return a report as a JSON document."""
    checks = [
        {
            "check": verdict.check,
            "meaning": CHECKS[verdict.check],
            "passed": verdict.passed,
            "worst": verdict.worst.value if isfinite(verdict.worst.value) else None,
            "limit": verdict.limit,
            "pack": verdict.worst.pack,
            "sample": verdict.worst.sample,
            "record": record or None,
            "detail": verdict.worst.detail or None,
        }
        for verdict, record in zip(report.verdicts, report.records, strict=True)
    ]
    fields = attrs.asdict(report, filter=lambda field, _: field.name not in {"packs", "verdicts", "records"})
    packs = [{"pack": pack, "kind": kind, "samples": samples} for pack, kind, samples in report.packs]
    return json.dumps({"passed": report.passed, **fields, "packs": packs, "checks": checks}, indent=2)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("check", __doc__)
    add_config_arguments(parser)
    parser.add_argument(
        "--packs", type=parse_positive, default=4, metavar="N", help="packs to compare, at most (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    add_logging_options(parser)
    options = parse_arguments(parser, arguments)

    def command() -> None:
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            reason = f"is {ranks[:40]!r}, but packplan check compares on one process: start it without torchrun"
            raise ConfigError.for_key("WORLD_SIZE", reason)
        config = read_config(options.config, options.overrides)
        require_inputs(config, loads=True)

        with loading_libraries():
            from packplan.app.opening.trainers import hide_trainer_progress

        if options.quiet:
            config = hide_trainer_progress(config)
        report = check(config, num_packs=options.packs)
        if options.json:
            print(as_json(report))
        else:
            print_report(report)
        if checks := tuple(verdict.check for verdict in report.failures):
            fact = f"packed and unpacked training differ in {', '.join(checks)}"
            raise MismatchError("unequal", fact, {"checks": checks})

    return run_command(command, verbose=options.verbose, quiet=options.quiet)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
