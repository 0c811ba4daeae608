"""Keys of ms-swift are checked against a table: its types, choices and bounds, without ms-swift."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.config.trainer_keys import LIBRARIES, TrainerKey, deepspeed_file, read_key_table
from tests.documents import faults_of

pytestmark = pytest.mark.untraced

KEYS = read_key_table()

WRONG = {
    "nan": math.nan, "-nan": -math.nan, "inf": math.inf, "negative": -1, "string": "zigzag", "list": [3],
    "section": {3: 4},
}  # fmt: skip
"""Values that are no number, switch or choice, by kind; a text or a section may have some."""


@pytest.mark.parametrize("name", sorted(KEYS))
def test_each_key_refuses_what_it_is_not(name):
    """Numbers, texts, lists, sections: with the value, and what it has to be."""
    takes = KEYS[name]
    free = set(takes.types) & {"str", "list"} and not takes.choices
    allowed = {
        "negative": takes.least == -1,
        "string": ("str" in takes.types and free and "dict" not in takes.types) or takes.path,
        "section": "dict" in takes.types,
    }
    for kind, value in WRONG.items():
        if allowed.get(kind):
            assert value == takes.convert(value)
            continue
        if kind == "string" and "list" in takes.types and not takes.choices:
            assert [value] == takes.convert(value)
            continue
        with pytest.raises(ValueError, match=r"^is .*, but has to be \w") as raised:
            takes.convert(value)
        assert repr(value) in str(raised.value)


def test_only_deepspeed_takes_names_of_ms_swift():
    """Of DeepSpeed's settings alone; the name of those of FSDP is refused, with what to write."""
    assert Path(deepspeed_file("zero2")).is_file()
    assert "fsdp2" == deepspeed_file("fsdp2")
    assert "set fsdp to true, and copy what you need" in faults_of(fsdp="fsdp2")["training.fsdp"]


@given(st.floats())
def test_a_number_has_its_bounds(value):
    """The least is allowed, what it has to be below is not; a number as a text is one."""
    takes = TrainerKey(("float",), below=1)
    if 0 <= value < 1:
        assert value == takes.convert(value) == takes.convert(repr(value))
    else:
        with pytest.raises(ValueError, match="has to be a number of at least 0 and below 1"):
            takes.convert(value)


NOT_TAKEN = [
    (TrainerKey(("int",)), True, "is True, but has to be a whole number of at least 0"),
    (TrainerKey(("int",)), 10**12, "has to be a whole number of at least 0 and below 1e.12"),
    (TrainerKey(("float",)), 10**400, "but has to be a number of at least 0"),
    (TrainerKey(("float",)), None, "is None, but has to be a number"),
    (TrainerKey(("str", "list"), ("a", "b")), ["a", "c"], "has to be a list of texts or one of a, b"),
    (TrainerKey(("null", "str", "dict")), "{a", "is '{a', but has to be a section of keys"),
    (TrainerKey(("str",), ("no", "steps")), True, "is True, but has to be one of no, steps"),
]

TAKEN = [
    (TrainerKey(("float",)), 3, 3.0),
    (TrainerKey(("null", "int")), None, None),
    (TrainerKey(("list",), ("a", "b")), ["b"], ["b"]),
    (TrainerKey(("null", "str", "dict")), '{"a": 1}', {"a": 1}),
    (TrainerKey(("str",), ("no", "steps")), False, "no"),  # YAML reads no as false
]


def test_what_a_key_takes_is_what_the_trainer_gets_and_the_rest_is_said_in_words():
    """Types, choices, bounds; whole numbers as numbers, JSON as a section, no as a word."""
    assert [taken for _, _, taken in TAKEN] == [takes.convert(value) for takes, value, _ in TAKEN]
    for takes, value, says in NOT_TAKEN:
        with pytest.raises(ValueError, match=says):
            takes.convert(value)


@pytest.mark.parametrize("table", LIBRARIES, ids=lambda path: path.stem)
def test_a_table_is_not_used_for_other_versions(tmp_path, table):
    """Either library's are known; where one is not installed, it says what the keys would be."""
    document = json.loads(table.read_text())
    keys, copy = read_key_table(table), tmp_path / "keys.json"
    assert {*LIBRARIES[table]} == {*document["versions"]}
    for name in LIBRARIES[table]:
        copy.write_text(json.dumps(document | {"versions": document["versions"] | {name: "0.1"}}))
        assert read_key_table(copy) is None
    copy.write_text(json.dumps(document | {"versions": {"not-installed": "0.1"}}))
    assert read_key_table(copy) == keys
