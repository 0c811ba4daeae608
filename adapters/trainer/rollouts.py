"""
Streams of training samples: the data as they are, or the model's best answers to their prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.trainer.packed_dataset import Sample
from packplan.adapters.trainer.vision import model_media
from packplan.core.errors import ConfigError
from packplan.core.rl import Reward, Sampling
from packplan.core.stream import Order


class RecordStream:
    """Encoded records of a data set, in an order of each epoch."""

    def __init__(self, samples: SwiftEncoder, order: Order) -> None:
        self.encoded, self._order, self._epoch = samples, order, 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of *epoch* from now on."""
        self._epoch = epoch

    def samples(self, shard: int, num_shards: int) -> Iterator[tuple[str, Sample]]:
        """
        Yield records and encodings of a shard: every *num_shards*th of the order, from *shard* on.
        """
        for index in self.indices(shard, num_shards):
            yield self.record(index), self.encoded.encode(index)

    def record(self, index: int) -> str:
        """Return the place of a sample's record."""
        return str(self.encoded.records.where(index))

    def indices(self, shard: int, num_shards: int) -> list[int]:
        """Return the indices of a shard's samples."""
        indices: list[int] = self._order(self._epoch)[shard::num_shards].tolist()
        return indices

    def logs(self) -> Mapping[str, tuple[float, int]]:
        """
        Return sum and count by name, to log as means of the samples since the last call.

        Names are the same on every rank.
        """
        return {}


class RolloutStream(RecordStream):
    """
    Best answers of the current model to the prompts of a data set.

    It runs in the training process, between steps, so that the latest weights answer each window of
    packs. Prompts are answered one at a time, unpacked.
    """

    def __init__(
        self,
        samples: SwiftEncoder,
        order: Order,
        *,
        model: Any,
        reward: Reward,
        sampling: Sampling,
        device: torch.device,
    ) -> None:
        super().__init__(samples, order)
        self._model, self._reward, self._sampling, self._device = model, reward, sampling, device
        self._scores: list[float] = []
        self._kept: list[float] = []

    def samples(self, shard: int, num_shards: int) -> Iterator[tuple[str, Sample]]:
        """Answer the prompts of a shard, and yield the best answers as samples."""
        for index in self.indices(shard, num_shards):
            answer = self.encoded.answer(index)
            # Empty answers teach nothing.
            completions = [text for text in self._generate(index) if text.strip()]
            scored = [(self._score(index, text, answer), text) for text in completions]
            best = sorted(scored, key=lambda pair: -pair[0])[: self._sampling.keep]
            self._scores += [score for score, _ in scored]
            self._kept += [score for score, _ in best]
            for _, text in best:
                yield f"an answer to {self.record(index)}", self.encoded.encode(index, answer=text)

    def logs(self) -> Mapping[str, tuple[float, int]]:
        """Return the rewards of all answers, and of the kept ones, since the last call."""
        scores, kept = self._scores, self._kept
        self._scores, self._kept = [], []
        return {"reward": (math.fsum(scores), len(scores)), "reward_kept": (math.fsum(kept), len(kept))}

    def _score(self, index: int, completion: str, answer: str) -> float:
        """Score an answer; ConfigError if the reward fails, or returns no finite number."""
        try:
            score = float(self._reward(completion, answer))
        except Exception as error:
            reason = f"fails on an answer to {self.record(index)}: {type(error).__name__}: {error}"
            raise ConfigError.at("custom.rollout_reward", reason) from error
        if not math.isfinite(score):
            reason = f"gives {score} for an answer to {self.record(index)}, and no finite number"
            raise ConfigError.at("custom.rollout_reward", reason)
        return score

    def _generate(self, index: int) -> list[str]:
        encoded = self.encoded.prompt(index)
        length = len(encoded["input_ids"])
        inputs = {"input_ids": torch.tensor(encoded["input_ids"])[None]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs |= model_media(self._model, encoded)
        template, sampling = self.encoded.template, self._sampling
        was_training = self._model.training
        self._model.eval()
        try:
            # ms-swift's hooks prepare inputs for training; generation uses the model's own inputs.
            with torch.no_grad(), template.generate_context():
                answers = self._model.generate(
                    **{key: value.to(self._device) for key, value in inputs.items()},
                    do_sample=True,
                    temperature=sampling.temperature,
                    top_k=0,
                    num_return_sequences=sampling.completions,
                    max_new_tokens=sampling.max_new_tokens,
                    use_cache=True,
                    pad_token_id=template.tokenizer.pad_token_id,
                )
        finally:
            self._model.train(was_training)
        texts: list[str] = template.tokenizer.batch_decode(answers[:, length:], skip_special_tokens=True)
        return texts
