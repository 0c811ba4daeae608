"""Steps of `balance` are the trainer's own: loss, gradients and logged values."""

import re
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest

pytest.importorskip("trl")

# isort: split
import attrs
import torch
import trl
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from packplan.adapters.hf.balance import _BalanceState, split_microbatches
from packplan.adapters.hf.batches import BatchCounts, join_rows, split_batch
from packplan.adapters.hf.refusals import _LOSSES, is_old_trl
from packplan.core.errors import ArgumentError
from packplan.hf import balance, unpad
from tests.e2e.unpad_rank import shard
from tests.hosts.law import PLAIN_STEPS, arguments, fork_ranks, model_of, tokenizer
from tests.nearness import apart as distance

# Newer transformers warns of a property that TRL reads.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

ROWS, PROMPT, ANSWER = 4, 6, 20

MAX_TOKENS = 45

NEAR = 1e-12 if is_old_trl() else 1e-6
"""Relative differences of float64; the head of newer TRL takes float32."""

NEWER = {"luspo", "vespo"} if is_old_trl() else set()
"""Losses that older TRL lacks, or divides by padding."""

LOSSES = {"RLOOTrainer": [None], "GRPOTrainer": [loss for loss in _LOSSES if loss not in NEWER]}

MEANS_OF_RANKS = ("entropy", "kl", "clip_ratio")
"""Beginnings of values of which older TRL logs a mean or extreme of the ranks' means."""


def trainer_of(host, out, *, dtype=torch.float64, peft_config=None, **settings):
    """Return a trainer as its users make it, of a model whose weights tell rows apart."""
    common = {
        "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 1e-3,
        "num_generations": 2, "max_completion_length": ANSWER, "beta": 0.0,
        ("gradient_checkpointing" if is_old_trl() else "activation_checkpointing"): False,
    }  # fmt: skip
    args = getattr(trl, host.replace("Trainer", "Config"))
    return getattr(trl, host)(
        model_of("qwen2", vocab_size=60, initializer_range=0.3, pad_token_id=0, use_cache=False).to(dtype),
        args=arguments(args, out, **common | PLAIN_STEPS | settings),
        reward_funcs=lambda completions, **_: [float(number % 3) for number in range(len(completions))],
        train_dataset=Dataset.from_dict({"prompt": ["<end>"] * 64}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def batch_of(seed, longest=1.0):
    """Return a batch as generation makes it; perhaps of short answers."""
    draw = torch.Generator().manual_seed(seed)

    def mask_of(width, most):
        return (torch.arange(width) < torch.randint(1, most + 1, (ROWS, 1), generator=draw)).long()

    masks = {"prompt": mask_of(PROMPT, PROMPT).flip(1), "completion": mask_of(ANSWER, int(ANSWER * longest))}
    batch = {f"{name}_ids": torch.randint(2, 60, mask.shape, generator=draw) * mask for name, mask in masks.items()}
    logps = -torch.rand(2, ROWS, ANSWER, generator=draw, dtype=torch.float64) * 4 * masks["completion"]
    return batch | {f"{name}_mask": mask for name, mask in masks.items()} | {
        "advantages": torch.randn(ROWS, generator=draw, dtype=torch.float64), "num_items_in_batch": torch.tensor(97),
        "old_per_token_logps": logps[0], "ref_per_token_logps": logps[1],
        "old_logps": -5.5 * masks["completion"].sum(1).double(),
    }  # fmt: skip


def joined(batches):
    """Return one batch of all rows."""
    return {key: torch.cat([one[key] for one in batches]) if own.dim() else own for key, own in batches[0].items()}


def step_of(trainer, batches, model=None):
    """Return loss, gradients and logged values of a step, as the trainer's loop makes it."""
    model = model or trainer.model
    trainer._buffered_inputs, trainer._step, trainer.num_iterations = batches, len(batches), 10**9
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = len(batches)
    model.zero_grad()
    given, num_items = trainer.get_batch_samples(iter([dict(batch) for batch in batches]), len(batches), "cpu")
    loss = 0.0
    for number, batch in enumerate(given, 1):
        with trainer.accelerator.no_sync(model) if number < len(given) else nullcontext():
            loss = loss + trainer.training_step(model, batch, num_items)
    # The mean over ranks is what a trainer logs; DDP has the mean of the gradients.
    loss = trainer.accelerator.reduce(loss, reduction="mean")
    trained = {name: one.grad for name, one in trainer.model.named_parameters() if one.requires_grad}
    trained = {name: getattr(one, "full_tensor", one.clone)() for name, one in trained.items()}
    logged = trainer._metrics["train"]
    means = {name: sum(values) / len(values) for name, values in logged.items() if name != "step_time"}
    logged.clear()
    return {"loss": loss, "gradients": trained, "logged": means}


def nearness(one, other):
    """Return the largest relative difference of the losses and of the gradients of two steps."""
    return max(float(abs(one["loss"] / other["loss"] - 1)), distance(one["gradients"], other["gradients"]))


def calls_of(model):
    """Return a list that gets the real tokens, positions and rows of each call of a model."""
    calls = []

    def note(_, args, given):
        mask = given["attention_mask"]
        calls.append((int(mask.sum()), mask.numel(), mask.shape[0]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


@pytest.mark.parametrize("host", LOSSES)
def test_a_step_is_the_trainers_own(host, tmp_path):
    """Each loss; logged values are those of a step of one batch, microbatches within the limit."""
    trainer, batches, own, once = trainer_of(host, tmp_path), [batch_of(0), batch_of(1)], {}, {}

    def set_loss(loss):
        trainer.beta, trainer.loss_type, trainer.args.loss_type = 0.04, loss, loss

    for loss in LOSSES[host]:
        set_loss(loss)
        own[loss], once[loss] = step_of(trainer, batches), step_of(trainer, [joined(batches)])
        if loss == "bnpo":
            assert nearness(own[loss], once[loss]) > 1e-4  # its divisor is of a batch
    counts, calls = balance(trainer, max_tokens=MAX_TOKENS), calls_of(trainer.model)
    for loss in LOSSES[host]:
        set_loss(loss)
        new = step_of(trainer, batches)
        assert nearness(own[loss], new) < NEAR, loss
        assert set(own[loss]["logged"]) == set(new["logged"])
        for name, value in once[loss]["logged"].items():
            assert new["logged"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), (loss, name)
    assert all(tokens <= MAX_TOKENS or rows == 1 for tokens, _, rows in calls)
    assert counts.steps == len(LOSSES[host]) < counts.microbatches / 2


def test_microbatches_without_rows_weigh_nothing(tmp_path):
    """A rank with fewer rows computes fillers, which change neither loss nor what is logged."""
    trainer, batches, own = trainer_of("GRPOTrainer", tmp_path), [batch_of(0), batch_of(1)], {}
    for loss in LOSSES["GRPOTrainer"]:
        trainer.loss_type = trainer.args.loss_type = loss
        own[loss] = step_of(trainer, batches)
    counts, divide = balance(trainer, max_tokens=MAX_TOKENS), _BalanceState.microbatches
    with mock.patch.object(_BalanceState, "microbatches", lambda *given: [*divide(*given), []]):
        for loss in LOSSES["GRPOTrainer"]:
            trainer.loss_type = trainer.args.loss_type = loss
            assert nearness(own[loss], step_of(trainer, batches)) < NEAR, loss
    assert counts.tokens == counts.steps * int(sum(BatchCounts.from_batch(one).attended for one in batches))


def test_ratios_of_importance_are_one_at_padding():
    """The ratio of two equal probabilities, whose logarithm is 0: losses sum it over a row."""
    batch = batch_of(0)
    batch["importance_sampling_ratio"] = batch["completion_mask"] * 0.5
    rows = split_batch(batch).rows

    joined_again = join_rows(rows, pad_token_id=0)

    ratios, own = joined_again["importance_sampling_ratio"], joined_again["completion_mask"].bool()
    assert not own.all()
    assert {0.5} == {*ratios[own].tolist()}
    assert {1.0} == {*ratios[~own].tolist()}


def test_a_step_whose_answers_are_all_cut_off_is_the_trainers_own(tmp_path):
    """As `mask_truncated_completions` masks them: loss and logged values, which may be nan."""
    trainer, batches = trainer_of("GRPOTrainer", tmp_path), [batch_of(0), batch_of(1)]
    for batch in batches:
        batch |= {"completion_mask": 0 * batch["completion_mask"], "num_items_in_batch": torch.tensor(0)}
    found = []
    for balances in (False, True):
        if balances:
            balance(trainer, max_tokens=MAX_TOKENS)
        for loss in LOSSES["GRPOTrainer"]:
            trainer.loss_type = trainer.args.loss_type = loss
            step = step_of(trainer, batches)
            extremes = ("clip_ratio/low_min", "clip_ratio/high_max")  # of no token: any number
            logged = {name: value for name, value in step["logged"].items() if name not in extremes}
            found.append({"loss": float(step["loss"]), **logged})
    for own, new in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        assert own == pytest.approx(new, nan_ok=True)


@pytest.mark.parametrize("adapters", [None, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)])
def test_padded_microbatches_in_float32(adapters, tmp_path):
    """Rows times the longest are within the limit, of batches of several widths; LoRA too."""
    trainer = trainer_of("GRPOTrainer", tmp_path, dtype=torch.float32, peft_config=adapters, loss_type="dr_grpo")
    batches = [batch_of(0), batch_of(1, longest=0.3), batch_of(2)]
    for key, value in batches[1].items():
        if value.dim() > 1:
            batches[1][key] = value[:, 2:] if key.startswith("prompt") else value[:, :7]
    own = step_of(trainer, batches)
    balance(trainer, max_tokens=96, padded=True, length_multiple=4)
    calls = calls_of(trainer.model)
    assert nearness(own, step_of(trainer, batches)) < 3e-6
    assert all(positions <= 96 for _, positions, _ in calls)
    assert 3 <= len(calls) < 12


@pytest.mark.parametrize(
    ("max_tokens", "hooked", "said"),
    [(40, False, "has [4-9][0-9] positions with padding, but max_tokens is 40: call unpad"), (40, True, None),
     (5, True, "6 of 8 rows in the first step are longer than 5 tokens, up to 2[0-9], .*: raise max_tokens")],
)  # fmt: skip
def test_a_limit_that_padding_or_most_rows_exceed_is_told_once(max_tokens, hooked, said, tmp_path, caplog):
    trainer = trainer_of("GRPOTrainer", tmp_path, dtype=torch.float32)
    if hooked:
        unpad(trainer.model)
    balance(trainer, max_tokens=max_tokens)
    for _ in range(2):
        step_of(trainer, [batch_of(0), batch_of(1)])

    told = [text for text in caplog.messages if "max_tokens" in text]
    assert (said is not None) == len(told)
    assert all(re.search(said, text) for text in told)


def test_log_probabilities_without_gradients_have_a_limit_of_their_own(tmp_path):
    """Those of GRPO, packed and padded."""
    trainer, batch = trainer_of("GRPOTrainer", tmp_path), joined([batch_of(0), batch_of(1)])
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    given = (trainer.model, ids, mask, ANSWER, 4)
    with torch.no_grad():
        own = trainer._get_per_token_logps_and_entropies(*given, compute_entropy=True)
        balance(trainer, max_tokens=500, logprob_max_tokens=40)
        calls = calls_of(trainer.model)
        new = trainer._get_per_token_logps_and_entropies(*given, compute_entropy=True)
    assert len(own) == len(new)
    for before, after in zip(own[:2], new, strict=False):
        torch.testing.assert_close(*(one * batch["completion_mask"] for one in (after, before)), rtol=1e-6, atol=1e-6)
    assert max(tokens for tokens, _, _ in calls) <= 40


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
        refuse(own, f"with its own loss, not a {name}")


def test_a_run_logs_the_same(tmp_path):
    """Fewer rows at the end of an epoch; answers that are generated and trained twice."""
    logs = []
    for limit in (None, 30):
        trainer = trainer_of("GRPOTrainer", tmp_path, num_iterations=2, max_steps=3)
        trainer.train_dataset = trainer.train_dataset.select(range(14))
        if limit:
            balance(trainer, max_tokens=limit)
        trainer.train()
        logs.append([[entry[key] for key in ("loss", "grad_norm")] for entry in trainer.state.log_history[:-1]])
    assert 3 == len(logs[0])
    assert logs[0] == [pytest.approx(entry, rel=1e-5) for entry in logs[1]]


def test_two_ranks_train_the_same(apart, tmp_path):
    """Rows move for losses over rows or the step; they stay where a divisor is of a batch."""
    apart(fork_ranks, 2, hold_rank, folder=tmp_path)


def hold_rank(rank):
    """Hold steps of two ranks against the trainers' own; an error fails the rank."""
    for loss, share in (("dapo", None), ("dr_grpo", shard), ("bnpo", None)):
        trainer = trainer_of("GRPOTrainer", "out", loss_type=loss, ddp_find_unused_parameters=False)
        model = (share or trainer.accelerator.prepare)(trainer.model)
        batches = [batch_of(10 * rank + number, longest=1 / (1 + rank)) for number in (0, 1)]
        own, once = step_of(trainer, batches, model), step_of(trainer, [joined(batches)], model)
        counts = balance(trainer, max_tokens=70)
        new = step_of(trainer, batches, model)
        held = trainer.accelerator.gather(torch.tensor([[counts.microbatches, counts.tokens, counts.moved]])).tolist()
        assert nearness(own, new) < NEAR, (loss, nearness(own, new), "what divides it? see _divisor_kind")
        assert held[0][0] == held[1][0] > 1
        assert (loss == "bnpo") == (held[0][2] == held[1][2] == 0)
        if loss != "bnpo":
            assert abs(held[0][1] - held[1][1]) < 0.2 * held[0][1]  # the ranks' own rows: half as many
        for name, value in once["logged"].items():
            if not (is_old_trl() and name.startswith(MEANS_OF_RANKS)):
                assert new["logged"][name] == pytest.approx(value, rel=1e-6, abs=1e-7), (loss, name)


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
