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
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig

from packplan.adapters.answers import end_tokens, score
from packplan.adapters.context_parallel import context_parallel, gather_row
from packplan.adapters.files import saving
from packplan.adapters.losses import (
    NO_TARGET,
    FusedLoss,
    PackedLoss,
    PaddedLoss,
    combined,
    token_log_probabilities,
)
from packplan.adapters.microbatches import WEIGHTS, BatchedData, Microbatch, ShardedData
from packplan.adapters.models import is_ruined, mean_size
from packplan.adapters.workers.checkpoints import is_whole, read_checkpoint, write_checkpoint
from packplan.adapters.workers.generation import Generations, answer, as_arrays, ask, keys_of, require_policy_weights
from packplan.adapters.workers.media import PolicyInputs
from packplan.adapters.workers.sharding import RankGrid, clip_gradients, gathered_state, whole_weights
from packplan.adapters.workers.value_head import ValueHead, save_head, split_state
from packplan.core.config import RunConfig
from packplan.core.context_parallel import PackedLayout
from packplan.core.errors import RunError
from packplan.core.ports import Arrays, Engine, RankGroup
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
    """Ranks that share each row."""

    ranks_per_shard: int
    """Neighbouring ranks that share the rows of a shard, or their layers."""

    @classmethod
    def from_config(cls, config: RunConfig) -> PolicySettings:
        """Return the settings of a run."""
        grpo, trainer, policy = config.grpo, config.training.trainer, config.policy
        return cls(
            temperature=grpo.temperature,
            max_new_tokens=grpo.max_new_tokens,
            num_generations=grpo.num_generations_per_prompt,
            learning_rate=float(trainer.get("learning_rate", 1e-6)),
            weight_decay=float(trainer.get("weight_decay", 0.0)),
            max_grad_norm=float(trainer.get("max_grad_norm", 1.0)),
            context_parallel_size=policy.context_parallel_size,
            ranks_per_shard=policy.ranks_per_shard,
        )


class PolicyWorker:
    """Policy, its optimizer and, if needed, the reference model that training started from."""

    def __init__(
        self,
        model: Any,
        *,
        reference: Any | None,
        tokenizer: Any,
        processor: Any,
        reward: Reward,
        loss: FusedLoss | PackedLoss | PaddedLoss,
        group: RankGroup,
        grid: RankGrid,
        settings: PolicySettings,
        engine: Engine | None = None,
        value_head: ValueHead | None = None,
    ) -> None:
        self._model, self._reference, self._tokenizer = model.eval(), reference, tokenizer
        self._processor, self._reward, self._loss, self._settings = processor, reward, loss, settings
        self._engine, self._is_engine_compared = engine, True
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._ranks, self._rank, self._grid = group, group.rank, grid
        self._cp_rank, self._group = grid.cp_rank, grid.context
        self._size_before = self._mean_size()
        self._inputs, self._value_head = PolicyInputs.from_model(model), value_head

    @torch.no_grad()
    def generate(self, shard: ShardedData, *, seed: int, step: int) -> Arrays:
        """
        Generate answers to prompts, and score them.

        Args:
            shard: Padded prompts with `input_ids`, the `answers` of their records, and `records`,
                the places of the records; `prompts` and `repeats` are the keys of their draws.
            seed: Seed of the run.
            step: Steps that the policy has been trained for.

        Returns:
            The answers as in `generation.as_arrays`, and `rewards` (slots, answers). Of the ranks
            that share rows or layers, only the first asks an engine; the others return nothing.
        """
        if self._engine is not None:
            self._compare_engine(self._engine, shard.data)
            if self._rank % self._settings.ranks_per_shard:
                return {}
        with whole_weights(self._model) if self._engine is None else nullcontext():
            generations = [one for microbatch in shard for one in self._answers(microbatch.data, seed, step)]
        rewards = np.zeros((len(generations), self._settings.num_generations))
        for slot, (own_answer, record) in enumerate(zip(shard.data["answers"], shard.data["records"], strict=True)):
            for number, completion in enumerate(generations[slot]):
                text = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
                rewards[slot, number] = score(
                    self._reward, text, str(own_answer), record=str(record), key="grpo.reward"
                )
        arrays = as_arrays(generations, width=self._settings.max_new_tokens, padding=self._tokenizer.pad_token_id)
        return {**arrays, "rewards": rewards}

    @torch.no_grad()
    def log_probabilities(self, shard: ShardedData, *, of_reference: bool = False) -> Arrays:
        """
        Compute the log-probability of every token, given those before it.

        Args:
            shard: Sequences with `input_ids`.
            of_reference: Use the reference model instead of the policy.

        Returns:
            `log_probabilities` (slots, width) of float32; 0 for first tokens and padding. With a
            value head, `values` before each token too.
        """
        model = self._reference if of_reference else self._model
        rows: dict[str, list[Tensor]] = {}
        for microbatch in shard:
            layout = self._share_layout(microbatch.layout)
            logits = self._logits(model, microbatch, layout)
            targets = torch.as_tensor(layout.targets)
            ids = microbatch.input_ids.reshape(-1)[targets.clamp(min=0)].masked_fill(targets < 0, NO_TARGET)
            own = ids[torch.as_tensor(layout.positions(self._cp_rank))].to(logits.device)
            found = {"log_probabilities": token_log_probabilities(logits[0], own)}
            if self._value_head is not None and not of_reference:
                found["values"] = self._value_head.values[0]
            for name, predicted in found.items():
                rows.setdefault(name, []).append(self._of_tokens(predicted, microbatch, layout, shard.data.width))
        return {name: torch.cat(parts).numpy() for name, parts in rows.items()}

    def _of_tokens(self, predicted: Tensor, microbatch: Microbatch, layout: PackedLayout, width: int) -> Tensor:
        """
        Return what positions predict of their next tokens, at these; shape (sequences, width).
        """
        if layout.cp_size > 1:
            predicted = gather_row(predicted, layout=layout, group=self._group, dim=0)
        has_target = torch.as_tensor(layout.targets >= 0)
        row = torch.zeros(layout.num_positions)
        row[torch.as_tensor(layout.targets)[has_target]] = predicted.float().cpu()[has_target]
        # Widths are rounded up, and may exceed the batch's width, or stay below it.
        values = microbatch.unpacked(row)[:, :width]
        return torch.nn.functional.pad(values, (0, width - values.shape[1]))

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
                logits = self._logits(self._model, microbatch, layout)
                loss, metrics = self._loss(
                    logits,
                    {**data.fields, "token_mask": weighed},
                    layout=layout,
                    num_sequences=sequences,
                    num_tokens=tokens,
                    **self._options_of_loss(),
                )
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                parts.append({"loss": loss.detach(), **{f"loss/{name}": value for name, value in metrics.items()}})
            self._grid.sum_gradients(self._model)
            row = self._over_workers(combined(parts))
            row["grad_norm"] = clip_gradients(
                self._parameters, max_norm=self._settings.max_grad_norm, sharded=self._grid.is_sharded
            )
            for name in ("loss", "grad_norm"):
                if not math.isfinite(row[name]):
                    raise RunError("not_finite", f"{name} is {row[name]}, so the policy was not updated and not saved")
            self._optimizer.step()
            # All workers hold the same weights, so all raise or none.
            if is_ruined(size := self._mean_size(), before=self._size_before):
                what = f"the root mean square of the policy's weights ({self._size_before:.3g} before the first step)"
                raise RunError("not_finite", f"{what} is {size}, so the policy was not saved")
            rows.append(row)
        return {name: np.array([row.get(name, math.nan) for row in rows]) for name in dict.fromkeys(chain(*rows))}

    def _options_of_loss(self) -> dict[str, Any]:
        """Return the options of a loss on tokens that depend on this rank."""
        if not isinstance(self._loss, FusedLoss):
            return {}
        values = None if self._value_head is None else self._value_head.values
        return {"cp_rank": self._cp_rank, "sum_over_ranks": self._sum_over_row, "values": values}

    def _sum_over_row(self, sums: Tensor) -> Tensor:
        """Return the sum over the ranks that share rows."""
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums

    def save(self, folder: str) -> Arrays:
        """Write policy, value head, and processor with its tokenizer, on the first worker alone."""
        state, of_head = split_state(gathered_state(self._model, keep=self._rank == 0))
        if self._rank == 0:
            with saving(Path(folder)):
                Path(folder).mkdir(parents=True, exist_ok=True)
                self._model.save_pretrained(folder, state_dict=state)
                self._processor.save_pretrained(folder)
                if of_head:
                    save_head(Path(folder), of_head)
        return {}

    def save_checkpoint(self, folder: str, *, facts: str) -> Arrays:
        """
        Write weights and optimizer states to a folder that appears once it is whole.

        Args:
            folder: The checkpoint, in a folder that all workers reach.
            facts: Entries of the manifest about the run, as JSON.
        """
        write_checkpoint(Path(folder), self._model, self._optimizer, self._ranks, facts=json.loads(facts))
        return {}

    def verify_checkpoint(self, folder: str) -> Arrays:
        """Return as `whole` whether a checkpoint's files are what was written, by their digests."""
        return {"whole": np.array([is_whole(Path(folder), self._ranks)])}

    def load_checkpoint(self, folder: str) -> Arrays:
        """Load weights and optimizer states that any number of workers wrote."""
        read_checkpoint(Path(folder), self._model, self._optimizer)
        return {}

    def _mean_size(self) -> float:
        return mean_size(self._parameters, sharded=self._grid.is_sharded)

    def update_engine(self, folder: str, *, version: int) -> Arrays:
        """
        Write the policy to a folder, and have the engine answer with it.

        Args:
            folder: Folder that the engine reads.
            version: Number of steps that the policy has been trained for.
        """
        if self._engine is not None:
            self.save(folder)
            if self._rank == 0:
                # Engines read their defaults here, and filter draws unless told otherwise.
                ends = end_tokens(self._model, self._tokenizer)
                sampling = {"do_sample": True, "temperature": self._settings.temperature, "top_k": 0, "top_p": 1.0}
                GenerationConfig(
                    **sampling, eos_token_id=ends, pad_token_id=self._tokenizer.pad_token_id
                ).save_pretrained(folder)
            self._engine.update(version, folder)
            self._is_engine_compared = False
        return {}

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()

    def _compare_engine(self, engine: Engine, prompts: BatchedData) -> None:
        """Require that the engine has the policy's weights, once for each version of them."""
        if not self._is_engine_compared:
            with whole_weights(self._model):
                require_policy_weights(engine, self._model, prompts)
            self._is_engine_compared = True

    def _answers(self, prompts: BatchedData, seed: int, step: int) -> Generations:
        """Return answers of the policy, or of the engine."""
        heat, most = self._settings.temperature, self._settings.max_new_tokens
        keys = keys_of(prompts, seed=seed, step=step, num=self._settings.num_generations, max_new_tokens=most)
        if self._engine is None:
            return answer(
                self._model, self._inputs, prompts, keys, temperature=heat, tokenizer=self._tokenizer, version=step
            )
        return ask(self._engine, prompts, keys, temperature=heat, max_new_tokens=most)

    def _share_layout(self, layout: PackedLayout) -> PackedLayout:
        return attrs.evolve(layout, cp_size=self._settings.context_parallel_size)

    def _logits(self, model: Any, microbatch: Microbatch, layout: PackedLayout) -> Tensor:
        """
        Return the logits at the sampling temperature, with all rows as one.

        The shape is (1, positions of this rank, vocabulary).
        """
        shared = context_parallel(model, layout=layout, group=self._group) if layout.cp_size > 1 else nullcontext()
        with shared:
            logits = model(**self._inputs.forward(microbatch), use_cache=False).logits
        scaled: Tensor = logits.reshape(1, -1, logits.shape[-1]) / self._settings.temperature
        return scaled

    def _over_workers(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Return the combined metrics of all workers: minimum, maximum or sum, by their names."""
        # By name, since workers may have other metrics, or in another order.
        gathered = self._ranks.gather(json.dumps({name: float(value) for name, value in metrics.items()}))
        # Those that share layers have the same ones.
        found = [json.loads(one) for one in gathered[:: self._grid.tp_size]]
        return {name: float(value) for name, value in combined(found).items()}
