"""
Which families of models that see are counted, measured and packed: a tiny model of each, the whole
way through ms-swift's template of it.
"""

from __future__ import annotations

import json
import logging
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import yaml
from rich.console import Console
from rich.table import Table

from packplan.adapters.progress import progress
from packplan.core.errors import ConfigError, PackplanError

log = logging.getLogger(__name__)

HEADING = "## Models that see"

_ABOUT = """Tiny models with random weights, each with the processor of its family, went the whole way:
`packplan check --vision --output docs/models.md` wrote this section on {date}, with {versions}.
**Lengths** come from images' headers, or each sample with images is encoded in full. **Sizes**:
images, of so many sizes, and samples with none, two, three and four of them, whose measurements
were those of full encodes. **Packed**: samples with 0, 1 and 3 images in packs, whose positions, labels,
logits, losses and gradients were compared with each sample alone, and of which one at a time was
changed; **equality** is the largest relative difference of logits, losses and gradients."""

_ABOUT_OTHERS = """ms-swift declares that {declared} templates collate packed samples; these {number} of them are not
in the table above. Where a model brings its own code, a run of yours asks it (`model.trust_remote_code: true`): its
small copy first, then the model that is loaded, and `packplan check` compares them on your data. What the probe cannot
prove may not pack: it is refused before anything is measured, with the reason. InternVL's chat form is refused so: its
released code computes no row without pixels; its hf form (`internvl_hf`, first row) packs."""

_EXACT = ("positions", "labels", "isolation")
"""Checks in which only 0 passes."""


@attrs.frozen
class VisionRow:
    """How a family came out."""

    family: str
    template: str
    strategy: str
    headers: bool
    """Whether lengths come from images' headers."""

    lengths: str
    """What gives them, or why nothing does."""

    sizes: tuple[int, int]
    """Images of one size each whose measurements were right, and all."""

    packed: tuple[int, int]
    """Packs and samples that were compared."""

    equality: float
    failed: tuple[str, ...]
    """Checks that found a difference."""

    @property
    def passes(self) -> bool:
        """Whether every length was right, and every check passed."""
        return not self.failed and self.sizes[0] == self.sizes[1]


def list_vision(names: Sequence[str], *, as_json: bool, output: Path | None) -> None:
    """
    Ask families that see, and print how they came out.

    Args:
        names: Of the families; none means all.

        as_json: Print one document instead of a table.

        output: Markdown page whose section is written, too.
    """
    from packplan.app.demo.vision_models import VISION_FAMILIES
    from packplan.app.wiring import families, stores

    if unknown := sorted(set(names) - set(VISION_FAMILIES)):
        raise ConfigError.of("--vision", f"names {', '.join(unknown)}: tiny models are of {', '.join(VISION_FAMILIES)}")
    asked = [name for name in names or VISION_FAMILIES if not _lacks(name, VISION_FAMILIES[name].needs)]
    with tempfile.TemporaryDirectory() as folder:
        rows = list(progress(_rows(asked, Path(folder)), desc="asking", unit=" families"))
    versions = families.versions(swift=True)
    if output is not None:
        before = output.read_text(encoding="utf-8") if output.exists() else ""
        stores.write_text(output, with_section(before, section(rows, versions, date=f"{datetime.now(UTC):%Y-%m-%d}")))
    if as_json:
        print(json.dumps({"versions": versions, "families": [_as_dict(row) for row in rows]}, indent=2))
    else:
        _show(rows)


def _lacks(name: str, needs: tuple[str, str] | None) -> bool:
    """Return whether a package is missing that a family needs, and say so."""
    if needs is None or find_spec(needs[0]) is not None:
        return False
    log.warning("%s is left out: it needs %s: pip install 'packplan[%s]'", name, *needs)
    return True


def _rows(names: Sequence[str], folder: Path) -> Iterator[VisionRow]:
    from packplan.app.demo.vision_data import texts, write_scenes, write_sizes
    from packplan.app.demo.vision_models import VISION_FAMILIES, write_vision_model

    scenes, sizes = write_scenes(folder / "scenes", count=16), write_sizes(folder / "sizes")
    for name in names:
        write_vision_model(folder / name, name, texts(scenes), seed=0)
        model_type, template = VISION_FAMILIES[name].swift
        sections = {
            "model": {"model": str(folder / name), "model_type": model_type},
            "template": {"template": template, "max_length": 768},
            "training": {
                "output_dir": str(folder / f"run-{name}"),
                "report_to": [],
                "dataloader_num_workers": 0,
                "packing_drop_last": False,
            },
        }
        yield _row(name, template, sections, scenes, sizes)


def _row(name: str, template: str, sections: dict[str, Any], scenes: Path, sizes: Path) -> VisionRow:
    """
    Return how a family came out.

    Args:
        name: Of the family.

        template: Of ms-swift.

        sections: Of a run's YAML, but for the data.

        scenes: File of records with no, one and three images.

        sizes: File of records of images of many sizes.
    """
    from packplan.app.check import check
    from packplan.app.wiring import stores, training

    def config(data: Path) -> Any:
        path = data.with_name(f"{name}.yaml")
        path.write_text(yaml.safe_dump({**sections, "custom": {"train_jsonl": str(data)}}), encoding="utf-8")
        return stores.read_config(path)

    measured = config(sizes)
    samples = training.open_measurer(measured, training.open_samples(measured)["train"])
    quick, in_full = (list(samples.measure_many(range(len(samples)), in_full=full)) for full in (False, True))
    right = [one == other and not isinstance(one, PackplanError) for one, other in zip(quick, in_full, strict=True)]
    run = config(scenes)
    report = check(run, num_packs=4)
    compared = [verdict for verdict in report.verdicts if verdict.check not in (*_EXACT, "probe")]
    return VisionRow(
        family=name,
        template=template,
        strategy=str(training.verdict_of(run).strategy),
        headers=samples.image_lengths[0] is not None,
        lengths=samples.image_lengths[1],
        sizes=(sum(right), len(right)),
        packed=(len(report.packs), sum(number for _, _, number in report.packs)),
        equality=max(verdict.worst.value for verdict in compared),
        failed=tuple(verdict.check for verdict in report.verdicts if not verdict.passed),
    )


def _as_dict(row: VisionRow) -> dict[str, Any]:
    return {**attrs.asdict(row), "passes": row.passes}


def section(rows: Sequence[VisionRow], versions: Mapping[str, str], *, date: str) -> str:
    """
    Return the section of the page of models.

    Args:
        rows: Of all families.

        versions: Of the packages that they hold for.

        date: When they were asked.
    """
    about = _ABOUT.format(date=date, versions=", ".join(f"{name} {number}" for name, number in versions.items()))
    head = "| model | template | strategy | lengths | sizes | packed | equality | remark |\n"
    rule = "|---|---|---|---|---:|---|---:|---|\n"
    shown = head + rule + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)
    others = _others(rows)
    about_others = _ABOUT_OTHERS.format(declared=len(set(others) | {row.template for row in rows}), number=len(others))
    listed = "".join(f"| {template} | {why_not} |\n" for template, why_not in others.items())
    return (
        f"{HEADING}\n\n{_wrapped(about)}\n\n{shown}\n{_wrapped(about_others)}\n\n"
        f"| template | why it is not shown |\n|---|---|\n{listed}"
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100)


def _others(rows: Sequence[VisionRow]) -> dict[str, str]:
    """Return the other templates that ms-swift declares to pack, and why each has no row."""
    from packplan.app.demo.vision_models import NOT_BUILT
    from packplan.app.wiring import families

    names = set(families.templates_that_pack()) - {row.template for row in rows}
    return {name: NOT_BUILT.get(name, "not asked, or a package that it needs was missing") for name in sorted(names)}


def with_section(page: str, text: str) -> str:
    """Return a page whose last section, if it is the one of models that see, is another one."""
    return f"{page.partition(HEADING)[0].rstrip()}\n\n{text}".lstrip()


def section_of(page: str) -> str:
    """Return the section of models that see of a page; empty if it has none."""
    _, heading, text = page.partition(HEADING)
    return f"\n{heading}{text}" if heading else ""


def _cells(row: VisionRow) -> tuple[str, ...]:
    return (
        row.family,
        row.template,
        row.strategy,
        "headers" if row.headers else "full",
        f"{row.sizes[0]} of {row.sizes[1]}",
        f"{row.packed[1]} in {row.packed[0]}",
        f"{row.equality:.1e}",
        f"differs: {', '.join(row.failed)}" if row.failed else row.lengths,
    )


def _show(rows: Sequence[VisionRow]) -> None:
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    table = Table()
    for name in ("model", "template", "strategy", "lengths", "sizes", "packed", "equality", "remark"):
        table.add_column(name, justify="right" if name in {"sizes", "equality"} else "left", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row), style="" if row.passes else "bold red")
    console.print(table)
    console.print(f"{sum(row.passes for row in rows):,} of {len(rows):,} pass")
