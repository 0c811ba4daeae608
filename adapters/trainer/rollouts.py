"""
Streams of training samples: the data as they are, or the model's best answers to their prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from packplan.adapters.answers import generate, score
from packplan.adapters.models import evaluating
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.trainer.packed_dataset import Sample
from packplan.adapters.trainer.vision import model_media
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
    ) -> None:
        super().__init__(samples, order)
        self._model, self._reward, self._sampling = model, reward, sampling
        self._scores: list[float] = []
        self._kept: list[float] = []

    def samples(self, shard: int, num_shards: int) -> Iterator[tuple[str, Sample]]:
        """Answer the prompts of a shard, and yield the best answers as samples."""
        for index in self.indices(shard, num_shards):
            answer = self.encoded.answer(index)
            # Empty answers teach nothing.
            completions = [text for text in self._generate(index) if text.strip()]
            where = {"record": self.record(index), "key": "custom.rollout_reward"}
            scored = [(score(self._reward, text, answer, **where), text) for text in completions]
            best = sorted(scored, key=lambda pair: -pair[0])[: self._sampling.keep]
            self._scores += [points for points, _ in scored]
            self._kept += [points for points, _ in best]
            for _, text in best:
                yield f"an answer to {self.record(index)}", self.encoded.encode(index, answer=text)

    def logs(self) -> Mapping[str, tuple[float, int]]:
        """Return the rewards of all answers, and of the kept ones, since the last call."""
        scores, kept = self._scores, self._kept
        self._scores, self._kept = [], []
        return {"reward": (math.fsum(scores), len(scores)), "reward_kept": (math.fsum(kept), len(kept))}

    def _generate(self, index: int) -> list[str]:
        encoded = self.encoded.prompt(index)
        inputs = {"input_ids": torch.tensor(encoded["input_ids"])[None]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs |= model_media(self._model, encoded)
        template, sampling = self.encoded.template, self._sampling
        # ms-swift's hooks prepare inputs for training; generation uses the model's own inputs.
        with evaluating(self._model), torch.no_grad(), template.generate_context():
            answers = generate(
                self._model,
                inputs,
                num=sampling.completions,
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                padding=template.tokenizer.pad_token_id,
            )
        texts: list[str] = template.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return texts
