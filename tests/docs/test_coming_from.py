"""The pages for users of other programs: the keys that they name are keys."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from packplan.adapters.config.run import SECTIONS, known_keys
from packplan.adapters.config.trainer_keys import read_key_table
from packplan.core.config.run import RunConfig

DOCS = Path(__file__).parents[2] / "docs"

KEYS = {*known_keys(RunConfig)} - {*SECTIONS} | {f"training.{key}" for key in read_key_table()}

PROGRAMS = ("TRL", "axolotl", "LLaMA-Factory")


def rows(program: str) -> list[tuple[str, str, str]]:
    """Return the keys of a program, each with the key here and the remark."""
    page = (DOCS / "configuration.md").read_text(encoding="utf-8").partition("\n## Keys of TRL")[2]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    column = table[0].index(program)
    return [(theirs, row[0].strip("`"), row[-1]) for row in table[2:] for theirs in re.findall(r"`(\w+)`", row[column])]


@pytest.mark.parametrize("program", PROGRAMS)
def test_keys_that_others_become_are_keys(program):
    """Each row names one that a run's YAML has."""
    found = rows(program)

    assert len(found) > 15
    assert [] == [key for _, key, _ in found if key not in KEYS]


def test_keys_of_trl_are_those_of_the_installed_one():
    """As its configuration classes declare them; nothing is imported."""
    folder = Path(find_spec("trl").origin).parent / "trainer"
    sources = [(folder / f"{name}_config.py").read_text(encoding="utf-8") for name in ("sft", "model")]
    transformers = Path(find_spec("transformers").origin).with_name("training_args.py").read_text(encoding="utf-8")

    declared = set(re.findall(r"^    (\w+): ", "\n".join([*sources, transformers]), re.MULTILINE))

    assert [] == [name for name, _, _ in rows("TRL") if name not in declared]
