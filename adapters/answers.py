"""Answers that a model generates to prompts, and their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packplan.core.errors import ConfigError
from packplan.core.rl import Reward


@attrs.frozen(eq=False)
class Answers:
    """Tokens that were drawn, answers to one prompt next to each other."""

    tokens: Tensor
    """Token ids, padded behind each answer's end; int64, shape (answers, most tokens)."""

    lengths: Tensor
    """Tokens of each answer, the one that ends it included; int64, shape (answers,)."""

    log_probabilities: Tensor
    """Log-probabilities of the tokens under the distribution they were drawn from; float32."""


@torch.no_grad()
def generate(
    model: Any,
    prompts: Mapping[str, Tensor],
    *,
    keys: NDArray[np.uint64],
    temperature: float,
    padding: int,
    ends: Sequence[int],
) -> Answers:
    """
    Sample answers to prompts from the model's own distribution at a temperature.

    A key draws the same token in any batch, up to rounding of the logits. Filters that the model's
    files ask for (top-k, top-p, penalties) are not applied.

    Args:
        model: Model of transformers, without dropout.
        prompts: Inputs of the model, padded on the left.
        keys: Random number of each token, answers to one prompt next to each other; shape
            (answers, most tokens of an answer). Their number is a multiple of the prompts'.
        temperature: Temperature of sampling.
        padding: Token id behind the end of an answer.
        ends: Token ids that end an answer.
    """

    # transformers prepares inputs, positions and the cache of each model family.
    def decode(model: Any, input_ids: Tensor, **prepared: Any) -> Answers:
        state = {name: value for name, value in prepared.items() if name not in _OF_ITS_OWN_LOOP}
        return _decode(model, input_ids, state, keys, temperature=temperature, padding=padding, ends=ends)

    answers: Answers = model.generate(
        **{name: part.to(model.device) for name, part in prompts.items()},
        custom_generate=decode,
        max_new_tokens=keys.shape[1],
        use_cache=True,
        pad_token_id=padding,
    )
    return answers


_OF_ITS_OWN_LOOP = frozenset({"logits_processor", "stopping_criteria", "generation_config"})
"""Arguments of a loop of transformers beside the inputs of the model; ours has its own."""


def _decode(
    model: Any,
    ids: Tensor,
    state: dict[str, Any],
    keys: NDArray[np.uint64],
    *,
    temperature: float,
    padding: int,
    ends: Sequence[int],
) -> Answers:
    """
    Draw token by token. Prompts are read once, and answers that have ended leave the batch.

    Args:
        model: Model of transformers.
        ids: Prompts, padded on the left.
        state: Other inputs, and the cache.
        keys: See `generate`.
        temperature: Temperature of sampling.
        padding: Token id behind the end of an answer.
        ends: Token ids that end an answer.
    """
    draws = torch.from_numpy(keys.view(np.int64)).to(ids.device)
    tokens = torch.full_like(draws, padding)
    log_probabilities = torch.zeros(draws.shape, device=ids.device)
    lengths = torch.full_like(draws[:, 0], draws.shape[1])
    rows = torch.arange(len(draws), device=ids.device)
    last = torch.tensor(list(ends), device=ids.device)
    for position in range(draws.shape[1]):
        part = {"is_first_iteration": True} if position == 0 else {"next_sequence_length": 1}
        outputs = model(**model.prepare_inputs_for_generation(ids, **part, **state), return_dict=True)
        state = model._update_model_kwargs_for_generation(outputs, state)  # noqa: SLF001  # families override it
        logits = outputs.logits[:, -1].double() / temperature
        if position == 0:
            repeated = torch.arange(len(ids), device=ids.device).repeat_interleave(len(draws) // len(ids))
            ids, logits, state = ids[repeated], logits[repeated], _take_rows(state, repeated, of=len(ids))
        drawn = (logits + gumbel_noise(draws[rows, position], logits.shape[1])).argmax(-1)
        tokens[rows, position] = drawn
        log_probabilities[rows, position] = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0].float()
        ids = torch.cat([ids, drawn[:, None]], dim=1)
        ended = torch.isin(drawn, last)
        if ended.any():
            lengths[rows[ended]] = position + 1
            (going,) = (~ended).nonzero(as_tuple=True)
            if not len(going):
                break
            state = _take_rows(state, going, of=len(rows))
            rows, ids = rows[going], ids[going]
    most = int(lengths.max())
    return Answers(tokens[:, :most], lengths, log_probabilities[:, :most])


def _take_rows(state: Mapping[str, Any], rows: Tensor, *, of: int) -> dict[str, Any]:
    """Return the state of generation with some of its *of* rows, in another order or repeated."""
    taken = dict(state)
    for name, value in state.items():
        if hasattr(value, "reorder_cache"):
            value.reorder_cache(rows)
        elif isinstance(value, Tensor) and name == "position_ids":
            taken[name] = value.index_select(-2, rows)  # models that see have several for each token
        elif isinstance(value, Tensor) and value.shape[:1] == (of,):
            taken[name] = value.index_select(0, rows)
    return taken


def gumbel_noise(keys: Tensor, size: int) -> Tensor:
    """
    Return Gumbel noise for a vocabulary: logits plus noise are greatest at a token drawn by its
    probability.

    Noise of each token's own leaves the draw as it is where rounding changes the logits, but for
    near ties. The bits are SplitMix64's (Steele et al., "Fast splittable pseudorandom number
    generators", 2014).

    Args:
        keys: Random number of each row; int64, shape (rows,).
        size: Number of tokens.

    Returns:
        Shape (rows, size), of float64.
    """
    bits = keys[:, None] + torch.arange(1, size + 1, device=keys.device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= _shifted(bits, shift)
        bits *= _signed(factor)
    bits ^= _shifted(bits, 31)
    # 52 bits, so that the middle of an interval is exact and neither 0 nor 1. In place, since
    # a vocabulary for each row is large.
    return _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return unsigned 64-bit numbers shifted to the right; torch shifts with their sign."""
    return (bits >> by) & ((1 << 64 - by) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the token ids that end an answer; the tokenizer's own is the first."""
    others = model.generation_config.eos_token_id
    listed = others if isinstance(others, list) else [others]
    return [*dict.fromkeys(end for end in (tokenizer.eos_token_id, *listed) if end is not None)]


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
        given = reward(completion, answer)
        # float reads text too, while a reward that returns text is most often a mistake.
        found = math.nan if isinstance(given, str) else float(given)
    except (Exception, SystemExit) as error:  # of the user's own function
        raise ConfigError.at(key, f"fails on an answer to {record}: {type(error).__name__}: {error}") from error
    if not math.isfinite(found):
        raise ConfigError.at(key, f"gives {given!r:.80} for an answer to {record}, and no finite number")
    return found
