"""Ranks that share a packed row compute what each sequence gives alone."""

import json
import os

import pytest
import torch

from packplan.adapters.attention.shared_rows import attention_for_shared_rows, context_parallel
from packplan.core.context_parallel import PackedLayout
from packplan.core.equality import VARLEN, AttentionChoice
from packplan.core.errors import ModelError
from tests.e2e import context_parallel_rank, rank_main
from tests.e2e.unpad_rank import build
from tests.nearness import FLOAT32
from tests.processes import finished

_IN_CI = pytest.mark.skipif(
    "FOUR_RANKS" not in os.environ, reason="four ranks run in .ci/run alone, which has the time"
)

SHARED = {
    "grouped heads": {"family": "qwen2"},
    "heads that ranks do not divide": {"family": "qwen2", "num_attention_heads": 10, "num_key_value_heads": 2},
    "fewer heads than ranks": {"family": "qwen2", "num_attention_heads": 1, "num_key_value_heads": 1},
    "windows": {"family": "gemma3_text"},
    "attention of its own code": {"family": "gemma2", "num_key_value_heads": 4},
    "experts": {"family": "qwen3_moe"},
    "layers computed again": {"family": "qwen2", "checkpointing": True},
    "a loop of one's own": {"folder": "{models}/qwen3", "checkpointing": True},
    "a loop that gives no positions": {"folder": "{models}/qwen2", "give_positions": False},
    "a loop in bfloat16": {"folder": "{models}/qwen2", "dtype": "bfloat16"},
}
"""Cases of `context_parallel_rank`: models that share rows, or in loops that give them a part."""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=_IN_CI)])
def test_ranks_that_share_a_row_get_what_each_sequence_gives_alone(server, demo, tmp_path, world_size):
    """
    The loss of labels, of those that ms-swift keeps, and logits; the gradients over the ranks;
    nothing passes between samples; a call that is no packed row is each rank's own.
    """
    cases = {name: {**case, "folder": case["folder"].format(models=demo / "models")} if "folder" in case else case
             for name, case in SHARED.items()}  # fmt: skip
    ranks = server.ranks(world_size, context_parallel_rank.main, str(tmp_path), cases, folder=tmp_path)
    assert [0] * world_size == finished(ranks)

    for rank in range(world_size):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert found.keys() == SHARED.keys()
        assert {} == {case: differ for case, differ in found.items() if not max(differ) < 1}


@pytest.fixture
def group_of_one():
    """Be the only rank of a group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_row_that_nobody_shares_is_the_row(group_of_one):
    """Two sequences, without position ids being given; afterwards the model is as it was."""
    model, tokens = build("gpt2"), torch.arange(8)[None]  # it has absolute positions
    plain = model(tokens).logits
    expected = torch.cat([model(tokens[:, :3]).logits, model(tokens[:, 3:]).logits], dim=1)

    with context_parallel(model, layout=PackedLayout.from_lengths([3, 5])):
        found = model(tokens).logits

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(plain, model(tokens).logits)
    assert not torch.equal(plain, found)
    assert not model._forward_pre_hooks


def test_what_cannot_be_computed_is_refused(group_of_one):
    """Another number of ranks or positions, a mask, layers that carry a state."""
    model, tokens = build("gpt2"), torch.arange(8)[None]
    with (
        pytest.raises(ValueError, match="for 2 ranks, but the group has 1"),
        context_parallel(model, layout=PackedLayout.from_lengths([8], cp_size=2)),
    ):
        pass
    with context_parallel(model, layout=PackedLayout.from_lengths([9])):
        with pytest.raises(ValueError, match="9 positions, of which a rank has 9, but 8 are given"):
            model(tokens, position_ids=torch.arange(8)[None])
        with pytest.raises(ValueError, match="a mask is given"):
            model(tokens, attention_mask=torch.zeros_like(tokens))
    with pytest.raises(ModelError, match="layers that carry a state"):
        attention_for_shared_rows(AttentionChoice(VARLEN, split=("Mamba",)))


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks_to_a_row(write_run, execute, start_ranks, few_scenes, tmp_path):
    """With images and adapters: two ranks to a row take the steps of one, also after a resume."""
    keys = {"effective_batch_size": 2, "tuner_type": "lora", "lora_dropout": 0, "max_steps": 3, "num_train_epochs": 2,
            "save_strategy": "steps", "save_steps": 2, "packing_drop_last": False}  # fmt: skip
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(few_scenes)}
    overlay = {"custom": custom, "template": {"max_length": 500}}
    shared = write_run(training={**keys, "sequence_parallel_size": 2}, **overlay)
    assert [0, 0] == finished(start_ranks(2, shared, tmp_path))
    ranks = rank_main.seen(tmp_path, 2)
    assert ranks[0]["samples"] == ranks[1]["samples"]

    keys["resume_from_checkpoint"] = str(tmp_path / "run" / "checkpoint-2")
    resumed = execute(write_run(name="again", training=keys, **overlay))
    alone = execute(write_run(name="alone", training={**keys, "resume_from_checkpoint": None}, **overlay))

    found, left, expected = (
        [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
        for history in (ranks[0]["history"], resumed.history, alone.history)
    )
    assert found == pytest.approx(expected, rel=FLOAT32)
    assert left[-2:] == pytest.approx(expected[-2:], rel=FLOAT32)
