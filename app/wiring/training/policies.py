"""The policy of a run of reinforcement learning, and the workers that hold it."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from packplan.adapters.losses import LOSSES, FusedLoss, PackedLoss, PaddedLoss
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.video.reading import reads_videos
from packplan.adapters.trainer.arguments import runs_on_cpu
from packplan.adapters.trainer.model import open_model
from packplan.adapters.trainer.vision import DummyImage
from packplan.adapters.workers.media import never_sample_placeholders
from packplan.adapters.workers.policy import PolicySettings, PolicyWorker
from packplan.adapters.workers.ranks import RankWorkers
from packplan.adapters.workers.server import ServerEngine
from packplan.adapters.workers.sharding import RankGrid
from packplan.adapters.workers.value_head import ValueHead
from packplan.app.wiring.functions import named_function
from packplan.app.wiring.stores import read_config
from packplan.app.wiring.training.ranks import join_ranks, joined_ranks, require_same_weights
from packplan.app.wiring.training.samples import open_samples
from packplan.app.wiring.training.verdicts import decide_attention
from packplan.core.config import RunConfig
from packplan.core.equality import AttentionChoice
from packplan.core.errors import ConfigError, Fault
from packplan.core.ports import RankGroup, Workers
from packplan.core.rl import REWARDS

log = logging.getLogger(__name__)


def open_policy(config: RunConfig, group: RankGroup, samples: SwiftEncoder, attention: AttentionChoice) -> PolicyWorker:
    """
    Load the policy of a run of reinforcement learning, for one worker; ConfigError if the workers
    cannot share rows, RunError if they have other weights.

    Args:
        config: The run.
        group: The workers, as ranks.
        samples: The prompts; their template encodes answers too.
        attention: Attention of the run.
    """
    grpo, trainer, policy = config.grpo, config.training.trainer, config.policy
    _require_groups(config, group.world_size)
    cuda = torch.cuda.is_available() and not runs_on_cpu(trainer)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    log.info("attention: %s", attention)
    grid = RankGrid.from_sizes(
        device,
        cp_size=policy.context_parallel_size,
        tp_size=policy.tensor_parallel_size,
        fully=policy.sharding == "fsdp2",
    )
    # Parts go to the device layer by layer, which need not hold the whole model.
    first = torch.device("cpu") if grid.is_sharded else device

    def open_one(*, with_values: bool = False) -> tuple[Any, ValueHead | None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.training.seed)  # adapters begin at random
            opened = open_model(config.model, config.training, attention=attention, device=first)
        require_same_weights(group, opened)
        head = ValueHead(opened, Path(config.model.model)) if with_values else None
        grid.shard(opened)
        return opened.to(device), head

    (model, value_head), reference = open_one(with_values=grpo.baseline == "value"), None
    if grpo.kl_coefficient:
        reference = open_one()[0].eval().requires_grad_(requires_grad=False)
    tokenizer, command = samples.template.tokenizer, grpo.engine_command
    if samples.sees_images:
        for one in filter(None, (model, reference)):
            never_sample_placeholders(one)
        # Where workers meet in a pass of the tower, all take each; and a row of text has to depend
        # on something that is trained.
        if group.world_size > 1 or config.training.freeze_llm:
            passes = 1 + reads_videos(samples.template)
            for one in filter(None, (model, reference)):
                DummyImage.from_model(one, samples.template).ensure_seen(passes=passes)
    return PolicyWorker(
        model,
        engine=None if command is None else ServerEngine(command, tokenizer=tokenizer, group=group),
        reference=reference,
        tokenizer=tokenizer,
        processor=samples.template.processor,
        reward=named_function(grpo.reward, REWARDS, key="grpo.reward"),
        loss=_open_loss(config),
        group=group,
        grid=grid,
        value_head=value_head,
        settings=PolicySettings.from_config(config),
    )


def _require_groups(config: RunConfig, num_workers: int) -> None:
    """Require that the workers are whole groups of those that share rows or layers."""
    for name, size in (("context_parallel_size", config.policy.context_parallel_size),
                       ("tensor_parallel_size", config.policy.ranks_per_shard)):  # fmt: skip
        if num_workers % size:
            reason = f"needs workers in groups of {size}, which does not divide {num_workers} workers: start a multiple"
            raise ConfigError.at(f"policy.{name}", reason)


def _open_loss(config: RunConfig) -> FusedLoss | PackedLoss | PaddedLoss:
    """Return the loss that `grpo.loss` names; ConfigError if there is none."""
    name, policy = config.grpo.loss, config.policy
    if name in LOSSES:
        return FusedLoss(LOSSES[name](config.grpo))
    own = named_function(name, dict[str, Any](LOSSES), key="grpo.loss")
    try:
        inspect.signature(own).bind(None, {}, num_sequences=1, num_tokens=1)
    except TypeError as error:
        reason = f"is {name}, which does not take (logits, data, num_sequences=…, num_tokens=…): {error}"
        raise ConfigError.at("grpo.loss", reason) from None
    in_parts = policy.sequence_packing.enabled or policy.dynamic_batching.enabled
    return PackedLoss(own) if in_parts else PaddedLoss(own)


def build_ray_worker(path: str, overrides: Sequence[str]) -> PolicyWorker:
    """Build one worker of a run in its own process, whose environment says which rank it is."""
    config = read_config(path, overrides, rl=True)
    group = join_ranks(config)
    # Its machine may be another one than the driver's.
    attention = decide_attention(config, isolated=config.policy.sequence_packing.enabled)
    return open_policy(config, group, open_samples(config)["train"], attention)


@contextlib.contextmanager
def open_workers(
    config: RunConfig,
    samples: SwiftEncoder,
    attention: AttentionChoice,
    *,
    ray_workers: int,
    build_in_actor: Callable[[], Any],
) -> Iterator[Workers]:
    """
    Start the workers of a run, and end them.

    Args:
        config: The run.
        samples: Samples of `train`.
        attention: Attention of the run, for workers that are ranks.
        ray_workers: Ray actors to start; 0: the ranks that torchrun's environment describes, or
            this process.
        build_in_actor: Builds the worker of a Ray actor, in its own process.
    """
    if ray_workers:
        if find_spec("ray") is None:
            reason = "is not installed: install packplan with its extra rl, or start the workers with torchrun"
            raise ConfigError("--ray-workers", (Fault("ray", reason),))
        from packplan.adapters.workers.ray import RayWorkers  # an extra

        gpus = 0.0 if runs_on_cpu(config.training.trainer) or not torch.cuda.is_available() else 1.0
        with contextlib.closing(RayWorkers(build_in_actor, num_workers=ray_workers, gpus_each=gpus)) as workers:
            yield workers
        return
    with (
        joined_ranks(config) as group,
        contextlib.closing(RankWorkers(open_policy(config, group, samples, attention), group)) as ranks,
    ):
        yield ranks
