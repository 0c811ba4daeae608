"""`assert_step_loss` on two ranks: sound steps pass, and faults are found by their factor."""

import json
import re

import pytest

from packplan.adapters.ranks.torch_group import OneRank
from packplan.app.wiring.runs import read_config
from packplan.core.errors import ModelError
from packplan.testing import assert_step_loss
from tests.e2e import step_loss_rank
from tests.e2e.ready import prepare
from tests.nearness import FLOAT32
from tests.processes import finished

pytestmark = pytest.mark.slow

SOUND = ("sound", "trainer", "trainer in bfloat16")

TOOK = r"; 2 ranks of 2 batches each took the step$"

REFUSED = {
    "accumulation is not divided by": rf"^MismatchError: .*the gradients are 1\.66\d times .*{TOOK}",
    "world size twice": rf"is 1\.9555, 0\.5 times the 3\.911 that is due; the gradients are 0\.5 times .*{TOOK}",
    "ranks of unequal token counts": rf"^MismatchError: .*the gradients are .*{TOOK}",
    "gradients stay apart": rf"^MismatchError: .*the gradients are .*{TOOK}",
    "trainer not divided": rf"^MismatchError: .*the gradients are .*{TOOK}",
    "trainer with ranks of unequal token counts": rf"^MismatchError: .*the gradients are .*{TOOK}",
    "trainer smooths labels": rf"^MismatchError: .*times the .* that is due; the gradients are .*{TOOK}",
    "no update belongs in it": "^ArgumentError: the step changed weights: leave the optimizer's update out",
    "nothing is computed": "^ArgumentError: the step learns no token",
    "nothing is labelled": "^ArgumentError: the model is given no labels",
}
"""Steps with a fault of division or of reduction, and those that cannot be compared."""


@pytest.fixture(scope="module")
def found(server, tmp_path_factory) -> dict[str, str]:
    """Run all cases on two ranks, and return what both found."""
    folder = tmp_path_factory.mktemp("steps")
    assert [0, 0] == finished(server.ranks(2, step_loss_rank.main, str(folder), folder=folder))
    first, second = (json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2))
    assert first.keys() == second.keys() == {*SOUND, *REFUSED, "trainer trains on"}
    assert [] == [name for name in first if first[name][:12] != second[name][:12]], "ranks found other things"
    return first


@pytest.mark.parametrize("name", SOUND)
def test_sound_steps_pass(found, name):
    """Means of tokens, of a function and of a trainer; with dropout."""
    numbers = dict(re.findall(r"(\w+)=([\d.e-]+)", found[name]))

    assert float(numbers["loss"]) == pytest.approx(float(numbers["due"]), rel=FLOAT32)
    assert float(numbers["gradients"]) < (0.01 if "bfloat16" in name else FLOAT32)


@pytest.mark.parametrize(("name", "said"), REFUSED.items(), ids=REFUSED)
def test_faults_are_found_with_their_factor_and_reason(found, name, said):
    assert re.search(said, found[name]), found[name]


def test_a_trainer_that_was_asked_trains_as_if_it_was_not(found):
    """The same losses and weights to the last bit, with dropout and shuffled rows."""
    asked, plain = json.loads(found["trainer trains on"])

    assert plain == asked
    assert plain[0] != plain[1]


def test_trainers_of_ms_swift_are_asked(write_run):
    """By the samples that they serve."""
    trainer = prepare(read_config(write_run(of="qwen2")), OneRank()).trainer

    step = assert_step_loss(trainer)

    assert step.loss == pytest.approx(step.due, rel=FLOAT32)
    assert step.tokens > 1


def test_a_model_without_gradients_is_named():
    with pytest.raises(ModelError, match="none of its weights trains"):
        assert_step_loss(lambda: None, model=step_loss_rank.llama().requires_grad_(requires_grad=False))
