"""Variables of a launcher are complete and agree, or each wrong one is named with its bounds."""

import copy
import os
import re

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.adapters.ranks.environment import read_world_size, wrap_rendezvous_errors
from packplan.app.opening.commands import read_run_or_command, require_traceable
from packplan.core.errors import ConfigError, RunError
from tests.documents import parsed

RANKS = {
    "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}  # fmt: skip


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_what_torchrun_sets_is_taken(nodes, per_node, data):
    """Of any rank of any launch; without LOCAL_WORLD_SIZE too, which other launchers leave out."""
    size = nodes * per_node
    rank = data.draw(st.integers(0, size - 1))
    numbers = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": per_node, "RANK": rank, "LOCAL_RANK": rank % per_node}
    environment = RANKS | {name: str(number) for name, number in numbers.items()}

    assert size == read_world_size(environment)
    del environment["LOCAL_WORLD_SIZE"]
    assert size == read_world_size(environment)


values = st.sampled_from(["", "0", "1", "2", "7", "-1", "two", "2.0", "9" * 5000, "\u0662", "70000"])


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(RANKS, values)))
def test_anything_else_is_one_rank_or_names_a_variable(environment):
    """One line each, with torchrun; several ranks have all the variables that they need."""
    try:
        ranks = read_world_size(environment)
    except ConfigError as error:
        event("refused")
        for fault in error.faults:
            assert set(fault.path.split(", ")) <= set(RANKS)
            assert "start the ranks with torchrun" in fault.reason
            assert len(str(fault)) < 250
    else:
        event(f"several ranks: {ranks > 1}")
        assert 1 == ranks or set(RANKS) - {"LOCAL_WORLD_SIZE"} <= environment.keys()
        assert int(environment.get("RANK", "0")) < ranks


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set, but RANK is"),
        ({"RANK": None}, "RANK is not set, but LOCAL_RANK is"),
        *(({name: None}, f"{name} is not set, but RANK is") for name in ("MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE")),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but has to be a whole number from 1 to 100,000: start the"),
        ({"RANK": "4"}, "RANK is '4', but has to be a whole number from 0 to 3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is '2', but has to be a whole number from 0 to 1"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is '8', but has to be a whole number from 1 to 4"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', but has to be a whole number from 1 to 65,535"),
    ],
)
def test_the_variable_that_is_wrong_is_named(changes, says):
    """It alone, with its value and its bounds."""
    environment = {name: value for name, value in {**RANKS, **changes}.items() if value is not None}

    with pytest.raises(ConfigError, match=f"has 1 fault:\n  {re.escape(says)}"):
        read_world_size(environment)


def test_variables_of_other_programs_are_left_alone():
    """A cluster may set where its own service listens; a lone WORLD_SIZE of 1 is one rank."""
    assert 1 == read_world_size({"MASTER_PORT": "tcp://10.0.0.1:6379", "MASTER_ADDR": "10.0.0.1"})
    assert 1 == read_world_size({"WORLD_SIZE": "1"})


def test_ranks_that_cannot_meet_say_where():
    """With torch's reason, in one line."""
    with pytest.raises(RunError) as raised, wrap_rendezvous_errors(RANKS):
        raise RuntimeError("the address\nis in use")

    assert "rank 3 cannot connect to the 4 ranks at node0:29500 (MASTER_ADDR, MASTER_PORT): the address is in use;" in (
        str(raised.value)
    )


def test_one_process_plans_a_command_or_traces_a_step(monkeypatch):
    """By the environment as it is now, of which `datasets` may have made another object."""
    monkeypatch.setattr("os.environ", copy.deepcopy(os.environ))
    for name, value in (RANKS | {"WORLD_SIZE": "2", "RANK": "0"}).items():
        monkeypatch.setenv(name, value)

    for ask in (lambda: read_run_or_command("swift", ["sft"]), lambda: require_traceable(parsed())):
        with pytest.raises(ConfigError, match=r"starts (several|2) ranks"):
            ask()
