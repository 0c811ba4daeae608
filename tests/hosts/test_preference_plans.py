"""Plans of preference data in TRL: pairs for DPO and rewards, rows for KTO without its KL term."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import numpy as np
import pytest

pytest.importorskip("trl")

# isort: split
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

import packplan as pp
from packplan.adapters.hf.refusals import is_old_trl
from packplan.core.errors import ArgumentError, MismatchError, StaleError
from packplan.hf import row_lengths, use_plan
from packplan.testing import assert_unpadded_equal
from tests import nearness
from tests.hosts.law import PLAIN_STEPS, Watch, arguments, fork_ranks, model_of, tokenizer
from tests.hosts.pages import HOSTED
from tests.nearness import FLOAT32

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

_WORDS = ["red", "blue " * 3, "a circle of many words " * 4, "bars " * 9, "blue a " * 6]

_NEAR = {"rel": FLOAT32, "abs": 2e-6}

NUM = 13


def columns(host):
    """Return columns of texts whose lengths differ."""
    draw = np.random.default_rng(0)
    names = {"RewardTrainer": ["chosen", "rejected"], "KTOTrainer": ["prompt", "completion"]}
    texts = {
        name: [_WORDS[one] for one in draw.integers(0, len(_WORDS), NUM)]
        for name in names.get(host, ["prompt", "chosen", "rejected"])
    }
    return texts | ({"label": draw.integers(0, 2, NUM).astype(bool).tolist()} if host == "KTOTrainer" else {})


def trainer_of(host, out, model=None, data=None, **keys):
    """Return a trainer as its users make it, whose reference is another model than its policy."""
    build, given = partial(model_of, "qwen2", pad_token_id=0, eos_token_id=1), {}
    keys = {"gradient_checkpointing": False, "learning_rate": 0.1, "max_length": None} | PLAIN_STEPS | keys
    if host == "RewardTrainer":
        build = partial(build, kind=AutoModelForSequenceClassification, num_labels=1)
    else:
        given["ref_model"] = build()
        with torch.no_grad():
            for one in given["ref_model"].parameters():
                one.add_(0.02 * torch.randn(one.shape, generator=torch.Generator().manual_seed(1)))
    if host == "KTOTrainer":
        keys = {"loss_type": "apo_zero_unpaired", "remove_unused_columns": False} | keys
    args = arguments(getattr(trl, host.replace("Trainer", "Config")), out, **keys)
    data = Dataset.from_dict(data or columns(host))
    sets = {"train_dataset": data, "eval_dataset": data, "processing_class": tokenizer(*_WORDS)}
    return getattr(trl, host)(model or build(), args=args, **sets, **given)


def plan_of(trainer):
    """Return a plan of a trainer's samples in packs of one to several."""
    lengths = row_lengths(trainer)
    return pp.plan(lengths, max(lengths) + 9)


def run(rank, out, cell, kill_after=None):
    """Train and evaluate a plan on this rank; the first one writes what was trained."""
    keys = {"gradient_accumulation_steps": cell[2], "num_train_epochs": 2}
    trainer = trainer_of(cell[0], out / "run", **keys, restore_callback_states_from_checkpoint=True)
    plan, watch = plan_of(trainer), Watch(kill_after)
    use_plan(trainer, plan, eval_plan=plan)
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=kill_after == 0)
    schedule = trainer.schedule  # after a resume, of what was left
    assert all(0 < one.counts.real < one.counts.padded for one in trainer.unpaddings)
    assert len(trainer.unpaddings) == 1 + (cell[0] != "RewardTrainer"), "the reference computes no padding too"
    start = schedule.start.step
    assert schedule.total_steps == trainer.state.global_step == start + len(watch.steps)
    loss = trainer.evaluate()["eval_loss"]
    ranks = [list(schedule.steps(rank=one)) for one in range(schedule.world_size)]
    samples = [
        [int(one) for step in steps for (pack,) in step.batches for one in plan.packs[pack]]
        for steps in zip(*ranks, strict=True)
    ]
    assert len(samples) == len(watch.steps)
    epoch = schedule.start.epoch
    left = {pack for own in ranks for step in own if step.epoch == epoch for (pack,) in step.batches}
    assert {*range(len(plan.packs))} == {*schedule.consumed_packs(epoch), *left}, "an epoch has each pack"
    if rank == 0:
        steps = [[pack for own in step for (pack,) in own.batches] for step in zip(*ranks, strict=True)]
        sizes = [{len(plan.packs[pack]) for pack in packs} for packs in steps]
        assert cell[1] * cell[2] == 1 or max(map(len, sizes)) > 1, "batches of a step have unequally many samples"
        logs = [entry for entry in trainer.state.log_history if {"loss", "eval_loss"} & entry.keys()]
        found = {"samples": samples, "weights": watch.weights, "gradients": watch.steps, "logs": logs}
        torch.save(found | {"eval_loss": loss, "model": trainer.model.state_dict()}, out / "found.pt")


def run_cell(folder, *cell, kill_after=None):
    """Run on the ranks of a cell."""
    assert fork_ranks(cell[1], run, folder, cell, kill_after) != bool(kill_after)


def run_killed_cell(folder, host, ranks, accumulation, killed_ranks=None):
    """Run on the ranks of a cell, or others with smaller steps, kill them after two, and go on."""
    run_cell(folder, host, *((killed_ranks, 1) if killed_ranks else (ranks, accumulation)), kill_after=2)
    run_cell(folder, host, ranks, accumulation, kill_after=0)


def due(trainer, samples, weights, *, trains=True):
    """Return loss, gradients and logs of samples as one batch of a trainer without a plan."""
    trainer.model.load_state_dict(weights)
    trainer.model.train(trains).zero_grad()
    rows = trainer.train_dataset if trains else trainer.eval_dataset
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(collate([rows[one] for one in samples])))
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None}
    trainer.log({"loss": 0.0})
    return float(loss.detach()), gradients, trainer.state.log_history[-1]


def assert_logged(host, found, expected):
    """Assert that values of one batch are logged; older TRL sums some of KTO over padding."""
    found, expected = ({name.removeprefix("eval_"): one for name, one in logs.items()} for logs in (found, expected))
    over_padding = ("logits/chosen", "logits/rejected") if host == "KTOTrainer" and is_old_trl() else ()
    names = expected.keys() - {"loss", "num_tokens", "epoch", "step", *over_padding}
    assert names & {"margin", "rewards/chosen", "rewards/rejected"}
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, **_NEAR)


_HOSTS = ("DPOTrainer", "KTOTrainer", "RewardTrainer")

CELLS = [*product(_HOSTS, (1, 2), (1, 3))] if HOSTED else [("DPOTrainer", 2, 2)]
CELLS += (
    [(host, 3 - ranks, 2, ranks) for host in _HOSTS for ranks in (1, 2)] if HOSTED else [("RewardTrainer", 1, 2, 2)]
)
"""Trainer, ranks, batches of a step on a rank; perhaps another number of ranks, killed before."""


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_a_step_is_the_mean_over_its_samples(cell, apart, tmp_path):
    """
    Loss, gradients and logged values of a step, and of the evaluation, are those of the trainer
    without a plan, with all samples of the step in one batch. The packs of ranks and batches have
    unequally many samples. So it is where a killed run goes on with another number of ranks.
    """
    apart(run_cell if len(cell) == 3 else run_killed_cell, tmp_path, *cell, folder=tmp_path)

    found, trainer = torch.load(tmp_path / "found.pt"), trainer_of(cell[0], tmp_path)
    *steps, evaluated = found["logs"]
    for number, logged in enumerate(steps[-len(found["samples"]) :]):
        loss, gradients, logs = due(trainer, found["samples"][number], found["weights"][number])
        assert logged["loss"] == pytest.approx(loss, rel=FLOAT32)
        assert nearness.apart(found["gradients"][number], gradients) < FLOAT32
        assert_logged(cell[0], logged, logs)
    loss, _, logs = due(trainer, range(NUM), found["model"], trains=False)
    assert found["eval_loss"] == pytest.approx(loss, rel=FLOAT32)
    assert_logged(cell[0], evaluated, logs)


KILLED = [(host, 2, 2) for host in _HOSTS] if HOSTED else [("RewardTrainer", 1, 2)]


@pytest.mark.parametrize("cell", KILLED, ids=lambda cell: "-".join(map(str, cell)))
def test_a_killed_run_goes_on_to_the_same_weights(cell, apart, tmp_path):
    """Bit for bit those of the run that was not killed, with the packs that were left."""
    found = []
    for function in (run_cell, run_killed_cell):
        (folder := tmp_path / function.__name__).mkdir()
        apart(function, folder, *cell, folder=folder)
        found.append(torch.load(folder / "found.pt"))
    whole, resumed = found
    assert whole["samples"][2:] == resumed["samples"] != []
    assert all(torch.equal(one, resumed["model"][name]) for name, one in whole["model"].items())


def losses_of(trainer, **options):
    """Return the losses of the steps of a plan."""
    use_plan(trainer, plan_of(trainer), **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("host", ["DPOTrainer", "KTOTrainer"] if HOSTED else ["KTOTrainer"])
def test_precomputed_references_stay_with_their_samples(host, tmp_path, capsys):
    """In packs of another order. Rows of KTO alone have a length to compare with the positions."""
    keys = {"max_steps": 3, "gradient_accumulation_steps": 2}
    computed = losses_of(trainer_of(host, tmp_path, **keys))
    trainer = trainer_of(host, tmp_path, precompute_ref_log_probs=True, **keys)
    trainer.model.config.max_position_embeddings = 1

    assert losses_of(trainer) == pytest.approx(computed, **_NEAR)
    assert (host == "KTOTrainer") == ("than the 1 positions of" in " ".join(capsys.readouterr().out.split()))


class Compares(trl.RewardTrainer):
    """Trainer whose loss compares the pairs of a batch."""

    def compute_loss(self, model, inputs, **_):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return loss + 0.1 * outputs.logits.max()


def test_the_first_pack_is_compared_with_its_pairs(tmp_path):
    """A loss that compares pairs is found before weights change, unless the user leaves it out."""
    for check in (True, False):
        trainer = trainer_of("RewardTrainer", tmp_path, max_steps=1)
        trainer.__class__ = Compares
        before = [one.clone() for one in trainer.model.parameters()]
        refused = pytest.raises(MismatchError, match=r"does not train like its \d samples alone")
        with refused if check else nullcontext():
            losses_of(trainer, check=check)
        assert check == all(map(torch.equal, before, trainer.model.parameters()))


class LeaksGradients(trl.RewardTrainer):
    """Trainer whose gradients compare the pairs of a batch a little, though its loss does not."""

    def compute_loss(self, model, inputs, **_):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        leak = max(1e-3, 2 * torch.finfo(outputs.logits.dtype).eps)
        return loss + leak * (outputs.logits.max() - outputs.logits.max().detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("host", ["DPOTrainer", "RewardTrainer", "LeaksGradients"])
def test_gradients_that_cancel_are_compared(host, dtype, tmp_path):
    """Only rounding is left of those of equal answers, but a small leak is found beside it."""
    kind = "DPOTrainer" if host == "DPOTrainer" else "RewardTrainer"
    texts = columns(kind)
    data, keys = texts | {"rejected": texts["chosen"]}, {"per_device_train_batch_size": 4, "max_steps": 1}
    trainer = trainer_of(kind, tmp_path, data=data, **keys)
    for model in {trainer.model, getattr(trainer, "ref_model", trainer.model)}:
        model.to(dtype)
    assert_unpadded_equal(trainer)
    if host == "LeaksGradients":
        trainer.__class__ = LeaksGradients
    with pytest.raises(MismatchError, match="Gradients") if host == "LeaksGradients" else nullcontext():
        assert [pytest.approx(np.log(2), rel=torch.finfo(dtype).eps * 8)] == losses_of(trainer)


REFUSED = {
    "loss_type is 'kto'.* KL term.*apo_zero_unpaired": (
        "KTOTrainer",
        {"loss_type": "kto", "per_device_train_batch_size": 2},
    ),
    "loss_type is 'sft', which is a mean over the tokens": ("DPOTrainer", {"loss_type": ["sigmoid", "sft"]}),
    "loss_type is 'aot', which sorts": ("DPOTrainer", {"loss_type": ["aot"]}),
    "train_sampling_strategy": ("RewardTrainer", {"train_sampling_strategy": "group_by_length"}),
}
"""Message -> trainer and arguments."""


@pytest.mark.parametrize("message", REFUSED)
def test_a_loss_that_is_no_mean_over_samples_is_refused(message, tmp_path):
    """With its argument, before anything is probed."""
    host, keys = REFUSED[message]
    trainer = trainer_of(host, tmp_path, **keys)
    with pytest.raises(ArgumentError, match=message):
        use_plan(trainer, plan_of(trainer))


def test_pairs_of_other_lengths_are_refused(tmp_path):
    """And rows over ranks, which pairs have not."""
    trainer = trainer_of("RewardTrainer", tmp_path)
    lengths = row_lengths(trainer)
    with pytest.raises(StaleError, match="sample 3"):
        use_plan(trainer, pp.plan([*lengths[:3], lengths[3] + 1, *lengths[4:]], 100))
    with pytest.raises(ArgumentError, match="sequence_parallel_size is set"):
        use_plan(trainer, plan_of(trainer), sequence_parallel_size=2)


CHANGED = {
    "DPOTrainer": {"beta": 0.2, "loss_type": ["ipo"], "label_smoothing": 0.1, "learning_rate": 0.2},
    "KTOTrainer": {"desirable_weight": 2.0},
    "RewardTrainer": {"center_rewards_coefficient": 0.5},
}
"""Trainer -> settings of its loss with other values."""


@pytest.mark.parametrize("host", CHANGED if HOSTED else ["DPOTrainer"])
def test_a_loss_that_a_resume_would_change_is_refused(host, tmp_path):
    """Each setting is named, and so is another reference model; nothing is trained."""
    losses_of(trainer_of(host, tmp_path, max_steps=2, save_strategy="steps", save_steps=1))
    changed, names = trainer_of(host, tmp_path, max_steps=2, **CHANGED[host]), [*CHANGED[host]]
    if host != "RewardTrainer":
        changed.ref_model.config.name_or_path, names = "other/model", [*names, "ref_model"]
    use_plan(changed, plan_of(changed))

    with pytest.raises(StaleError) as raised:
        changed.train(resume_from_checkpoint=True)

    assert {*names} == {one.key.split(".")[0] for one in raised.value.details["differences"]}
    assert 0 == changed.state.global_step
