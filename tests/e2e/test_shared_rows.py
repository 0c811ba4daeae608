"""Ranks that share a packed row compute what each sequence gives alone."""

import pytest
import torch

from packplan.adapters.context_parallel import ATTENTION, context_parallel
from packplan.core.context_parallel import PackedLayout
from tests.e2e import context_parallel_rank
from tests.e2e.context_parallel_rank import load, sequences, token_loss
from tests.nearness import FLOAT32, apart, norm
from tests.processes import finished

MODELS = ["qwen2", "qwen3"]


@pytest.fixture
def models(demo):
    """Return the folder of the demo's models."""
    return demo / "models"


@pytest.fixture
def shared(server, tmp_path):
    """Return a function that runs cases on ranks, and returns what each gave."""

    def run(world_size, cases):
        ranks = server.ranks(world_size, context_parallel_rank.main, str(tmp_path), cases, folder=tmp_path)
        assert [0] * world_size == finished(ranks)
        return {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in cases}

    return run


def alone(folder, dtype="float32") -> dict:
    """Return what the plain model gives each sequence by itself."""
    model = load(str(folder), dtype)
    logits, loss, scale, gradients = [], torch.zeros(()), 0.0, {}
    for tokens in sequences():
        model.zero_grad()
        logits.append(model(input_ids=tokens[None]).logits[0])
        own = token_loss(logits[-1], torch.cat([tokens[1:], torch.tensor([-1])]))
        own.backward()
        loss = loss + own.detach()
        mine = {name: p.grad for name, p in model.named_parameters()}
        scale += norm(mine)
        gradients |= {name: gradients.get(name, 0) + gradient for name, gradient in mine.items()}
    return {"logits": torch.cat(logits).detach(), "loss": loss, "gradients": gradients, "scale": scale}


def differences(found, expected) -> dict[str, float]:
    """Return how far results are apart, each on the scale of its terms."""
    return {
        **{name: apart({"": found[name]}, {"": expected[name]}) for name in ("logits", "loss")},
        "gradients": apart(found["gradients"], expected["gradients"], scale=expected["scale"]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_logits_and_gradients_are_those_of_each_sequence_alone(shared, models, world_size):
    """With gradient checkpointing and without positions; equal causal work; bfloat16 too."""
    cases = {model: {"folder": str(models / model)} for model in MODELS}
    cases["qwen2"]["give_positions"] = False
    cases["checkpointing"] = {"folder": str(models / "qwen3"), "checkpointing": True}
    cases["bfloat16"] = {"folder": str(models / "qwen2"), "dtype": "bfloat16"}

    found = shared(world_size, cases)

    expected = {model: alone(models / model) for model in MODELS}
    for case, model in [("qwen2", "qwen2"), ("qwen3", "qwen3"), ("checkpointing", "qwen3")]:
        assert max(differences(found[case], expected[model]).values()) < FLOAT32, case
        assert 1 == len(set(found[case]["work"]))
    rounding = differences(alone(models / "qwen2", "bfloat16"), expected["qwen2"])
    for what, difference in differences(found["bfloat16"], expected["qwen2"]).items():
        assert difference < max(2 * rounding[what], 1e-3), what


@pytest.mark.slow
def test_a_fault_is_seen(shared, models):
    """Another sequence is seen, targets rolled inside a part, parts out of order."""
    faults = ["leak", "late targets", "unrestored"]

    found = shared(2, {fault: {"folder": str(models / "qwen3"), "fault": fault} for fault in faults})

    expected = alone(models / "qwen3")
    seen = {fault: differences(found[fault], expected) for fault in faults}
    assert seen["leak"]["logits"] > 1e-3
    assert seen["unrestored"]["logits"] > 1e-3
    assert seen["late targets"]["logits"] < FLOAT32
    assert min(seen[fault]["gradients"] for fault in faults) > 1e-3


@pytest.fixture
def group_of_one():
    """Be the only rank of a group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def qwen3(models):
    """Return a model, with a sequence of eight tokens."""
    return load(str(models / "qwen3")), torch.arange(8)[None]


def test_a_row_that_nobody_shares_is_the_row(group_of_one, qwen3):
    """Two sequences, without position ids being given; afterwards the model is as it was."""
    model, tokens = qwen3
    plain = model(tokens).logits
    expected = torch.cat([model(tokens[:, :3]).logits, model(tokens[:, 3:]).logits], dim=1)

    with context_parallel(model, layout=PackedLayout.from_lengths([3, 5])):
        found = model(tokens).logits

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(plain, model(tokens).logits)
    assert not torch.equal(plain, found)
    assert not model._forward_pre_hooks


def test_what_cannot_be_computed_is_refused(group_of_one, qwen3):
    """Another number of ranks or positions, a mask, a window, a model outside of its context."""
    model, tokens = qwen3
    with (
        pytest.raises(ValueError, match="for 2 ranks, but the group has 1"),
        context_parallel(model, layout=PackedLayout.from_lengths([8], cp_size=2)),
    ):
        pass
    with context_parallel(model, layout=PackedLayout.from_lengths([9])):
        with pytest.raises(ValueError, match="9 of 9 positions, but this one has 8"):
            model(tokens, position_ids=torch.arange(8)[None])
        with pytest.raises(ValueError, match="attention_mask is given"):
            model(tokens, attention_mask=torch.ones_like(tokens))
    model.model.layers[0].self_attn.sliding_window = 4
    with (
        context_parallel(model, layout=PackedLayout.from_lengths([8])),
        pytest.raises(ValueError, match="without a sliding window"),
    ):
        model(tokens)
    model.set_attn_implementation(ATTENTION)
    with pytest.raises(ValueError, match="outside of `context_parallel`"):
        model(tokens)
