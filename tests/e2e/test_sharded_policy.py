"""
A policy whose workers share its weights is the policy of one worker, and a run resumes from its
checkpoints as if it had never ended.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.test_rl import far, one_by_one, write_phases  # noqa: F401  # a fixture
from tests.nearness import FLOAT32
from tests.network import free_port
from tests.processes import finished
from tests.stored import asked

pytestmark = pytest.mark.slow


def packed(multiple: int = 1, **keys: object) -> dict:
    """Return a policy of packed rows whose sequences are padded to a multiple."""
    packing = {"enabled": True, "train_mb_tokens": 80, "sequence_length_round": multiple}
    return {"sequence_packing": packing, **keys}


@pytest.fixture(scope="session")
def four_heads(demo) -> Path:
    """Return a model whose layers four ranks can share, with the demo's tokenizer."""
    from transformers import AutoConfig, Qwen2ForCausalLM

    folder = demo / "models" / "qwen2 of four heads"
    shutil.copytree(demo / "models" / "qwen2", folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_key_value_heads = 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


CASES = {
    2: {
        "fsdp2": ("qwen2", packed(sharding="fsdp2")),
        "tensor": ("qwen3", packed(2, tensor_parallel_size=2)),
    },
    4: {
        "fsdp2 in shared rows": ("qwen2", packed(4, sharding="fsdp2", context_parallel_size=2)),
        "fsdp2 and tensor": ("qwen3", packed(2, sharding="fsdp2", tensor_parallel_size=2)),
        "tensor of four": ("qwen2 of four heads", packed(4, tensor_parallel_size=4)),
        "tensor in shared rows": ("qwen2", packed(8, tensor_parallel_size=2, context_parallel_size=2)),
    },
}
"""Ranks -> model and policy by name; rows are padded to what `padded_length` says."""


@pytest.mark.parametrize("world_size", CASES)
@pytest.mark.usefixtures("four_heads")
def test_workers_that_share_weights_give_what_one_gives(write_phases, demo, server, tmp_path, world_size):  # noqa: F811
    """Log-probabilities, loss and gradients; two workers hold at most 0.65 of the bytes each."""
    from tests.e2e import rl_rank

    cases = {}
    for name, (model, policy) in CASES[world_size].items():
        path = write_phases(name, policy)
        path.write_text(path.read_text().replace(str(demo / "models" / "qwen2"), str(demo / "models" / model)))
        cases[name] = str(asked(path, rl=True)), free_port()
    ranks = server.ranks(world_size, rl_rank.main, cases, str(tmp_path), folder=tmp_path)

    assert [0] * world_size == finished(ranks)

    for name, (model, policy) in CASES[world_size].items():
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert far(found, one_by_one(demo, model)) < FLOAT32, name
        if "fsdp2" in policy.values():
            shares = found["bytes"] / torch.tensor(bytes_of_one(demo / "models" / model))
            assert shares.max() <= 0.65, shares


def bytes_of_one(folder: Path) -> list[int]:
    """Return the bytes of weights, gradients and AdamW's states where one worker holds all."""
    from transformers import AutoModelForCausalLM

    weights = list(AutoModelForCausalLM.from_pretrained(folder).parameters())
    size = sum(one.nbytes for one in weights)
    return [size, size, 2 * size + 4 * len(weights)]
