"""Answers that a model generates to prompts, and their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from packplan.core.errors import ConfigError
from packplan.core.rl import Reward


def generate(
    model: Any, prompts: Mapping[str, torch.Tensor], *, num: int, max_new_tokens: int, temperature: float, padding: int
) -> torch.Tensor:
    """
    Sample answers to prompts, and return their token ids; shape (prompts * num, tokens).

    Args:
        model: Model of transformers.
        prompts: Inputs of the model, padded on the left.
        num: Number of answers to each prompt.
        max_new_tokens: Most tokens of an answer.
        temperature: Temperature of sampling.
        padding: Token id behind the end of an answer.
    """
    answers: torch.Tensor = model.generate(
        **{name: part.to(model.device) for name, part in prompts.items()},
        do_sample=True,
        temperature=temperature,
        top_k=0,
        num_return_sequences=num,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        pad_token_id=padding,
    )
    return answers[:, prompts["input_ids"].shape[1] :]


def score(reward: Reward, completion: str, answer: str, *, record: str, key: str) -> float:
    """
    Score an answer to a prompt.

    Args:
        reward: Reward function of the run.
        completion: Text that the model generated.
        answer: Answer in the prompt's record.
        record: Place of the record, for an error.
        key: Key that names the reward function.

    Raises:
        ConfigError: The reward function fails, or returns no finite number.
    """
    try:
        found = float(reward(completion, answer))
    except Exception as error:  # of the user's own function
        raise ConfigError.at(key, f"fails on an answer to {record}: {type(error).__name__}: {error}") from error
    if not math.isfinite(found):
        raise ConfigError.at(key, f"gives {found} for an answer to {record}, and no finite number")
    return found
