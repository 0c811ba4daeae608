"""
Write the page of models: `python -m tools.models families docs/models.md`.

`families` probes a small model of each family in transformers. `unpadded` finds out which padding
`packplan.hf.unpad` leaves out for each family. `vision` measures, packs and compares tiny vision
models. Each of these parts replaces its own section of the page. Without a page, the results are
printed.
"""

import argparse
import json
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
from packplan.core.equality import EQUALITY_LIMITS, PackingVerdict
from packplan.core.errors import PackplanError

log = logging.getLogger("packplan.app.tools")

HEADING = "## Vision-language models"

ABOUT = """Each run probes its own model before it measures lengths. So a model may pass even if its family is not
listed. To test a model, run `packplan probe MODEL`."""

MEASURED = """The tables show results for a small model of each family in transformers, with the family's default
configuration: {passing} of {all} pass. `python -m tools.models families docs/models.md` wrote this page on {date},
with {versions}. The probe covers text and images, but not sound and videos."""

TERMS = (
    """- **Isolation** is the largest gradient of a sample's logits with respect to another sample, divided by
the largest gradient with respect to the sample itself. Isolation has to be 0.""",
    f"""- **Equality** is the largest relative difference of logits, losses and gradients from those of the same sample
alone. Equality may be at most {EQUALITY_LIMITS["float32"]:.0e}.""",
)

STARS = "A star after a family's name means that some of its layers run sample by sample."

STRATEGIES = {
    "flash": "flash attention with sample boundaries",
    "varlen": "Packplan's variable-length attention, computed for each sample separately",
    "own": "the model's own attention, which finds samples by restarting positions",
}
"""Strategy -> description, in the order in which the probe tries strategies."""

DIFFERENT = "In these families, packed samples affect each other, or differ from the samples alone:"

UNPROVEN = """The probe could not test these families, so Packplan does not pack them. `python -m tools.models
families --names NAME` prints the whole reason:"""

UNPROVEN_REASONS = {
    "its default configuration is refused": "the default configuration is refused",
    "the probe cannot build a small copy": "no small copy can be built",
    "a small copy of the model does not run": "the small copy does not run",
    "the probe's small copy of the model has": "the small copy has more than 20,000,000 weights",
    "a small copy of the model cannot compute images": "the small copy cannot compute images",
    "": "the small copy fails for another reason",
}
"""Start of a verdict's reason -> reason on the page. The first start that matches counts."""

UNPADDED_HEADING = "## Without padding"

ABOUT_UNPADDED = """The table shows which padding `packplan.hf.unpad` leaves out. A batch in which a layer would
carry its state through padding is computed with this padding. For BERT, XLM-RoBERTa and ModernBERT, all padding
is left out (`tests/e2e/test_unpad.py`). `python -m tools.models unpadded docs/models.md` wrote this section
on {date}, with {versions}."""

ABOUT_VISION = """The table lists tests of tiny models with random weights, each with its processor and
ms-swift's template. In the column `lengths`, `headers` means that lengths come from image headers, and `full` that
they come from full encoding. For images of 45 sizes, both ways give the same lengths. Samples with 0, 1 and 3 images
have the same losses and gradients packed and alone. `python -m tools.models vision docs/models.md` wrote this section
on {date}, with {versions}."""

ABOUT_OTHERS = """ms-swift declares {declared} templates that support packing. The next table lists the {number}
templates for which no tiny model was tested, with the reason. A model with its own code is probed if
`model.trust_remote_code` is true. The chat format of InternVL is refused. Its hf format, `internvl_hf`, can be
packed."""

VISION_HEAD = ("model", "template", "lengths", "equality")

RIGHT = {"isolation", "equality"}
"""Columns that are aligned to the right."""

EXACT = ("positions", "labels", "isolation")
"""Checks that pass only with the number 0."""

NO_TEXT = "the model gives embeddings or scores, and writes no text"

OWN_CODE = "the model needs code of its own"

NOT_BUILT = {
    "clef": NO_TEXT,
    "deepseek_v41": OWN_CODE,
    "glm5_next": "no small copy can be built",
    "interns1": f"{OWN_CODE}; ms-swift requires transformers below 4.56",
    "internvl": OWN_CODE,
    "internvl2": OWN_CODE,
    "internvl2_5": OWN_CODE,
    "internvl2_phi3": OWN_CODE,
    "internvl3_5": OWN_CODE,
    "internvl3_5_gpt": OWN_CODE,
    "internvl_phi3": OWN_CODE,
    "jev": NO_TEXT,
    "jina_reranker_m0": NO_TEXT,
    "kimi_k25": f"{OWN_CODE}; ms-swift requires transformers below 5",
    "kimi_k3": OWN_CODE,
    "kimi_vl": f"{OWN_CODE}; ms-swift requires transformers below 4.49",
    "llava_onevision1_5": OWN_CODE,
    "llava_onevision2": OWN_CODE,
    "omnijev": NO_TEXT,
    "ovis2_5": f"{OWN_CODE}; ms-swift requires moviepy below 2",
    "qwen2_gme": NO_TEXT,
    "qwen3_5_emb": NO_TEXT,
    "qwen3_asr": "the model accepts sound, but no images; ms-swift requires transformers 4.57.6",
    "qwen3_omni": "Packplan refuses this template, since no tiny model of its kind was trained as a whole",
    "qwen3_vl_emb": NO_TEXT,
    "qwen3_vl_reranker": NO_TEXT,
    "wemm_embedding": NO_TEXT,
}
"""Template that declares packing -> reason why no tiny model for the template is built."""


@attrs.frozen
class VisionRow:
    """Row of the table of vision models: the results of one family's tiny model."""

    family: str
    template: str
    headers: bool
    """Whether lengths are computed from image headers, without full encoding."""

    equality: float
    failed: tuple[str, ...]
    """Names of failed checks. `lengths` means that headers and full encoding gave other lengths."""


def versions(*packages: str) -> str:
    """Return the names and versions of torch, transformers and *packages*, as text."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", *packages))


def templates_that_pack() -> list[str]:
    """Return the templates for which ms-swift declares support of packing."""
    from swift.template import TEMPLATE_MAPPING

    return [name for name, meta in TEMPLATE_MAPPING.items() if meta.template_cls.support_padding_free]


def families_page(verdicts: Sequence[PackingVerdict], *, date: str) -> str:
    """Return the page of verdicts, without the sections on padding and on vision models."""
    passing = sum(one.passes for one in verdicts)
    measured = MEASURED.format(date=date, versions=versions(), passing=passing, all=len(verdicts))
    found = {one.strategy for one in verdicts}
    strategies = "\n".join(f"- `{name}`: {meaning}" for name, meaning in STRATEGIES.items() if name in found)
    packing = {
        f"`{strategy}`": [f"{one.model_type}{'*' * bool(one.split)}" for one in verdicts if strategy == one.strategy]
        for strategy in STRATEGIES
    }
    different = [
        (one.model_type, f"{one.measured.isolation:.2g}", f"{one.measured.equality:.1e}")
        for one in verdicts
        if not one.passes and one.measured is not None
    ]
    unproven = {
        one.model_type: unproven_reason(one.reason) for one in verdicts if not one.passes and one.measured is None
    }
    parts = [
        "# Which models pack",
        _wrap(ABOUT),
        _wrap(measured),
        "\n".join(map(_wrap, TERMS)),
        "## Families that pack",
        strategies,
        STARS,
        grouped_table(("strategy", "families"), packing),
        "## Families that do not",
        DIFFERENT,
        table(("family", "isolation", "equality"), different),
        _wrap(UNPROVEN),
        grouped_table(("reason", "families"), names_by_value(unproven)),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def vision_section(rows: Sequence[VisionRow], *, date: str) -> str:
    """Return the page's section on vision models."""
    others = set(templates_that_pack()) - {row.template for row in rows}
    reasons = {name: NOT_BUILT.get(name, "not probed, or a package that it needs is missing") for name in others}
    about = ABOUT_VISION.format(date=date, versions=versions("ms-swift"))
    about_others = ABOUT_OTHERS.format(declared=len(others | {row.template for row in rows}), number=len(others))
    models = table(VISION_HEAD, map(vision_cells, rows))
    templates = grouped_table(("reason", "templates"), names_by_value(dict(sorted(reasons.items()))))
    return f"{HEADING}\n\n{_wrap(about)}\n\n{models}\n{_wrap(about_others)}\n\n{templates}"


def unproven_reason(reason: str) -> str:
    """Return the reason that the page gives for a verdict without measured numbers."""
    return next(text for start, text in UNPROVEN_REASONS.items() if reason.startswith(start))


def vision_cells(row: VisionRow) -> tuple[str, ...]:
    """Return the table cells of a row."""
    equality = f"differs: {', '.join(row.failed)}" if row.failed else f"{row.equality:.1e}"
    return (row.family, row.template, "headers" if row.headers else "full", equality)


def names_by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return a dict of value -> names with this value, in the order of first use."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return names


def grouped_table(head: Sequence[str], names: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown table with a row for each key that has names."""
    return table(head, [(key, ", ".join(group)) for key, group in names.items() if group])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = "|".join("---:" if name in RIGHT else "---" for name in head)
    lines = [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "".join(f"{line}\n" for line in lines)


def replace_families(page: str, text: str) -> str:
    """Return a page with *text* in place of all before the sections on padding and vision."""
    rest = page[min((page.find(one) for one in (UNPADDED_HEADING, HEADING) if one in page), default=len(page)) :]
    return f"{text}\n{rest}" if rest else text


def replace_vision(page: str, section: str) -> str:
    """Return a page whose section on vision models is replaced."""
    return f"{page.partition(HEADING)[0].rstrip()}\n\n{section}".lstrip()


def probe_families(names: Sequence[str]) -> list[PackingVerdict]:
    """Return the verdicts on the families in *names*, or on all families if *names* is empty."""
    from tools.families import family_names, probe_family

    return [probe_family(name) for name in progress(_choose(names, family_names()), desc="probing", unit=" families")]


def unpadded_section(reasons: Mapping[str, Mapping[str, str]], *, date: str) -> str:
    """Return the page's section on padding, given the result of `probe_unpadded`."""
    about = _wrap(ABOUT_UNPADDED.format(date=date, versions=versions()))
    groups = names_by_value({name: _padding_in_words(one) for name, one in reasons.items()})
    groups = {words: ["all other families that pack"] if words == "all" else names for words, names in groups.items()}
    return f"{UNPADDED_HEADING}\n\n{about}\n\n{grouped_table(('padding that is left out', 'families'), groups)}"


def _padding_in_words(reasons: Mapping[str, str]) -> str:
    if "right of" in reasons:
        return f"none: {reasons['right of'].rpartition(', ')[2]}"
    return "all" if not reasons else f"all but padding {' and '.join(f'{side} tokens' for side in reasons)}"


def replace_unpadded(page: str, section: str) -> str:
    """Return a page whose section on padding is replaced."""
    families, _, rest = page.partition(UNPADDED_HEADING)
    _, heading, vision = (rest or families).partition(HEADING)
    families = families.partition(HEADING)[0]
    return f"{families.rstrip()}\n\n{section}\n{heading}{vision}"


def probe_unpadded(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """
    Return the padding that `unpad` cannot leave out of each family: family -> side -> reason. If
    *names* is empty, all families that pack are probed.
    """
    from packplan.adapters.probe.small_model import SmallModels, hiding_warnings
    from packplan.hf import unpad
    from tools.families import default_config, family_names

    found: dict[str, dict[str, str]] = {}
    unpacked = json.loads(Path("adapters", "families.json").read_text(encoding="utf-8"))["unpacked"]
    chosen = names or [name for name in family_names() if name not in unpacked]
    for name in progress(chosen, desc="probing", unit=" families"):
        with hiding_warnings():
            model = SmallModels(default_config(name)).build(attention="eager")
            try:
                found[name] = dict(unpad(model).unpacked_sides)
            except PackplanError as error:
                found[name] = {"right of": f"{error}"}
    return found


def probe_vision(names: Sequence[str]) -> list[VisionRow]:
    """Return the rows of the vision families in *names*, or of all families if *names* is empty."""
    from tests.made.pictures import write_scenes, write_sizes
    from tests.made.vision_models import VISION_FAMILIES

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenes, sizes = write_scenes(folder / "scenes", count=16), write_sizes(folder / "sizes")
        chosen = [
            name for name in _choose(names, list(VISION_FAMILIES)) if not _lacks(name, VISION_FAMILIES[name].needs)
        ]
        return [_probe_row(folder, name, scenes, sizes) for name in progress(chosen, desc="probing", unit=" families")]


def _wrap(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(" ".join(text.split()), 100, subsequent_indent=indent, break_on_hyphens=False)


def _choose(names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    if unknown := sorted(set(names) - set(known)):
        message = f"{', '.join(unknown)}: no such family; name some of {', '.join(known)}"
        raise PackplanError(message)
    return names or known


def _lacks(name: str, needs: tuple[str, str] | None) -> bool:
    if needs is None or find_spec(needs[0]) is not None:
        return False
    log.warning("%s is left out: it needs %s: pip install 'packplan[%s]'", name, *needs)
    return True


def _probe_row(folder: Path, name: str, scenes: Path, sizes: Path) -> VisionRow:
    from packplan.app.check import check
    from packplan.app.opening.runs import read_config
    from packplan.app.opening.splits import open_splits
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
        return read_config(path)

    measured, run = config(sizes), config(scenes)
    samples: Any = open_splits(measured)["train"].source
    quick, in_full = (list(samples.measure_many(range(len(samples)), in_full=full)) for full in (False, True))
    equal = [one == other and not isinstance(one, PackplanError) for one, other in zip(quick, in_full, strict=True)]
    report = check(run, num_packs=4)
    compared = [verdict for verdict in report.verdicts if verdict.check not in EXACT]
    return VisionRow(
        family=name,
        template=template,
        headers=samples.image_costs is not None,
        equality=max(verdict.worst.value for verdict in compared),
        failed=(
            *(() if all(equal) else ("lengths",)),
            *(verdict.check for verdict in report.verdicts if not verdict.passed),
        ),
    )


def main(arguments: list[str] | None = None) -> int:
    """Probe models, then write the page or print the results; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("families", "unpadded", "vision"), help="part of the page")
    parser.add_argument(
        "page", type=Path, nargs="?", help="Markdown page to write the part into (default: print the results)"
    )
    parser.add_argument("--names", nargs="+", default=(), metavar="NAME", help="families to probe (default: all)")
    options = parser.parse_args(arguments)

    def command() -> None:
        before = options.page.read_text(encoding="utf-8") if options.page and options.page.exists() else ""
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        if options.part == "families":
            verdicts = probe_families(options.names)
            results = (
                "\n".join(f"{one.model_type}: {one.strategy or 'does not pack'}: {one}" for one in verdicts) + "\n"
            )
            page = replace_families(before, families_page(verdicts, date=date))
        elif options.part == "unpadded":
            reasons = probe_unpadded(options.names)
            results = "".join(f"{name}: {one or 'all padding is left out'}\n" for name, one in reasons.items())
            page = replace_unpadded(before, unpadded_section(reasons, date=date))
        else:
            rows = probe_vision(options.names)
            results = table(VISION_HEAD, map(vision_cells, rows))
            page = replace_vision(before, vision_section(rows, date=date))
        if options.page:
            options.page.write_text(page, encoding="utf-8")
        else:
            print(results, end="")

    return run_command(command, verbose=False, kept="nothing is kept")


if __name__ == "__main__":
    raise SystemExit(run_program(main))
