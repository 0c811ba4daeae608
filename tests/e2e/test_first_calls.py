"""The first call of each kind is compared with its padded pass, and training goes on as before."""

import signal
from functools import partial
from unittest import mock

import pytest
import torch
from transformers import AutoModelForSequenceClassification, DynamicCache

from packplan.adapters.proof import first_calls
from packplan.core.errors import MismatchError
from packplan.hf import unpad
from tests.e2e import unpad_rank
from tests.e2e.unpad_rank import batch_of, build, padded
from tests.processes import finished

pytestmark = pytest.mark.slow


def before(name, change):
    """Return a hook that changes the arguments of a packed call of a module in training."""

    def plant(model):
        def hook(module, args, given):
            shape = next(one.shape for one in [*args, *given.values()] if torch.is_tensor(one))
            return change(args, given) if module.training and shape[0] == 1 else None

        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    return plant


def after(name, change):
    """Return a hook that changes the result of a packed call of a module in training."""

    def plant(model):
        def hook(module, _, output):
            first = output if torch.is_tensor(output) else output[0]
            if not module.training or first.shape[0] != 1:
                return None
            if torch.is_tensor(output):
                return change(output)
            output["last_hidden_state"] = change(first)
            return output

        model.get_submodule(name).register_forward_hook(hook)

    return plant


def columns(states):
    return torch.arange(states.shape[1])[None, :, None]


def roll_labels(model):
    def roll(_, args, given):
        labels = given.get("labels")
        return None if labels is None or len(labels) > 1 else (args, given | {"labels": labels.roll(1, 1)})

    model.register_forward_pre_hook(roll, with_kwargs=True)


def scale_loss(model, term):
    """Change the loss by a term of the states that the text stack computes."""
    seen = []
    model.model.norm.register_forward_hook(lambda _, __, states: seen.append(states))

    def change(module, _, output):
        if module.training:
            output["loss"] = term(output["loss"], seen[-1])

    model.register_forward_hook(change)


def keep_a_cache(model):
    cache = DynamicCache()

    def give(module, args, given):
        return (args, given | {"past_key_values": cache, "use_cache": True}) if module.training else None

    model.model.register_forward_pre_hook(give, with_kwargs=True)


def take_one_row(model):
    """Let the model take an input of each row, of which a packed call takes the first."""

    def add(module, args, given):
        speaker = given.pop("speaker", None)
        if speaker is not None:
            embedded = module.get_input_embeddings()(given.pop("input_ids"))
            given["inputs_embeds"] = embedded + speaker[: len(embedded), None]
        return args, given

    model.model.register_forward_pre_hook(add, with_kwargs=True)


def see_others(model):
    """Attend over the whole row in training."""

    def switch(module, _, given):
        is_packed = module.training and given["input_ids"].shape[0] == 1
        model.set_attn_implementation("sdpa" if is_packed else "packplan")
        return ((), given | {"position_ids": None}) if is_packed else None

    model.model.register_forward_pre_hook(switch, with_kwargs=True)


def pool_the_last_column(model):
    seen = []

    def pool(module, _, output):
        if module.training:
            output["logits"] = module.score(seen[-1][:, -1])

    model.score.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.register_forward_hook(pool)


FAULTS = {
    "positions go on": (before("transformer", lambda args, given: (args, given | {
        "position_ids": torch.arange(given["input_ids"].shape[1])[None]})), "state"),
    "attention over all rows": (see_others, "gradients pass between"),
    "layers that mix neighbours": (after("model.layers.1", lambda one: one + 1e-3 * one.roll(1, 1)), "pass between"),
    "labels of the next row": (roll_labels, "loss"),
    "a loss by positions": (partial(scale_loss, term=lambda loss, one: loss * 40 / one[..., 0].numel()), "loss"),
    "a loss of all positions": (partial(scale_loss, term=lambda loss, one: loss + one.square().mean()), "loss"),
    "an input of each row": (take_one_row, "without speaker the call agrees: leave speaker out"),
    "results of the next token": (after("model", lambda one: one.roll(1, 1)), "pass between"),
    "a head that mixes columns": (before("lm_head", lambda args, _: ((args[0] + args[0].roll(1, 1),), {})), "between"),
    "a token in seven is dropped": (after("model.layers.0", lambda one: one * (columns(one) % 7 != 3)), "state"),
    "a cache": (keep_a_cache, "raises"),
    "no gradient": (after("model", lambda one: one.detach() + 0 * one), "gradient"),
    "half the gradient": (after("model", lambda one: one.detach() / 2 + one / 2), "gradient"),
    "noise by length": (after("model.embed_tokens", lambda one: one * (1 + one.shape[1] / 1e3)), "state"),
    "rounded": (after("model.layers.0", lambda one: one.bfloat16().float()), "state"),
    "a score of the last column": (pool_the_last_column, "logits"),
}  # fmt: skip
"""Fault -> what plants it in a model, and what the first call says of it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_call_finds_what_the_probe_does_not(fault):
    """Faults of training, labels and other inputs; weights have no gradient afterwards."""
    plant, match = FAULTS[fault]
    classifies = "score" in fault
    kind = {"kind": AutoModelForSequenceClassification, "num_labels": 2} if classifies else {}
    model = build("gpt2" if "positions" in fault and "loss" not in fault else "qwen2", **kind)
    plant(model)
    batch = batch_of(padded(left=(0, 0, 0, 0)))
    batch |= {"labels": torch.tensor([0, 1, 1, 0])} if classifies else {}
    batch |= {"speaker": torch.randn(4, 32)} if "each row" in fault else {}

    unpad(model, logits=False)

    with pytest.raises(MismatchError, match=match):
        model.train()(**batch)
    assert all(one.grad is None for one in model.parameters())


def test_training_goes_on_as_without_the_comparison():
    """Losses, gradients, buffers, random state and counts are the same to the last bit."""

    def count(module, *_):
        module.seen.mul_(2)

    def trained(*, check):
        model = build("gpt2", attn_pdrop=0.1, resid_pdrop=0.1).train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.transformer.wte.register_forward_hook(count)
        model.transformer.wte.register_buffer("seen", torch.ones(1))
        hooks = unpad(model, check=check)
        torch.manual_seed(1)
        for seed in range(2):
            loss = model(**batch_of(padded(), seed=seed)).loss
            loss.backward()
        gradients = [one.grad for one in model.parameters()]
        return loss, gradients, model.transformer.wte.seen, torch.get_rng_state(), hooks.counts

    for found, due in zip(trained(check=True), trained(check=False), strict=True):
        torch.testing.assert_close(found, due, atol=0, rtol=0) if torch.is_tensor(found) else None
        assert torch.is_tensor(found) or str(found) == str(due)


@pytest.mark.parametrize("mode", ["training", "no gradients"])
def test_each_kind_is_compared_once(mode):
    """Labels or none, evaluation, and sides of padding are kinds; other tokens are not."""
    model = build("qwen2").train(mode == "training")
    unpad(model)
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))

    def passes(batch, **options):
        calls.clear()
        with torch.set_grad_enabled(mode == "training"):
            model(**batch, **options)
        return len(calls)

    batch, right = batch_of(padded(), seed=1), batch_of(padded(left=(0, 0, 0, 0)))
    assert [3, 1, 3, 1] == [passes(one) for one in (batch_of(padded()), batch, right, right)]
    assert [3, 1] == [passes({**batch, "labels": None}) for _ in range(2)]
    assert 1 == passes(batch_of(padded() | 1)), "nothing is padded"
    for keeps in (3, torch.tensor([0, 5, 2])):  # with logits at padding
        passes({**batch, "labels": None}, logits_to_keep=keeps)


def test_what_changes_with_the_random_state_is_not_compared(caplog):
    """Noise of a user's own has other numbers for other shapes: this is said, and all goes on."""
    model = build("qwen2").train()
    model.model.layers[0].register_forward_hook(
        lambda _, __, one: one + torch.randn_like(one) if model.training else None
    )
    unpad(model)

    model(**batch_of(padded()))

    assert "results are random even without dropout" in caplog.text


@pytest.mark.parametrize("how", ["a fault", "no fault", "killed"])
def test_all_ranks_end_with_what_one_of_them_finds(how, server, tmp_path):
    """
    Before weights are updated, though the other rank compares nothing, and rank 0 ends first.

    Rank 0 may have the store, and waits with it at its end. A killed one has not passed the step.
    """
    ranks = server.ranks(2, unpad_rank.end_together, str(tmp_path), how, folder=tmp_path)

    assert [-signal.SIGKILL if how == "killed" else 0, 0] == finished(ranks)


def test_all_ranks_end_where_one_refuses_a_sharded_model(server, tmp_path):
    """A probe that fails; a wrong module; wrong positions; images or hooks that one rank lacks."""
    assert [0, 0] == finished(server.ranks(2, unpad_rank.refuse_together, folder=tmp_path))


def test_ranks_that_share_weights_stop_asking_each_other(caplog):
    """After some calls without a new kind, by mode; a kind that comes later is told."""
    calls, asked = first_calls.FirstCalls("eager"), []
    model = torch.nn.Linear(1, 1)

    def ask(*, is_new):
        return calls._ask_ranks(model, {"input_ids": 1}, None, is_new=is_new)

    with mock.patch.object(first_calls, "gather_from_ranks", lambda value: asked.append(value) or [(False, 0), value]):
        assert ask(is_new=True)
        assert not any(ask(is_new=False) for _ in range(3 * first_calls._ASKED_CALLS))
        assert len(asked) == 1 + first_calls._ASKED_CALLS
        assert not ask(is_new=True)
        assert "with input_ids, padded right of tokens, is not compared" in caplog.text
        model.eval()
        assert ask(is_new=True)
