"""
Worker of reinforcement learning: it holds the policy, and computes its shard of a batch by
microbatches.

Rules: every method is called on all workers at once, with shards of equally many microbatches.
Results have one entry per slot of the shard, or one per global batch. Dropout is off, so that
before the first update the ratio of probabilities is 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from packplan.adapters.answers import generate, score
from packplan.adapters.context_parallel import context_parallel, gather_row
from packplan.adapters.files import saving
from packplan.adapters.microbatches import WEIGHTS, Microbatch, ShardedData
from packplan.adapters.models import is_ruined, mean_size
from packplan.adapters.sequence_loss import FusedLoss, PackedLoss, PaddedLoss, combined
from packplan.adapters.token_statistics import token_log_probabilities
from packplan.core.context_parallel import PackedLayout
from packplan.core.errors import RunError
from packplan.core.ports import Arrays, RankGroup
from packplan.core.rl import Reward


@attrs.frozen
class PolicySettings:
    """Settings of generation and of the optimizer."""

    temperature: float

    max_new_tokens: int

    num_generations: int
    """Answers to each prompt."""

    learning_rate: float

    weight_decay: float

    max_grad_norm: float
    """Largest gradient norm; larger ones are scaled down, and 0 sets no limit."""

    context_parallel_size: int
    """Number of neighbouring ranks that share each row, and hold the same shard."""


class PolicyWorker:
    """Policy, its optimizer and, if needed, the reference model that training started from."""

    def __init__(
        self,
        model: Any,
        *,
        reference: Any | None,
        tokenizer: Any,
        reward: Reward,
        loss: FusedLoss | PackedLoss | PaddedLoss,
        group: RankGroup,
        settings: PolicySettings,
    ) -> None:
        self._model, self._reference, self._tokenizer = model.eval(), reference, tokenizer
        self._reward, self._loss, self._settings = reward, loss, settings
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._size_before = mean_size(self._parameters)
        size = settings.context_parallel_size
        self._ranks, self._rank, self._cp_rank = group, group.rank, group.rank % size
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            # Every rank has to take part in creating every group.
            groups = [
                dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)
            ]
            self._group = groups[group.rank // size]

    @torch.no_grad()
    def generate(self, shard: ShardedData, *, seed: Sequence[int]) -> Arrays:
        """
        Generate answers to prompts, and score them.

        Args:
            shard: Padded prompts with `input_ids`, the `answers` of their records, and `records`,
                the places of the records.
            seed: Seed of this step; workers with different shards draw differently.

        Returns:
            `completions` (slots, answers, tokens) of int64, `completion_lengths` and `rewards`
            (slots, answers).
        """
        settings = self._settings
        with torch.random.fork_rng(devices=[self._model.device] if self._model.device.type == "cuda" else []):
            own = np.random.SeedSequence([*seed, self._rank // settings.context_parallel_size])
            torch.manual_seed(int(own.generate_state(1)[0]))
            answers = torch.cat([self._generate_answers(microbatch) for microbatch in shard])
        # An answer ends with the end token, or at the limit.
        ends = answers == self._tokenizer.eos_token_id
        lengths = torch.where(ends.any(-1), ends.int().argmax(-1) + 1, answers.shape[-1])
        rewards = np.zeros(lengths.shape)
        for slot, (own_answer, record) in enumerate(zip(shard.data["answers"], shard.data["records"], strict=True)):
            for number in range(settings.num_generations):
                tokens = answers[slot, number, : lengths[slot, number]]
                text = self._tokenizer.decode(tokens, skip_special_tokens=True)
                rewards[slot, number] = score(
                    self._reward, text, str(own_answer), record=str(record), key="grpo.reward"
                )
        return {"completions": answers.numpy(), "completion_lengths": lengths.numpy(), "rewards": rewards}

    @torch.no_grad()
    def log_probabilities(self, shard: ShardedData, *, of_reference: bool = False) -> Arrays:
        """
        Compute the log-probability of every token, given those before it.

        Args:
            shard: Sequences with `input_ids`.
            of_reference: Use the reference model instead of the policy.

        Returns:
            `log_probabilities` (slots, width) of float32; 0 for first tokens and padding.
        """
        model = self._reference if of_reference else self._model
        found = shard.data.tensor("input_ids").new_zeros((len(shard.data), shard.data.width), dtype=torch.float32)
        done = 0
        for microbatch in shard:
            layout = self._share_layout(microbatch.layout)
            logits = self._logits(model, microbatch, layout)
            has_target = torch.as_tensor(layout.targets >= 0)
            following = torch.as_tensor(np.maximum(layout.targets, 0))
            targets = microbatch.input_ids.reshape(-1)[following].masked_fill(~has_target, -1)
            own = targets[torch.as_tensor(layout.positions(self._cp_rank))].to(logits.device)
            predicted = token_log_probabilities(logits[0], own)
            if layout.cp_size > 1:
                predicted = gather_row(predicted, layout=layout, group=self._group, dim=0)
            row = torch.zeros(layout.num_positions)
            row[following[has_target]] = predicted.cpu()[has_target]
            # Widths are rounded up, and may exceed the batch's width.
            own_values = microbatch.unpacked(row)[:, : shard.data.width]
            found[done : done + len(own_values), : own_values.shape[1]] = own_values
            done += len(own_values)
        return {"log_probabilities": found.numpy()}

    def train(self, shard: ShardedData, *, num_sequences: Sequence[int], num_tokens: Sequence[float]) -> Arrays:
        """
        Take an optimizer step for each global batch.

        Args:
            shard: Sequences with `input_ids`, `token_mask` and the loss's fields.
            num_sequences: Sequences of each global batch with a token that counts, over all
                workers.
            num_tokens: Tokens of each global batch that count, over all workers.

        Returns:
            `loss`, `grad_norm` and the loss's metrics as `loss/…`, over all workers; float64, shape
            (global_batches,).

        Raises:
            RunError: Loss or gradients are not, and nothing is updated then; or the weights
                are ruined by the update.
        """
        rows = []
        for batch, (sequences, tokens) in enumerate(zip(num_sequences, num_tokens, strict=True)):
            self._optimizer.zero_grad()
            parts = []
            for microbatch in shard.microbatches(batch):
                layout = self._share_layout(microbatch.layout)
                data = microbatch.data.to(self._model.device)
                # Filler has the weight 0.
                weighed = data.tensor("token_mask") * data.tensor(WEIGHTS)[:, None]
                own = {"cp_rank": self._cp_rank} if isinstance(self._loss, FusedLoss) else {}
                loss, metrics = self._loss(
                    self._logits(self._model, microbatch, layout),
                    {**data.fields, "token_mask": weighed},
                    layout=layout,
                    num_sequences=sequences,
                    num_tokens=tokens,
                    **own,
                )
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                parts.append({"loss": loss.detach(), **{f"loss/{name}": value for name, value in metrics.items()}})
            self._sum_gradients()
            row = self._over_workers(combined(parts))
            row["grad_norm"] = float(
                torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm or math.inf)
            )
            for name in ("loss", "grad_norm"):
                if not math.isfinite(row[name]):
                    raise RunError("not_finite", f"{name} is {row[name]}, so the policy was not updated and not saved")
            self._optimizer.step()
            # All workers hold the same weights, so all raise or none.
            if is_ruined(size := mean_size(self._parameters), before=self._size_before):
                what = f"the root mean square of the policy's weights ({self._size_before:.3g} before the first step)"
                raise RunError("not_finite", f"{what} is {size}, so the policy was not saved")
            rows.append(row)
        return {name: np.array([row.get(name, math.nan) for row in rows]) for name in dict.fromkeys(chain(*rows))}

    def save(self, folder: str) -> Arrays:
        """Write the policy and its tokenizer to a folder, on the first worker alone."""
        if self._rank == 0 and folder:
            with saving(Path(folder)):
                Path(folder).mkdir(parents=True, exist_ok=True)
                self._model.save_pretrained(folder)
                self._tokenizer.save_pretrained(folder)
        return {}

    def _generate_answers(self, microbatch: Microbatch) -> Tensor:
        """
        Generate answers to prompts; shape (prompts, answers, max_new_tokens).

        Answers are padded behind their end.
        """
        settings, data = self._settings, microbatch.data
        # Answers begin where prompts end, so prompts are padded on the left.
        shift = (torch.arange(data.width) - (data.width - data.lengths)[:, None]) % data.width
        ids = data.tensor("input_ids").gather(1, shift)
        mask = torch.arange(data.width) >= (data.width - data.lengths)[:, None]
        answers = generate(
            self._model,
            {"input_ids": ids, "attention_mask": mask.long()},
            num=settings.num_generations,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            padding=self._tokenizer.pad_token_id,
        ).cpu()
        answers = torch.nn.functional.pad(
            answers, (0, settings.max_new_tokens - answers.shape[1]), value=self._tokenizer.pad_token_id
        )
        return answers.view(len(data), settings.num_generations, settings.max_new_tokens)

    def _share_layout(self, layout: PackedLayout) -> PackedLayout:
        return attrs.evolve(layout, cp_size=self._settings.context_parallel_size)

    def _logits(self, model: Any, microbatch: Microbatch, layout: PackedLayout) -> Tensor:
        """
        Return the logits at the sampling temperature, with all rows as one.

        The shape is (1, positions of this rank, vocabulary).
        """
        ids = microbatch.input_ids.to(model.device)
        if layout.cp_size > 1:
            own = torch.as_tensor(layout.positions(self._cp_rank))
            with context_parallel(model, layout=layout, group=self._group):
                logits = model(input_ids=ids[:, own], use_cache=False).logits
        else:
            mask = microbatch.attention_mask
            inputs = {} if mask is None else {"attention_mask": mask.to(model.device)}
            positions = microbatch.position_ids.to(model.device)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
        scaled: Tensor = logits.reshape(1, -1, logits.shape[-1]) / self._settings.temperature
        return scaled

    def _sum_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)

    def _over_workers(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Return the combined metrics of all workers: minimum, maximum or sum, by their names."""
        # By name, since workers may have other metrics, or in another order.
        gathered = self._ranks.gather(json.dumps({name: float(value) for name, value in metrics.items()}))
        return {name: float(value) for name, value in combined([json.loads(one) for one in gathered]).items()}
