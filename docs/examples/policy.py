"""Train a policy of your own on ranks or Ray actors; see docs/rl.md."""

import os

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from packplan import shard_packed
from packplan.adapters.losses import PackedLoss, normalisers
from packplan.adapters.ranks.torch_group import OneRank, TorchGroup
from packplan.adapters.ranks.torch_group import RankWorkers
from packplan.hf import separate_samples


def reinforce(logits, data, *, num_sequences, num_tokens):
    every = torch.log_softmax(logits[:, :-1].float(), -1)
    drawn = every.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return -(drawn * data["advantages"][:, None] * data["token_mask"][:, 1:]).sum() / num_tokens, {}


class Policy:
    """Worker that trains its shard, and sums gradients over all workers."""

    def __init__(self, folder):
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.group = TorchGroup(use_cpu=True) if several else OneRank()
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        separate_samples(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-2)

    def train(self, shard, *, num_tokens):
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in shard.microbatches(0):
            inputs = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
            # With a cache, which is the default, the row would be one sample.
            logits, data = self.model(**inputs, use_cache=False).logits, microbatch.data
            mask = data["token_mask"] * data["weights"][:, None]  # a sequence that fills up has the weight 0
            fields = {**data.fields, "token_mask": mask}
            loss, _ = PackedLoss(reinforce)(
                logits, fields, layout=microbatch.layout, num_sequences=1, num_tokens=num_tokens
            )
            loss.backward()
            total += loss.detach()
        for tensor in [total, *(weight.grad for weight in self.model.parameters())] if dist.is_initialized() else []:
            dist.all_reduce(tensor)
        self.optimizer.step()
        return {"loss": np.array([float(total)])}

    def close(self):
        pass


def train(workers, batch):
    """Train one optimizer step on all workers; return the loss of the step."""
    sharding = shard_packed(
        batch.lengths.numpy(), shards=workers.num_workers, batch_size=len(batch), max_tokens_per_microbatch=64
    )
    _, num_tokens = normalisers(batch["token_mask"])
    results = workers.run_all_workers_sharded_data("train", batch.shard(sharding), num_tokens=num_tokens)
    return float(results[0]["loss"][0])


def on_ranks(folder):
    """Return the ranks of torchrun as workers. Every rank has to call this function and `train`."""
    policy = Policy(folder)
    return RankWorkers(policy, policy.group)
