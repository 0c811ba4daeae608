"""
Write one page about a plan: coverage, drawn packs and their fill, each with its numbers as a table;
warnings and figures.

The page is one HTML file that loads nothing, for light and dark screens, phones, keyboards and
screen readers.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from packplan.adapters.progress import progress
from packplan.app.cli.command import add_config_arguments, world_size
from packplan.app.cli.forecasts import add_price
from packplan.app.plan.figures import epoch_lines, epoch_rows, figures
from packplan.app.plan.stored import PlanView, as_document, inspect_plan, splits_of
from packplan.app.wiring import stores
from packplan.app.wiring.commands import read_run
from packplan.core.errors import counted

log = logging.getLogger("packplan.app.plan.report")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="plan.html", help="what to write")
    parser.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that the run has)")
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", help="ranks (default: the most that were built for)"
    )
    add_price(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Open the plans, draw them, and write the page."""
    stores.page_target(options.output)  # before it takes seconds
    config = read_run(options.config, options.overrides, world_size=options.world_size)
    views = [
        inspect_plan(config, split, world_size=options.world_size, price=options.price)
        for split in splits_of(config, options.split)
    ]
    # Seconds to load, which no other look at a plan needs.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("page.html").render(
        title=options.config,
        folder=str(Path(config.training.output_dir)),
        splits=[_as_variables(one) for one in progress(views, desc="drawing", unit=" splits")],
    )
    stores.write_page(options.output, page)
    log.info("the page is in %s", options.output)


def _as_variables(view: PlanView) -> dict[str, Any]:
    """Return the template variables of a split."""
    from packplan.app.plan.charts import draw_packs, plot_fill

    plan, schedule, document = view.plan_summary, view.schedule_summary, as_document(view)
    return {
        "name": view.stored.name,
        "coverage": (
            f"{'Each epoch' if view.epochs is None else f'Epoch {view.epoch}'} sees "
            f"{plan.planned_samples:,} of {counted(plan.num_samples, 'sample')} "
            f"({plan.sample_coverage:.2%}) and "
            f"{plan.planned_tokens:,} of {counted(plan.num_tokens, 'token')} ({plan.token_coverage:.2%})."
        ),
        "warnings": view.warnings,
        "ranks": counted(schedule.world_size, "rank"),
        "cards": [
            ("of the tokens are trained", f"{plan.token_coverage:.2%}"),
            (f"{'packs' if view.stored.packed else 'samples'} in an epoch", f"{plan.num_packs:,}"),
            *([("of a pack is filled, in the mean", f"{plan.fill_mean:.1%}")] if plan.fill_mean is not None else []),
            ("steps in all", f"{schedule.total_steps:,}"),
        ],
        "figures": figures(view),
        "epochs": list(epoch_rows(view)),
        "of_epochs": list(epoch_lines(view)),
        "charts": [draw_packs(view), *([plot_fill(view)] if view.stored.packed else [])],
        "digests": [
            *document["checksums"].items(),
            *((f"fingerprint of the {name}", one["sha256"]) for name, one in document["fingerprints"].items()),
        ],
        "inputs": [(name, list(one["inputs"].items())) for name, one in document["fingerprints"].items()],
    }
