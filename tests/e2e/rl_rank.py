"""
Runs reinforcement learning as one rank: `packplan rl`'s own phases on rollouts that are given, or
the whole command.

It is imported once by a process that ranks fork from.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from packplan.adapters.losses import normalisers
from packplan.adapters.microbatches import BatchedData
from packplan.adapters.workers.media import MEDIA, MEDIA_WORK
from packplan.adapters.workers.policy import PolicyWorker
from packplan.adapters.workers.ranks import RankWorkers
from packplan.adapters.workers.sharding import whole_weights
from packplan.app.demo.tiny_models import SPECIAL_TOKENS
from packplan.app.rl import loop
from packplan.app.wiring import training
from packplan.app.wiring.works import trained_work
from packplan.core.ports import RankGroup

LENGTHS = [9, 41, 5, 30, 2, 17, 61, 8, 12, 25, 33]
"""
Tokens of the rollouts; neither ranks nor microbatches divide their number, nor the rounding of
widths the longest.
"""


def rollouts(vocabulary: int) -> BatchedData:
    """
    Return sequences with answers, advantages, and log-probabilities that the policy has moved away
    from.
    """
    drawn = torch.Generator().manual_seed(3)
    width = max(LENGTHS)
    inside = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(20, vocabulary, inside.shape, generator=drawn) * inside
    answer = torch.arange(width) >= torch.tensor([length // 3 for length in LENGTHS])[:, None]
    return BatchedData.from_fields(
        {
            "input_ids": ids,
            "token_mask": (inside & answer).float(),
            "advantages": torch.randn(len(LENGTHS), generator=drawn),
            "noise": 0.5 * torch.randn(inside.shape, generator=drawn),
        },
        lengths=LENGTHS,
        sequence_dims={"noise": 1},
    )


GRIDS = {
    1: [(1, 4, 4)],
    3: [(1, 2, 4), (1, 2, 2)],
    5: [(1, 2, 2)],
    6: [(1, 6, 8)],
    9: [(2, 2, 4)],
    10: [(1, 4, 8)],
}
"""
Frames, rows and columns of patches of the images of some rollouts, and of the video of one; the
others are text.
"""

VIDEO = 9
"""The rollout whose medium is a video."""


def seeing_rollouts(config, vocabulary: int) -> BatchedData:
    """
    Return `rollouts` of which some begin with images of several sizes, one with two, and one with a
    video.

    Args:
        config: Configuration of the model.
        vocabulary: Tokens of the model, those of media among the last.
    """
    batch, drawn = rollouts(vocabulary - len(SPECIAL_TOKENS)), torch.Generator().manual_seed(4)
    ids, media, second_per_grid = batch.tensor("input_ids").clone(), [], config.model_type == "qwen2_5_vl"
    for number in range(len(batch)):
        grids, kind = GRIDS.get(number, []), ("video" if number == VIDEO else "image")
        tokens = [1]
        for frames, rows, columns in grids:
            # Qwen3-VL writes each frame of a video by itself.
            parts = 1 if second_per_grid else frames
            placeholders = [getattr(config, f"{kind}_token_id")] * (frames * rows * columns // 4 // parts)
            tokens += parts * [config.vision_start_token_id, *placeholders, config.vision_end_token_id]
        ids[number, : len(tokens)] = torch.tensor(tokens)
        pixels = torch.randn(sum(map(math.prod, grids)), 3 * 2 * config.vision_config.patch_size**2, generator=drawn)
        own = {f"pixel_values{'_videos' * (kind == 'video')}": pixels, f"{kind}_grid_thw": torch.tensor(grids)}
        if kind == "video" and second_per_grid:
            own["second_per_grid_ts"] = torch.tensor([0.5])
        media.append(own if grids else {})
    work = torch.tensor([float(sum(map(math.prod, GRIDS.get(number, [])))) for number in range(len(batch))])
    return batch.with_fields(input_ids=ids, **{MEDIA: media, MEDIA_WORK: work})


def phases(path: str, checkpoint: str = "") -> dict:
    """
    Compute log-probabilities and an update of rollouts that are given, as `packplan rl` does; write
    a checkpoint afterwards if its folder is named.
    """
    config = training.read_config(path, rl=True)
    with training.joined_ranks(config) as group:
        samples = training.open_samples(config)["train"]
        worker = training.open_policy(config, group, samples, training.decide_attention(config, isolated=False))
        workers = RankWorkers(worker, group)
        shards = group.world_size // config.policy.ranks_per_shard
        vocabulary = len(samples.template.tokenizer)
        sees = samples.sees_images
        batch = seeing_rollouts(worker._model.config, vocabulary) if sees else rollouts(vocabulary)
        if sees:
            # The first phase of a step, in which transformers runs the tower before the model.
            prompts = worker._inputs.prompts(batch.select([1]))
            with torch.no_grad(), whole_weights(worker._model):
                worker._model.generate(**prompts, max_new_tokens=1, pad_token_id=0)
        lengths = batch.lengths.numpy()
        work, _ = trained_work(config)
        cut = loop.cut(config, lengths, work=work, shards=shards, training=False)
        found = loop._predicted(config, workers, batch, cut)
        old, noise = found["log_probabilities"], batch.tensor("noise")
        batch = batch.with_fields(
            old_log_probabilities=old + noise, reference_log_probabilities=old - noise,
            engine_log_probabilities=old + 1.5 * noise, old_values=old + noise, returns=noise,
        )  # fmt: skip
        sequences, tokens = normalisers(batch.tensor("token_mask"))
        sharding = loop.cut(config, lengths, work=work, shards=shards, training=True)
        # Twice: what one update leaves is not added to the next.
        for _ in range(2):
            trained = loop.run_on_all(
                workers, "train", batch.shard(sharding), config, num_sequences=[sequences], num_tokens=[tokens]
            )
        with whole_weights(worker._model):
            # Ranks whose answers end later run more passes.
            if group.rank == 0 and config.policy.tensor_parallel_size == 1:
                with torch.no_grad():
                    worker._model(input_ids=torch.tensor([[1, 2, 3]]))
        if checkpoint:
            worker.save_checkpoint(checkpoint, facts="{}")
        return {
            "old": old,
            "values": found.get("values", torch.empty(0)),
            "trained": {name: torch.tensor(np.array([one[name] for one in trained])) for name in trained[0]},
            "gradients": {name: whole(p.grad) for name, p in worker._model.named_parameters()},
            "bytes": torch.tensor(held_bytes(worker)),
            "size": torch.tensor(worker._mean_size(), dtype=torch.float64),
            "share": sharding.positions.sum() / (len(LENGTHS) * max(LENGTHS)),
        }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def held_bytes(worker: PolicyWorker) -> list[int]:
    """Return the bytes of parameters, gradients and optimizer states that this rank holds."""
    weights = list(worker._model.parameters())
    states = [state for one in worker._optimizer.state.values() for state in one.values()]
    return [
        sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in kind)
        for kind in (weights, [one.grad for one in weights], states)
    ]


ASKED = [7, 3, 20, 3, 11]
"""Prompts of a step, which 2 and 4 workers do not divide; one comes twice."""


def answered(path: str, *, order: Sequence[int] = range(len(ASKED)), steps: Sequence[int] = (0,)) -> list[dict]:
    """Return rows and rewards of each step at fixed weights, in the order of `ASKED`."""
    config = training.read_config(path, rl=True)
    with training.joined_ranks(config) as group:
        samples = training.open_samples(config)["train"]
        worker = training.open_policy(config, group, samples, training.decide_attention(config, isolated=False))
        prompts, _ = loop._encoded_prompts(config, samples, shown=False)
        asked = loop._asked(samples, prompts, np.zeros(len(prompts)), np.array(ASKED)).select(list(order))
        found = []
        for step in steps:
            batch, rewards, _ = loop._roll_out(
                config, RankWorkers(worker, group), asked, shards=group.world_size, step=step
            )
            back = np.argsort(np.repeat(order, config.grpo.num_generations_per_prompt), kind="stable")
            found.append({
                "rows": [batch.tensor("input_ids")[row, : batch.lengths[row]].tolist() for row in back],
                "logs": [batch.tensor("engine_log_probabilities")[row, : batch.lengths[row]] for row in back],
                "rewards": rewards[back].tolist(),
            })  # fmt: skip
        return found


def trained(path: str, *, is_double: bool) -> dict:
    """Run steps of a run; return by how much they moved the weights, and what was logged."""
    config = training.read_config(path, rl=True)
    with training.joined_ranks(config) as group:
        samples = training.open_samples(config)["train"]
        worker = training.open_policy(config, group, samples, training.decide_attention(config, isolated=True))
        if is_double:
            worker._model.double()
        before = {name: weight.clone() for name, weight in worker._model.state_dict().items()}
        history = loop.run(config, RankWorkers(worker, group), samples)
        moved = {name: weight - before[name] for name, weight in worker._model.state_dict().items()}
        return {"moved": moved, "rewards": [entry["reward"] for entry in history]}


def keep(function: Callable[..., Any], path: str, out: str, **options: Any) -> None:
    """Run one of the functions above; rank 0 keeps what it returns."""
    found = function(path, **options)
    if os.environ["RANK"] == "0":
        torch.save(found, out)


def main(cases: dict[str, tuple[str, int]], out: str) -> None:
    """
    Run the phases of several YAMLs, each on a port of its own; rank 0 keeps what came out, by the
    names of the cases.
    """
    for name, (path, port) in cases.items():
        os.environ["MASTER_PORT"] = str(port)
        found = phases(path, f"{out}/{name}")
        if os.environ["RANK"] == "0":
            kept = {key: value for key, value in found.items() if key != "share"}
            torch.save(kept, Path(out) / f"{name}.pt")


def killed_in_a_checkpoint(arguments: list[str], number: int) -> int:
    """
    Run `packplan rl`, and kill the second rank in its *number*-th checkpoint, when all parts are
    written.
    """
    from packplan.adapters.workers import checkpoints
    from packplan.app.rl import __main__ as rl

    plain, calls = checkpoints._share, iter(range(1, 100))

    def share(names: list[str], group: RankGroup) -> list[str]:
        if next(calls) == number and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(names, group)

    checkpoints._share = share
    return rl.main(arguments)
