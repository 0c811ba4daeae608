"""
Answers of a worker: from the policy itself, or from another engine that has its weights.

Rules: a draw follows from seed, step, prompt, generation and position, so workers and batches do
not change it. Entry t of a field belongs to token t of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from packplan.adapters.answers import end_tokens, generate
from packplan.adapters.microbatches import BatchedData
from packplan.adapters.workers.media import PolicyInputs
from packplan.core.errors import ConfigError
from packplan.core.ports import Arrays, Engine
from packplan.core.rl import Completion, draw_keys

_COMPARED = 8
"""Prompts whose first token is compared with an engine's."""

_NEAR = 0.25
"""Standard deviations of a position's logits within which two of them count as equal."""

Generations = list[list[Completion]]
"""Answers to each of several prompts."""


def keys_of(prompts: BatchedData, *, seed: int, step: int, num: int, max_new_tokens: int) -> np.ndarray:
    """
    Return the key of each token of the answers to some prompts.

    Args:
        prompts: Prompts with `prompts`, their indices, and `repeats`, the number of times that the
            same prompt came before in the step.
        seed: Seed of the run.
        step: Step of the run.
        num: Answers to a prompt.
        max_new_tokens: Most tokens of an answer.

    Returns:
        uint64, shape (prompts * num, max_new_tokens).
    """
    indices, repeats = (prompts.tensor(name).tolist() for name in ("prompts", "repeats"))
    return draw_keys(
        seed=seed, step=step, num=max_new_tokens,
        prompts=[index for index in indices for _ in range(num)],
        generations=[repeat * num + number for repeat in repeats for number in range(num)],
    )  # fmt: skip


def answer(
    model: Any,
    inputs: PolicyInputs,
    prompts: BatchedData,
    keys: np.ndarray,
    *,
    temperature: float,
    tokenizer: Any,
    version: int,
) -> Generations:
    """
    Generate answers to prompts by the policy itself.

    Args:
        model: The policy.
        inputs: Makes the inputs of the policy.
        prompts: Prompts with `input_ids`, padded on the right, and media.
        keys: Key of each token; see `keys_of`.
        temperature: Temperature of sampling.
        tokenizer: Tokenizer of the policy.
        version: Number of steps that the policy has been trained for.
    """
    answers = generate(
        model,
        inputs.prompts(prompts),
        keys=keys,
        temperature=temperature,
        padding=tokenizer.pad_token_id,
        ends=end_tokens(model, tokenizer),
    )
    found = zip(
        answers.tokens.cpu().numpy(), answers.log_probabilities.cpu().numpy(), answers.lengths.tolist(), strict=True
    )
    completions = [Completion(tokens[:length], logs[:length], version) for tokens, logs, length in found]
    num = len(completions) // len(prompts)
    return [completions[first : first + num] for first in range(0, len(completions), num)]


def ask(
    engine: Engine, prompts: BatchedData, keys: np.ndarray, *, temperature: float, max_new_tokens: int
) -> Generations:
    """
    Have an engine answer prompts; see `answer`.

    Args:
        engine: Engine that has the policy's weights.
        prompts: Prompts with `input_ids`, padded on the right.
        keys: Key of each token; an engine gets that of each first token.
        temperature: Temperature of sampling.
        max_new_tokens: Most tokens of an answer.
    """
    num = len(keys) // len(prompts)
    asked = [prompt for prompt in token_lists(prompts) for _ in range(num)]
    found = engine.complete(asked, keys[:, 0].tolist(), temperature=temperature, max_new_tokens=max_new_tokens)
    return [found[first : first + num] for first in range(0, len(found), num)]


def require_policy_weights(engine: Engine, model: Any, prompts: BatchedData) -> None:
    """
    Compare the engine's most likely first token of some prompts with the policy's.

    A token is taken for the policy's if its logit is near the greatest, since engines round in
    another way. Tokens that are lost in text are not compared.

    Args:
        engine: Engine that should have the policy's weights.
        model: The policy.
        prompts: Prompts with `input_ids`; the first few are read.

    Raises:
        ConfigError: A token is not the policy's.
    """
    asked = token_lists(prompts)[:_COMPARED]
    found = engine.complete(asked, [0] * len(asked), temperature=0.0, max_new_tokens=1)
    for prompt, completion in zip(asked, found, strict=True):
        logits = model(input_ids=torch.tensor([prompt], device=model.device), use_cache=False).logits[0, -1].double()
        below = float((logits.max() - logits[int(completion.tokens[0])]) / logits.std())
        if completion.is_exact and below > _NEAR:
            reason = (
                f"answers with other weights than the policy's: the logit of its most likely token is {below:.2f} "
                f"standard deviations below the policy's greatest, {_NEAR} allowed"
            )
            raise ConfigError.at("grpo.engine_command", reason)


def token_lists(prompts: BatchedData) -> list[list[int]]:
    """Return the token ids of each prompt, without padding."""
    ids = prompts.tensor("input_ids").tolist()
    return [row[:length] for row, length in zip(ids, prompts.lengths.tolist(), strict=True)]


def as_arrays(generations: Sequence[Sequence[Completion]], *, width: int, padding: int) -> Arrays:
    """
    Return answers as arrays that workers exchange.

    Args:
        generations: Answers to each prompt, equally many.
        width: Most tokens of an answer.
        padding: Token id behind the end of an answer.

    Returns:
        `completions` (prompts, answers, width) of int64, `engine_log_probabilities` of the same
        shape, float32, not a number where the engine gave none. `completion_lengths`, `versions`
        and `exact` (prompts, answers).
    """
    shape = len(generations), len(generations[0])
    tokens, logs = np.full((*shape, width), padding), np.full((*shape, width), np.nan, dtype=np.float32)
    for place in np.ndindex(shape):
        one = generations[place[0]][place[1]]
        tokens[place][: len(one.tokens)] = one.tokens
        if one.log_probabilities is not None:
            logs[place][: len(one.tokens)] = one.log_probabilities
    return {
        "completions": tokens,
        "engine_log_probabilities": logs,
        "completion_lengths": np.array([[len(one.tokens) for one in row] for row in generations]),
        "versions": np.array([[one.version for one in row] for row in generations]),
        "exact": np.array([[one.is_exact for one in row] for row in generations]),
    }
