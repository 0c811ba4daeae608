"""A policy's answers are drawn from its own distribution, by keys, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.rl import draw_keys
from tests.nearness import FLOAT32, apart

pytestmark = pytest.mark.slow

VOCABULARY, PADDING, ENDS = 40, 0, (3, 11, 17, 29)

FAMILIES = {
    "qwen2": {},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "head_dim": 8,
    },
}  # fmt: skip
"""Caches of full attention, of windows, of convolutions and of a recurrence."""


def tiny(family: str):
    """Return a model of random weights that are far enough apart to draw unequally."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4, "eos_token_id": None,
        "pad_token_id": PADDING, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **keys | FAMILIES[family])).eval()


def prompts_of(lengths):
    """Return prompts padded on the left."""
    ids = torch.zeros((len(lengths), max(lengths)), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, ids.shape[1] - length :] = torch.arange(length) % 7 + 4 + row
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def answers_of(model, lengths, keys):
    """Return the answers to prompts, as lists of tokens and of log-probabilities."""
    from packplan.adapters.answers import generate

    found = generate(model, prompts_of(lengths), keys=keys, temperature=2.0, padding=PADDING, ends=ENDS)
    assert (len(keys), int(found.lengths.max())) == found.tokens.shape == found.log_probabilities.shape
    for tokens, logs, length in zip(found.tokens, found.log_probabilities, found.lengths, strict=True):
        assert {PADDING} >= set(tokens[length:].tolist())
        assert not logs[length:].any()
    return [
        (tokens[:length].tolist(), logs[:length])
        for tokens, logs, length in zip(found.tokens, found.log_probabilities, found.lengths.tolist(), strict=True)
    ]


def split_mix(key: int, token: int) -> float:
    """Return the uniform number of a token, by the paper's definition on whole numbers."""
    bits = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return ((bits ^ bits >> 31) // 2**12 + 0.5) / 2**52


def drawn_alone(model, prompt, keys, *, temperature=2.0):
    """Draw an answer token by token: one row, no padding, no cache, noise in whole numbers."""
    ids, logs = list(prompt), []
    for key in keys.tolist():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double() / temperature
        noise = [-np.log(-np.log(split_mix(key, token))) for token in range(VOCABULARY)]
        ids.append(int(np.argmax(logits.numpy() + noise)))
        logs.append(float(logits.log_softmax(-1)[ids[-1]]))
        if ids[-1] in ENDS:
            break
    return ids[len(prompt) :], torch.tensor(logs)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_drawn_together_are_those_drawn_alone(family):
    """
    Tokens and log-probabilities, for short and long prompts, as some answers end and leave the
    batch.
    """
    model, lengths, num = tiny(family), [3, 7, 1], 3
    keys = draw_keys(seed=0, step=0, prompts=np.repeat([5, 0, 9], num), generations=[*range(num)] * 3, num=8)
    prompts = prompts_of(lengths)["input_ids"]

    found = answers_of(model, lengths, keys)

    starts = [prompts[row // num, 7 - lengths[row // num] :].tolist() for row in range(9)]
    expected = [drawn_alone(model, start, own) for start, own in zip(starts, keys, strict=True)]
    assert [tokens for tokens, _ in expected] == [tokens for tokens, _ in found]
    assert len({len(tokens) for tokens, _ in expected}) > 2
    assert len({tuple(tokens) for tokens, _ in expected}) > 5
    for (_, logs), (_, own) in zip(expected, found, strict=True):
        assert apart({"": own}, {"": logs}) < FLOAT32


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_noise_is_that_of_whole_numbers(keys):
    """Bit for bit, also where keys are beyond what is signed."""
    from packplan.adapters.answers import gumbel_noise

    found = gumbel_noise(torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64)), 5)

    uniform = torch.tensor([[split_mix(key, token) for token in range(5)] for key in keys], dtype=torch.float64)
    assert torch.equal(-(-uniform.log()).log(), found)


def test_tokens_are_drawn_as_often_as_is_likely():
    """Within five standard deviations, at each of three temperatures."""
    from packplan.adapters.answers import gumbel_noise

    num, logits = 40_000, torch.tensor([2.0, 0.0, 1.0, -3.0, 1.0], dtype=torch.float64)
    keys = draw_keys(seed=0, step=0, prompts=range(400), generations=[0] * 400, num=num // 400)
    noise = gumbel_noise(torch.from_numpy(keys.ravel().view(np.int64)), len(logits))
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(-1)

        found = (logits / temperature + noise).argmax(-1).bincount(minlength=len(logits)) / num

        assert ((found - expected).abs() < 5 * (expected * (1 - expected) / num).sqrt()).all()
