"""`assert_step_loss` on two ranks: sound steps pass, and faults are found by their factor."""

import json
import re
import tempfile
from functools import partial
from operator import itemgetter
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from packplan.adapters.loaders.rows import pad_rows
from packplan.core.errors import ArgumentError, MismatchError, ModelError, PackplanError
from packplan.hf import count_supervised, token_mean, unpad
from packplan.testing import assert_step_loss
from tests.e2e.unpad_rank import build
from tests.nearness import FLOAT32
from tests.processes import finished

pytestmark = pytest.mark.slow

LENGTHS = (20, 3, 9, 31, 12, 5, 26, 14)

LEARNED = sum(LENGTHS) - 2 * len(LENGTHS)

PACKS = [[0, 5, 7], [1], [2, 3], [4, 6]]
"""Packs of the step; each rank of two has two."""


def rows():
    """Return samples whose first two tokens are not learned."""
    draw = torch.Generator().manual_seed(3)
    samples = [torch.randint(5, 300, (length,), generator=draw).tolist() for length in LENGTHS]
    return [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in samples]


def llama():
    """Return a tiny model in training that attends within samples, by positions."""
    model = build("llama", attention_dropout=0.3, use_cache=False)
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
    return model.train()


def of_loop(divide, *, reduced=True, uneven=False):
    """Return a step; *divide* makes a pack's loss of its sum, its and the rank's learned tokens."""

    def step(model):
        own, reported = PACKS[dist.get_rank() :: 2], torch.zeros(())
        learned = [sum(LENGTHS[index] - 2 for index in pack) for pack in own]
        for pack, count in zip(own, learned, strict=True):
            batch = dict(DataCollatorWithFlattening(return_tensors="pt")([rows()[index] for index in pack]))
            logits, labels = model(**batch).logits[0, :-1], batch["labels"][0, 1:]
            loss = divide(F.cross_entropy(logits, labels, reduction="sum"), count, sum(learned))
            loss.backward()
            reported += loss.detach()
        dist.all_reduce(reported)
        for weight in model.parameters() if reduced else ():
            dist.all_reduce(weight.grad)
            weight.grad /= 1 if uneven and dist.get_rank() else 2
        return float(reported) / 2

    return step


def update(model):
    with torch.no_grad():
        next(model.parameters()).add_(0.0)


STEPS = {
    "sound": of_loop(lambda total, *_: total * 2 / LEARNED),
    "accumulation is not divided by": of_loop(lambda total, count, _: total / count),
    "world size twice": of_loop(lambda total, *_: total / LEARNED),
    "ranks of unequal token counts": of_loop(lambda total, _, of_rank: total / of_rank),
    "gradients stay apart": of_loop(lambda total, *_: total * 2 / LEARNED, reduced=False),
    "a rank differs alone": of_loop(lambda total, *_: total * 2 / LEARNED, uneven=True),
    "no update belongs in it": update, "nothing is computed": lambda _: 1.0,
    "nothing is labelled": lambda model: float(model(input_ids=torch.ones(1, 9, dtype=torch.int64)).logits.sum()),
    "a rank has other labels": lambda model: float(model(torch.ones(1, 9, dtype=torch.int64)).logits.sum()),
    "a rank updates": lambda model: update(model) if dist.get_rank() else None,
    "a rank has no gradients": lambda model: (STEPS["sound"](model), dist.get_rank() and model.zero_grad())[0],
}  # fmt: skip
"""Steps of loops on two ranks, sound and with a fault."""


class NotDivided(Trainer):
    """The sum over the batches of their means, as before the fix of gradient accumulation."""

    def _get_num_items_in_batch(self, *_, **__):
        return None

    loss_is_scaled_for_ga = True


def trainer_of(kind=Trainer, **settings):
    """Return a trainer of transformers, whose first step has all rows."""
    args = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=2, report_to=[], use_cpu=True, max_steps=2, disable_tqdm=True,
        gradient_accumulation_steps=2, save_strategy="no", logging_steps=1, learning_rate=1e-2, **settings,
    )  # fmt: skip
    args.max_epochs = None  # ms-swift's callbacks, which it gives all trainers, ask for it
    return kind(llama(), args, train_dataset=rows(), data_collator=DataCollatorWithFlattening())


TRAINERS = {
    "trainer": {},
    "trainer in bfloat16": {"bf16": True},
    "trainer not divided": {"kind": NotDivided},
    "trainer with ranks of unequal token counts": {"average_tokens_across_devices": False},
    "trainer smooths labels": {"label_smoothing_factor": 0.1},
}
"""Trainers of transformers, sound and with a fault."""


def train(*, asked):
    """Return the losses and weights of a trainer with dropout that perhaps was asked before."""
    trainer = trainer_of()
    if asked:
        assert_step_loss(trainer)
        assert trainer.optimizer is None
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, *(float(one.double().sum()) for one in trainer.model.parameters())]


def on_rank(out):
    """Be one rank, and write what the assertion returns or raises in each case."""
    dist.init_process_group("gloo")
    found = {}
    for name in STEPS | TRAINERS:
        model, labels = llama(), [torch.ones(1, 9 - dist.get_rank())] if name == "a rank has other labels" else None
        asked = partial(STEPS[name], model) if name in STEPS else trainer_of(**TRAINERS[name])
        try:
            found[name] = attrs.asdict(assert_step_loss(asked, model=model if name in STEPS else None, labels=labels))
        except PackplanError as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["train"] = [train(asked=asked) for asked in (True, False)]
    Path(out, f"found{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


TOOK = r"; the step had 2 ranks of 2 batches each$"

OTHER = rf"^MismatchError: .*the gradients differ by .*{TOOK}"

REFUSED = {
    "accumulation is not divided by": OTHER,
    "world size twice": rf"is [\d.]+ instead of [\d.]+ \(factor 0\.5\); the gradients .* \(factor 0\.5\){TOOK}",
    "ranks of unequal token counts": OTHER,
    "gradients stay apart": OTHER,
    "a rank differs alone": OTHER,
    "trainer not divided": OTHER,
    "trainer with ranks of unequal token counts": OTHER,
    "trainer smooths labels": rf"^MismatchError: .* instead of .*; the gradients differ .*{TOOK}",
    "no update belongs in it": "^ArgumentError: the step changed the weights: leave the optimizer's update out",
    "nothing is computed": "^ArgumentError: the step has no supervised token",
    "nothing is labelled": "^ArgumentError: the model is given no labels",
    "a rank has other labels": r"^RunError: rank 1 failed: labels\[0\] is a Tensor of shape \(1, 8\), but its call",
    "a rank updates": "^RunError: rank 1 failed: the step changed the weights",
    "a rank has no gradients": "^RunError: rank 1 failed: the step left no gradients",
}
"""Steps with a fault of division or of reduction, and those that cannot be compared."""


@pytest.fixture(scope="module")
def found(server, tmp_path_factory):
    """Run all cases on two ranks, and return what both found."""
    folder = tmp_path_factory.mktemp("steps")
    assert [0, 0] == finished(server.ranks(2, on_rank, str(folder), folder=folder))
    first, second = (json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2))
    for name, own in first.items():  # a rank that fails alone is named on the others
        assert str(own).removeprefix("RunError: rank 1 failed: ")[:12] in str(second[name]), "ranks found other things"
    return first


def test_sound_steps_pass_and_faults_are_found_with_their_factor_and_reason(found):
    """Means of tokens, of a function and of a trainer; with dropout."""
    for name in STEPS | TRAINERS:
        if name in REFUSED:
            assert re.search(REFUSED[name], found[name]), found[name]
        else:
            assert found[name]["loss"] == pytest.approx(found[name]["due"], rel=FLOAT32)
            assert found[name]["gradients"] < (0.01 if "bfloat16" in name else FLOAT32)


def test_a_trainer_that_was_asked_trains_as_if_it_was_not(found):
    """The same losses and weights to the last bit, with dropout and shuffled rows."""
    asked, plain = found["train"]

    assert plain == asked
    assert plain[0] != plain[1]


def test_trainers_of_ms_swift_are_asked(write_run, ready):
    """By the samples that they serve."""
    step = assert_step_loss(ready(write_run(of="qwen2")).trainer)

    assert step.loss == pytest.approx(step.due, rel=FLOAT32)


def test_a_model_without_gradients_is_named():
    with pytest.raises(ModelError, match="no weight with requires_grad"):
        assert_step_loss(lambda: None, model=llama().requires_grad_(requires_grad=False))


def own_step(model, batches, *, passes, share=1):
    """Return the step of a loop that passes labels to the model, or to `token_mean`."""
    learned = torch.tensor(sum(count_supervised(batch["labels"]) for batch in batches))

    def step():
        total = 0.0
        for ids, mask, labels in map(itemgetter("input_ids", "attention_mask", "labels"), batches):
            outputs = model(ids, mask, **({"labels": labels, "num_items_in_batch": learned} if passes else {}))
            (loss := share * (outputs.loss if passes else token_mean(outputs, labels, learned))).backward()
            total = total + loss
        return total

    return step


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("prepare", [nn.Module.train, unpad, partial(unpad, logits=False)])
def test_the_first_step_of_a_loop_is_sound_with_and_without_padding(prepare, passes):
    """Its calls are counted once, though `unpad` compares the first ones with padded passes."""
    batches = [pad_rows(rows()[:3]), pad_rows(rows()[3:6])]
    labels = None if passes else [batch["labels"] for batch in batches]
    prepare(model := llama())

    found = assert_step_loss(own_step(model, batches, passes=passes), model=model, labels=labels)

    assert (sum(LENGTHS[:6]) - 12, found.due) == (found.tokens, pytest.approx(found.loss, rel=FLOAT32))
    with pytest.raises(MismatchError, match=r"\(factor 0\.5\); the step had 1 rank of 2 batches each$"):
        assert_step_loss(own_step(model, batches, passes=passes, share=0.5), model=model, labels=labels)
    with pytest.raises(ArgumentError, match=r"but the labels \(3, 20\): pass no labels to the model, or call unpad"):
        token_mean({"logits": torch.ones(1, 32, 300)}, own := batches[0]["labels"])
    for wrong, says in (
        ([own] * 2, "calls the model 1 time, but labels has 2: pass the labels of each call"),
        (iter([own[:, 1:]]), r"\[0\] is a Tensor of shape \(3, 19\), but its call needs a Tensor of shape \(3, 20\)"),
        ([own.tolist()], r"labels\[0\] is a list, but its call needs a Tensor of shape \(3, 20\)"),
    ):
        with pytest.raises(ArgumentError, match=says):
            assert_step_loss(own_step(model, batches[:1], passes=True), model=model, labels=wrong)
