"""Steps of `balance` are the trainer's own: loss, gradients and logged values."""

from functools import partial

import pytest

pytest.importorskip("trl")

# isort: split
import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from packplan.adapters.hf.balance import split_microbatches
from packplan.adapters.hf.refusals import is_old_trl
from packplan.adapters.hf.rows import BatchCounts, join_rows, split_batch
from packplan.core.errors import ArgumentError
from packplan.hf import balance
from tests.hosts.balanced import NEAR, ROWS, batch_of, joined, nearness, step_of, trainer_of

# Newer transformers warns of a property that TRL reads.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

MAX_TOKENS = 45

LOSSES = {"RLOOTrainer": [None], "GRPOTrainer": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]}
if not is_old_trl():
    LOSSES["GRPOTrainer"] += ["luspo", "vespo"]


def set_loss(trainer, loss):
    """Let a trainer compute another loss."""
    trainer.beta, trainer.loss_type, trainer.args.loss_type = 0.04, loss, loss


def limits_of(model, seen):
    """Note the real tokens and the positions of each call of a model."""

    def note(_, args, given):
        mask = given["attention_mask"]
        seen.append((int(mask.sum()), mask.numel(), mask.shape[0]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize("host", LOSSES)
def test_a_step_is_the_trainers_own(host, tmp_path):
    """Each loss; logged values are those of a step of one batch, microbatches within the limit."""
    trainer, batches, own, once = trainer_of(host, tmp_path), [batch_of(0), batch_of(1)], {}, {}
    for loss in LOSSES[host]:
        set_loss(trainer, loss)
        own[loss], once[loss] = step_of(trainer, batches), step_of(trainer, [joined(batches)])
        if loss == "bnpo":
            assert nearness(own[loss], once[loss]) > 1e-4  # its divisor is of a batch
    counts, seen = balance(trainer, max_tokens=MAX_TOKENS), limits_of(trainer.model, [])
    for loss in LOSSES[host]:
        set_loss(trainer, loss)
        new = step_of(trainer, batches)
        assert nearness(own[loss], new) < NEAR[host], loss
        assert set(own[loss]["logged"]) == set(new["logged"])
        for name, value in once[loss]["logged"].items():
            assert new["logged"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), (loss, name)
    assert all(tokens <= MAX_TOKENS or rows == 1 for tokens, _, rows in seen)
    assert counts.steps == len(LOSSES[host]) < counts.microbatches / 2


@pytest.mark.parametrize("adapters", [None, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)])
def test_padded_microbatches_in_float32(adapters, tmp_path):
    """Rows times the longest are within the limit; lengths count in multiples; LoRA too."""
    trainer = trainer_of("GRPOTrainer", tmp_path, dtype=torch.float32, peft_config=adapters)
    batches = [batch_of(0), batch_of(1), batch_of(2)]
    own = step_of(trainer, batches)
    balance(trainer, max_tokens=96, padded=True, length_multiple=4)
    seen = limits_of(trainer.model, [])
    assert nearness(own, step_of(trainer, batches)) < 3e-6
    assert all(positions <= 96 for _, positions, _ in seen)
    assert 3 <= len(seen) < 12


def test_log_probabilities_without_gradients_have_a_limit_of_their_own(tmp_path):
    """Those of GRPO, packed and padded."""
    trainer = trainer_of("GRPOTrainer", tmp_path)
    batch = joined([batch_of(0), batch_of(1)])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    answers = batch["completion_mask"]
    ask, given = trainer._get_per_token_logps_and_entropies, (trainer.model, ids, mask, answers.shape[1], 4)
    with torch.no_grad():
        own = ask(*given, compute_entropy=True)
        balance(trainer, max_tokens=500, logprob_max_tokens=40)
        seen = limits_of(trainer.model, [])
        new = trainer._get_per_token_logps_and_entropies(*given, compute_entropy=True)
    assert len(own) == len(new)
    for before, after in zip(own[:2], new, strict=False):
        assert before.shape == after.shape
        assert torch.allclose(before * answers, after * answers, rtol=1e-6, atol=1e-6)
    assert max(tokens for tokens, _, _ in seen) <= 40


def test_rows_of_several_widths_are_joined(tmp_path):
    """Batches of one step come from generations of other widths."""
    trainer = trainer_of("GRPOTrainer", tmp_path, loss_type="dr_grpo")
    batches = [batch_of(0), batch_of(1, longest=0.3)]
    for key, value in batches[1].items():
        if value.dim() > 1:
            batches[1][key] = value[:, 2:] if key.startswith("prompt") else value[:, :7]
    own = step_of(trainer, batches)
    balance(trainer, max_tokens=60)
    assert nearness(own, step_of(trainer, batches)) < 1e-6  # positions of prompts start elsewhere


def test_losses_that_cannot_be_cut_are_refused_by_name(tmp_path):
    """By the argument; a trainer with a loss of its own, and one that is balanced already, too."""

    def refuse(trainer, word):
        with pytest.raises(ArgumentError, match=word):
            balance(trainer, max_tokens=100)

    for name, value in {"loss_type": "mine", "top_entropy_quantile": 0.2, "use_liger_kernel": True}.items():
        trainer = trainer_of("GRPOTrainer", tmp_path)
        setattr(trainer.args, name, value)
        refuse(trainer, name)
    trainer = trainer_of("RLOOTrainer", tmp_path)
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 0.01
    refuse(trainer, r"router_aux_loss_coef is 0\.01")
    trainer.aux_loss_enabled = False
    balance(trainer, max_tokens=100)
    refuse(trainer, "already")
    for name in ("Mine", "RLOOTrainer"):  # as ms-swift names its own
        own = trainer_of("RLOOTrainer", tmp_path)
        own.__class__ = type(name, (type(own),), {"compute_loss": lambda *_: 0})
        refuse(own, f"{name} is not GRPOTrainer or RLOOTrainer of TRL")


def test_a_run_logs_the_same(tmp_path):
    """Fewer rows at the end of an epoch; answers that are generated and trained twice."""
    logs = []
    for limit in (None, 30):
        trainer = trainer_of("GRPOTrainer", tmp_path, num_iterations=2, max_steps=3)
        trainer.train_dataset = trainer.train_dataset.select(range(14))
        trainer.args.max_epochs = None  # ms-swift's callbacks ask for it, once it was imported
        if limit:
            balance(trainer, max_tokens=limit)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    assert len(logs[0]) == 3
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_two_ranks_train_the_same(apart, tmp_path):
    """Rows move for losses over rows or the step; they stay where a divisor is of a batch."""
    apart("tests.hosts.balanced:main", folder=tmp_path)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 20))
def test_splitting_keeps_every_row_in_order(sizes, num):
    """No microbatch is empty while another could be split."""
    numbers = iter(range(100))
    microbatches = [[next(numbers) for _ in range(size)] for size in sizes]

    split = split_microbatches(microbatches, num)

    assert [one for part in microbatches for one in part] == [one for part in split for one in part]
    assert max(len(sizes), num) == len(split)
    assert all(split) or all(len(part) <= 1 for part in split)


@given(st.integers(0, 99), st.permutations(range(ROWS)), st.integers(1, ROWS - 1))
def test_rows_are_the_same_after_they_were_apart(seed, order, cut):
    """Any order of the rows; counts of parts add up to those of the whole."""
    batch, join = batch_of(seed), partial(join_rows, pad_token_id=0)
    rows = split_batch(batch).rows

    back = join([join([rows[at]]) for at in order])
    parts = [BatchCounts.from_batch(join([rows[at] for at in part])) for part in (order[:cut], order[cut:])]

    for key, value in batch.items():
        wanted = value[list(order)] if value.dim() else value
        width = back[key].shape[1] if value.dim() > 1 else None
        assert torch.equal(wanted[:, :width] if width else wanted, back[key]), key
        assert width is None or not wanted[:, width:].clamp(min=0).any()
    assert attrs.astuple(BatchCounts.from_batch(batch)) == tuple(map(sum, zip(*map(attrs.astuple, parts), strict=True)))
