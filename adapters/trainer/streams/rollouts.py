"""
Streams of training samples: the data as they are, or the model's best answers to their prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from packplan.adapters.answers import end_tokens, generate, score
from packplan.adapters.loaders.positions import TYPES
from packplan.adapters.models import evaluating
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.trainer.loader import collated_as
from packplan.adapters.trainer.packed_dataset import Sample
from packplan.adapters.trainer.vision import model_media
from packplan.core.rl import Reward, Sampling, draw_keys
from packplan.core.stream import Item, Order


class RecordStream:
    """Encoded records of a data set, in an order of each epoch."""

    def __init__(self, samples: SwiftEncoder, order: Order) -> None:
        self.encoded, self._order, self._indices = samples, order, order(0)

    def __len__(self) -> int:
        """Return the number of samples of the epoch."""
        return len(self._indices)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of *epoch* from now on."""
        self._indices = self._order(epoch)

    def items(self, places: Sequence[int]) -> Iterator[tuple[int, Sequence[Item]]]:
        """Yield the records of some places, one by one."""
        for place in places:
            yield 1, (Item(place),)

    def name(self, item: Item) -> str:
        """Return the place of an item's record."""
        record = str(self.encoded.records.where(self.index(item.place)))
        return record if item.text is None else f"an answer to {record}"

    def encode(self, item: Item) -> Sample:
        """Return an encoded item."""
        return self.encoded.encode(self.index(item.place), answer=item.text)

    def index(self, place: int) -> int:
        """Return the index of the record at a place of the epoch."""
        return int(self._indices[place])

    def logs(self) -> Mapping[str, tuple[float, int]]:
        """
        Return sum and count by name, to log as means of the samples since the last call.

        Names are the same on every rank.
        """
        return {}


class RolloutStream(RecordStream):
    """
    Best answers of the current model to the prompts of a data set.

    It runs in the training process, between steps, so that the latest weights answer each group of
    prompts. A group is answered in batches, padded on the left.
    """

    def __init__(
        self,
        samples: SwiftEncoder,
        order: Order,
        *,
        model: Any,
        reward: Reward,
        sampling: Sampling,
        group_size: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """
        Answer the prompts of a data set.

        Args:
            samples: Samples with the prompts and their own answers.
            order: Order of the samples in an epoch.
            model: Model that is trained.
            reward: Function that scores an answer.
            sampling: Number, length and temperature of the answers.
            group_size: Prompts that are answered before the first of their answers is a sample.
            max_tokens: Most tokens of a batch of answers, with their prompts.
            seed: Seed of the answers; each follows from it, the epoch, and its place.
        """
        super().__init__(samples, order)
        self._seed, self._epoch = seed, 0
        self._model, self._reward, self._sampling = model, reward, sampling
        self._group_size, self._max_tokens = group_size, max_tokens
        self._scores: list[float] = []
        self._kept: list[float] = []

    def items(self, places: Sequence[int]) -> Iterator[tuple[int, Sequence[Item]]]:
        """Answer the prompts of some places, group by group, and yield the best answers."""
        for first in range(0, len(places), self._group_size):
            group = places[first : first + self._group_size]
            answers = zip(group, self.answers(group), strict=True)
            yield len(group), [Item(place, text) for place, texts in answers for text in self._best(place, texts)]

    def set_epoch(self, epoch: int) -> None:
        """Use the order of *epoch*, and draw other answers, from now on."""
        super().set_epoch(epoch)
        self._epoch = epoch

    def answers(self, places: Sequence[int]) -> list[list[str]]:
        """Return the model's answers to the prompt at each place of the epoch."""
        prompts = [self.encoded.prompt(self.index(place)) for place in places]
        lengths = [len(prompt["input_ids"]) for prompt in prompts]
        found: dict[int, list[str]] = {}
        for batch in self._sampling.batches(lengths, max_tokens=self._max_tokens):
            drawn = self._generate([prompts[number] for number in batch], [places[number] for number in batch])
            found |= zip(batch, drawn, strict=True)
        return [found[number] for number in range(len(places))]

    def logs(self) -> Mapping[str, tuple[float, int]]:
        """Return the rewards of all answers, and of the kept ones, since the last call."""
        scores, kept = self._scores, self._kept
        self._scores, self._kept = [], []
        return {"reward": (math.fsum(scores), len(scores)), "reward_kept": (math.fsum(kept), len(kept))}

    def _best(self, place: int, texts: Sequence[str]) -> list[str]:
        """Score the answers to a prompt, and return the best of them."""
        answer = self.encoded.answer(self.index(place))
        where = {"record": self.name(Item(place)), "key": "custom.rollout_reward"}
        # Empty answers teach nothing.
        scored = [(score(self._reward, text, answer, **where), text) for text in texts if text.strip()]
        best = sorted(scored, key=lambda pair: -pair[0])[: self._sampling.keep]
        self._scores += [points for points, _ in scored]
        self._kept += [points for points, _ in best]
        return [text for _, text in best]

    def _generate(self, prompts: Sequence[Sample], places: Sequence[int]) -> list[list[str]]:
        """Return the answers to each of some encoded prompts, which are one batch."""
        template, num = self.encoded.template, self._sampling.completions
        keys = draw_keys(
            seed=self._seed, step=self._epoch, prompts=np.repeat(places, num).tolist(),
            generations=[*range(num)] * len(places), num=self._sampling.max_new_tokens,
        )  # fmt: skip
        # ms-swift's hooks prepare inputs for training; generation uses the model's own inputs.
        with evaluating(self._model), template.generate_context():
            answers = generate(
                self._model,
                self._padded([dict(prompt) for prompt in prompts]),
                keys=keys,
                temperature=self._sampling.temperature,
                padding=template.tokenizer.pad_token_id,
                ends=end_tokens(self._model, template.tokenizer),
            )
        texts = [
            template.tokenizer.decode(tokens[:length], skip_special_tokens=True)
            for tokens, length in zip(answers.tokens, answers.lengths.tolist(), strict=True)
        ]
        return [texts[first : first + num] for first in range(0, len(texts), num)]

    def _padded(self, rows: list[Sample]) -> dict[str, torch.Tensor]:
        """Return encoded prompts and their media as inputs of the model; changes the rows."""
        if any(TYPES in row for row in rows):
            for row in rows:
                row.setdefault(TYPES, torch.zeros(len(row["input_ids"]), dtype=torch.long))
        with collated_as(self.encoded.template, packed=False):
            batch = self.encoded.template.data_collator(rows)
        return {name: batch[name] for name in ("input_ids", "attention_mask")} | model_media(self._model, batch)
