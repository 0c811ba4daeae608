"""
Write the page of models: `python -m tools.models families docs/models.md`.

`families` asks a small model of each family that transformers knows whether it may pack. `vision`
takes tiny models that see through the whole way, from measuring to comparing packs, and writes the
page's last section. Each leaves the other's part of the page as it is. Without a page, the rows are
printed.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import yaml

from packplan.adapters.progress import progress
from packplan.app.cli.command import run_command, run_program
from packplan.core.equality import STRATEGIES, PackingVerdict
from packplan.core.errors import PackplanError

log = logging.getLogger("packplan.app.tools")

HEADING = "## Models that see"

ABOUT = """Each family that transformers knows was probed on a small model of its default configuration.
`python -m tools.models families docs/models.md` wrote this page on {date}, with {versions}. {passing} of {all} pass.
A run probes its own model in the same way before it measures anything. Other configurations of a family may give
another verdict."""

TERMS = """**Isolation** is the largest gradient of a sample's logits with respect to another sample, over the largest
with respect to itself; only 0 passes. **Equality** is the largest relative difference of logits, losses and gradients
between a sample in a row and the same sample alone, under transformers' own attention; 2e-05 passes. Of media, only
images are probed."""

ABOUT_VISION = """Tiny models with random weights, each with the processor of its family, were measured, packed and
compared. `python -m tools.models vision docs/models.md` wrote this section on {date}, with {versions}. **Lengths** come
from image headers, or from a full encode of each sample with images. **Sizes** counts the samples whose measurement is
that of a full encode: one image of each of many sizes, and samples with no image, two, three and four. **Packed**
counts samples with 0, 1 and 3 images, and their packs. Their positions, labels, logits, losses and gradients were
compared with each sample alone, and one sample at a time was changed. **Equality** is the largest relative difference
of logits, losses and gradients."""

ABOUT_OTHERS = """ms-swift declares that {declared} templates collate packed samples. {number} of them are not in the
table above. A run of yours probes a model that brings its own code (`model.trust_remote_code: true`): first a small
copy, then the loaded model. `packplan check` compares packs on your data. A model that the probe cannot pass is
refused with the reason, before anything is measured. InternVL's chat form is refused, since its released code computes
no row without pixels. Its hf form (`internvl_hf`, first row) packs."""

HEAD = ("family", "strategy", "isolation", "equality", "remark")

VISION_HEAD = ("model", "template", "strategy", "lengths", "sizes", "packed", "equality", "remark")

RIGHT = {"isolation", "equality", "sizes"}
"""Columns that are aligned to the right."""

EXACT = ("positions", "labels", "isolation")
"""Checks in which only 0 passes."""

NO_TEXT = "its model gives embeddings or scores, and writes no text"

OWN_CODE = "its model brings its own code, which transformers does not have"

NOT_BUILT = {
    "clef": NO_TEXT,
    "deepseek_v41": OWN_CODE,
    "glm5_next": "its configuration takes no sizes of a tiny model, as its row above says",
    "interns1": f"{OWN_CODE}; ms-swift asks for transformers below 4.56",
    "internvl": OWN_CODE,
    "internvl2": OWN_CODE,
    "internvl2_5": f"{OWN_CODE}; its lengths alone are tested, as full encodes give them",
    "internvl2_phi3": OWN_CODE,
    "internvl3_5": OWN_CODE,
    "internvl3_5_gpt": OWN_CODE,
    "internvl_phi3": OWN_CODE,
    "jev": NO_TEXT,
    "jina_reranker_m0": NO_TEXT,
    "kimi_k25": f"{OWN_CODE}; ms-swift asks for transformers below 5",
    "kimi_k3": OWN_CODE,
    "kimi_vl": f"{OWN_CODE}; ms-swift asks for transformers below 4.49",
    "llava_onevision1_5": OWN_CODE,
    "llava_onevision2": OWN_CODE,
    "omnijev": NO_TEXT,
    "ovis2_5": f"{OWN_CODE}; ms-swift asks for moviepy below 2",
    "qwen2_gme": NO_TEXT,
    "qwen3_5_emb": NO_TEXT,
    "qwen3_asr": "its model hears, and sees nothing; ms-swift asks for transformers 4.57.6",
    "qwen3_omni": "refused by name: no tiny model of its kind has been trained whole",
    "qwen3_vl_emb": NO_TEXT,
    "qwen3_vl_reranker": NO_TEXT,
    "wemm_embedding": NO_TEXT,
}
"""Template that declares packing -> why no tiny model of it is built."""


@attrs.frozen
class VisionRow:
    """Result of one family that sees."""

    family: str
    template: str
    strategy: str
    headers: bool
    """Whether lengths come from images' headers."""

    lengths: str
    """Source of the lengths, or why headers do not give them."""

    sizes: tuple[int, int]
    """Samples whose measurements were right, and all of them."""

    packed: tuple[int, int]
    """Packs and samples that were compared."""

    equality: float
    failed: tuple[str, ...]
    """Checks that found a difference."""

    @property
    def passes(self) -> bool:
        """Whether every length was right, and every check passed."""
        return not self.failed and self.sizes[0] == self.sizes[1]


def versions(*packages: str) -> str:
    """Return names and versions of the packages that verdicts hold for."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", *packages))


def templates_that_pack() -> list[str]:
    """Return the templates of models that see, of which ms-swift says that they pack."""
    from swift.template import TEMPLATE_MAPPING

    return [name for name, meta in TEMPLATE_MAPPING.items() if meta.template_cls.support_padding_free]


def families_page(verdicts: Sequence[PackingVerdict], *, date: str) -> str:
    """Return the page of verdicts, without the section of models that see."""
    passing = sum(one.passes for one in verdicts)
    about = ABOUT.format(date=date, versions=versions(), passing=passing, all=len(verdicts))
    strategies = "\n".join(f"- `{name}`: {meaning}" for name, meaning in STRATEGIES.items())
    rows = table(HEAD, map(family_cells, verdicts))
    return "\n\n".join(["# Which models pack", _wrapped(about), _wrapped(TERMS), strategies, rows])


def vision_section(rows: Sequence[VisionRow], *, date: str) -> str:
    """Return the section of models that see."""
    others = set(templates_that_pack()) - {row.template for row in rows}
    why = {name: NOT_BUILT.get(name, "not asked, or a package that it needs was missing") for name in sorted(others)}
    about = ABOUT_VISION.format(date=date, versions=versions("ms-swift"))
    about_others = ABOUT_OTHERS.format(declared=len(others | {row.template for row in rows}), number=len(others))
    shown = table(VISION_HEAD, [vision_cells(row) for row in rows])
    not_shown = table(("template", "why it is not shown"), list(why.items()))
    return f"{HEADING}\n\n{_wrapped(about)}\n\n{shown}\n{_wrapped(about_others)}\n\n{not_shown}"


def family_cells(verdict: PackingVerdict) -> tuple[str, ...]:
    """Return the cells of a family's row."""
    by_sample = " and ".join(f"`{name}`" for name in verdict.split) + " by sample" if verdict.split else ""
    reason = verdict.reason.replace("|", "/").replace("<", "").replace(">", "")[:160]
    numbers = ("", "") if verdict.measured is None else (f"{verdict.isolation:.2g}", f"{verdict.equality:.1e}")
    return (verdict.model_type, verdict.strategy or "none", *numbers, by_sample if verdict.passes else reason)


def vision_cells(row: VisionRow) -> tuple[str, ...]:
    """Return the cells of a row of a family that sees."""
    sizes, packed = f"{row.sizes[0]} of {row.sizes[1]}", f"{row.packed[1]} in {row.packed[0]}"
    remark = f"differs: {', '.join(row.failed)}" if row.failed else row.lengths
    lengths = "headers" if row.headers else "full"
    return (row.family, row.template, row.strategy, lengths, sizes, packed, f"{row.equality:.1e}", remark)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = "|".join("---:" if name in RIGHT else "---" for name in head)
    lines = [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "".join(f"{line}\n" for line in lines)


def with_families(page: str, text: str) -> str:
    """Return a page with another table of families; its section of models that see stays."""
    _, heading, section = page.partition(HEADING)
    return f"{text}\n{heading}{section}" if heading else text


def with_section(page: str, section: str) -> str:
    """Return a page with another section of models that see."""
    return f"{page.partition(HEADING)[0].rstrip()}\n\n{section}".lstrip()


def ask_families(names: Sequence[str]) -> list[PackingVerdict]:
    """Return the verdicts on families, on all if none is named."""
    from packplan.adapters.probe.families import family_names, probe_family

    return [probe_family(name) for name in progress(_chosen(names, family_names()), desc="asking", unit=" families")]


def ask_vision(names: Sequence[str]) -> list[VisionRow]:
    """Return the results of families that see, of all if none is named."""
    from tests.made.pictures import write_scenes, write_sizes
    from tests.made.vision_models import VISION_FAMILIES

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenes, sizes = write_scenes(folder / "scenes", count=16), write_sizes(folder / "sizes")
        chosen = [
            name for name in _chosen(names, list(VISION_FAMILIES)) if not _lacks(name, VISION_FAMILIES[name].needs)
        ]
        return [_vision_row(folder, name, scenes, sizes) for name in progress(chosen, desc="asking", unit=" families")]


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100)


def _chosen(names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    if unknown := sorted(set(names) - set(known)):
        message = f"{', '.join(unknown)}: no such family; there are {', '.join(known)}"
        raise PackplanError(message)
    return names or known


def _lacks(name: str, needs: tuple[str, str] | None) -> bool:
    if needs is None or find_spec(needs[0]) is not None:
        return False
    log.warning("%s is left out: it needs %s: pip install 'packplan[%s]'", name, *needs)
    return True


def _vision_row(folder: Path, name: str, scenes: Path, sizes: Path) -> VisionRow:
    from packplan.app.check import check
    from packplan.app.wiring import stores, training
    from tests.made.pictures import texts
    from tests.made.vision_models import VISION_FAMILIES, write_vision_model

    write_vision_model(folder / name, name, texts(scenes), seed=0)
    model_type, template = VISION_FAMILIES[name].swift
    output = {"output_dir": str(folder / f"run-{name}"), "report_to": [], "dataloader_num_workers": 0}
    sections: Mapping[str, Mapping[str, Any]] = {
        "model": {"model": str(folder / name), "model_type": model_type},
        "template": {"template": template, "max_length": 768},
        "training": {**output, "packing_drop_last": False},
    }

    def config(data: Path) -> Any:
        path = data.with_name(f"{name}.yaml")
        path.write_text(yaml.safe_dump({**sections, "custom": {"train_jsonl": str(data)}}), encoding="utf-8")
        return stores.read_config(path)

    measured, run = config(sizes), config(scenes)
    samples = training.open_measurer(measured, training.open_samples(measured)["train"])
    quick, in_full = (list(samples.measure_many(range(len(samples)), in_full=full)) for full in (False, True))
    right = [one == other and not isinstance(one, PackplanError) for one, other in zip(quick, in_full, strict=True)]
    report = check(run, num_packs=4)
    compared = [verdict for verdict in report.verdicts if verdict.check not in (*EXACT, "sensitivity")]
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


def main(arguments: list[str] | None = None) -> int:
    """Ask, then write the page or print rows; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("families", "vision"), help="part of the page")
    parser.add_argument("page", type=Path, nargs="?", help="Markdown page whose part is written; none prints the rows")
    parser.add_argument("--names", nargs="+", default=(), metavar="NAME", help="families to ask (default: all)")
    options = parser.parse_args(arguments)

    def command() -> None:
        before = options.page.read_text(encoding="utf-8") if options.page and options.page.exists() else ""
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        if options.part == "families":
            verdicts = ask_families(options.names)
            text, rows = (
                with_families(before, families_page(verdicts, date=date)),
                table(HEAD, map(family_cells, verdicts)),
            )
        else:
            found = ask_vision(options.names)
            text = with_section(before, vision_section(found, date=date))
            rows = table(VISION_HEAD, map(vision_cells, found))
        if options.page:
            options.page.write_text(text, encoding="utf-8")
        else:
            print(rows, end="")

    return run_command(command, verbose=False, kept="nothing is kept")


if __name__ == "__main__":
    raise SystemExit(run_program(main))
