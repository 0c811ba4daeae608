"""
The only place that constructs adapters that need ms-swift or torch; `app.wiring.stores` constructs
the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from filelock import FileLock, Timeout

from adapters.files import writing
from adapters.model_folder import config_model_type, refuse_other_layers
from adapters.policy_loss import LOSSES
from adapters.probe import limit_of, open_model_config, place_of, probe_config, probe_loaded
from adapters.ranks.torch_group import OneRank, TorchGroup
from adapters.samples.encoder import SampleSpec, SwiftEncoder
from adapters.samples.measurer import POOL_START_S, SwiftMeasurer
from adapters.samples.template import open_template, refuse_packing, refuse_remote_code
from adapters.samples.video import sees_videos_apart
from adapters.sequence_loss import FusedLoss, PackedLoss, PaddedLoss
from adapters.trainer.arguments import TrainingArguments, runs_on_cpu, shards_weights, training_arguments
from adapters.trainer.checkpoints import Checkpoint, find_checkpoint, newest_checkpoint
from adapters.trainer.dynamic_dataset import DynamicDataset
from adapters.trainer.equality import PackComparison
from adapters.trainer.model import hide_progress_bars, open_model
from adapters.trainer.packed_dataset import PackedDataset
from adapters.trainer.rehearsal import rehearsal_faults
from adapters.trainer.rollouts import RecordStream, RolloutStream
from adapters.trainer.static import PackTrainer
from adapters.trainer.stream import StreamTrainer
from adapters.trainer.vision import DummyImage
from adapters.workers.policy import PolicySettings, PolicyWorker
from adapters.workers.ranks import RankWorkers
from app.planning.split import PlannedSplit, resume_state_of
from app.wiring.functions import named_function
from app.wiring.inputs import records_cache
from app.wiring.stores import (
    asked_of,
    attention_by,
    needs_verdict,
    open_verdicts,
    read_config,
    refuse_leaks,
    stored_verdict,
    verdict_key,
)
from core.batch import Accumulation
from core.config import ModelConfig, RunConfig
from core.equality import Attention, PackingVerdict, why_not_here
from core.errors import ConfigError, Fault, IsolationError, agree, counted
from core.ports import RankGroup, Workers
from core.rl import REWARDS, Reward, Sampling
from core.samples import column
from core.schedule import EpochSchedule, PackStats
from core.stream import CarryOptions, Order
from core.work import SampleWorks

log = logging.getLogger(__name__)


def without_progress(config: RunConfig) -> RunConfig:
    """Return a run whose trainer shows no progress, and hide transformers' own in this process."""
    hide_progress_bars()
    trainer = {"disable_tqdm": True, **config.training.trainer}
    return attrs.evolve(config, training=attrs.evolve(config.training, trainer=trainer))


@contextlib.contextmanager
def joined_ranks(settings: Mapping[str, Any]) -> Iterator[RankGroup]:
    """
    Join the ranks that torchrun's environment describes, or be the only one, and leave them at the
    end.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield OneRank()
        return
    group = TorchGroup(use_cpu=bool(settings.get("use_cpu")), timeout_s=float(settings.get("ddp_timeout", 1800)))
    yield group
    # Not after an error: the other ranks may wait for this one in a collective, and leaving would
    # wait for them.
    group.leave()


def require_isolation(config: RunConfig, *, packed: bool) -> None:
    """
    Ask the model whether samples may share its packs, unless that is stored, before anything is
    measured; refuse an attention that does not run, or under which they might see each other.

    Args:
        config: The run.

        packed: Whether samples share packs.
    """
    on_cpu = runs_on_cpu(config.training.trainer)
    if packed:
        refuse_leaks(config, None, on_cpu=on_cpu)
    verdict = verdict_of(config) if needs_verdict(config, packed=packed) else None
    attention_by(config, verdict)
    if packed:
        refuse_leaks(config, verdict, on_cpu=on_cpu)


def ask_before_measuring(config: RunConfig) -> PackingVerdict | None:
    """
    Refuse a model that may not pack before hours of measuring, and return the verdict on it; None
    where nothing is packed, or the attention runs on other machines alone.
    """
    on_cpu = runs_on_cpu(config.training.trainer)
    flash = find_spec("flash_attn") is not None
    if not config.training.packing or why_not_here(config.model.attn_impl, flash_installed=flash, on_cpu=on_cpu):
        return None
    require_isolation(config, packed=True)
    return verdict_of(config)


def attention_of(config: RunConfig) -> Attention:
    """
    Return the attention that a run takes; the model is asked, unless its verdict is stored.

    Raises:
        AttentionError: It cannot take the one that `model.attn_impl` names.

        ConfigError: The model's folder does not say what it is.
    """
    packed = config.training.packing or config.policy.sequence_packing.enabled
    return attention_by(config, verdict_of(config) if needs_verdict(config, packed=packed) else None)


def verdict_of(config: RunConfig) -> PackingVerdict:
    """Return the verdict on a run's model: stored, or by probe."""
    on_cpu = runs_on_cpu(config.training.trainer)
    stored = stored_verdict(config)
    if stored is not None and not (stored.strategy == "flash" and on_cpu):
        return stored
    refuse_remote_code(config.model)
    refuse_other_layers(config.model)
    return _probed(verdict_key(config).digest, config.model, asked_of(config), on_cpu=on_cpu)


@cache
def _probed(digest: str, model: ModelConfig, attn_impl: str, *, on_cpu: bool) -> PackingVerdict:
    """
    Probe a model, once in a process.

    Args:
        digest: Of all that the verdict depends on; another one is another verdict.

        model: What to ask.

        attn_impl: See `asked_of`.

        on_cpu: Whether it trains on a CPU.
    """
    del digest
    start = time.monotonic()
    verdict = probe_config(
        open_model_config(model), attn_impl=attn_impl, trust_remote_code=model.trust_remote_code, on_cpu=on_cpu
    )
    log.info("%s was asked whether it may pack, in %.1f s: %s", verdict.model_type, time.monotonic() - start, verdict)
    return verdict


def keep_verdict(config: RunConfig, verdict: PackingVerdict) -> None:
    """Keep the verdict on a run's model beside its plans."""
    if verdict != stored_verdict(config):
        open_verdicts(config).save(verdict_key(config), verdict)


def model_type_of(config: RunConfig) -> str:
    """Return the `model_type` of the model's config.json."""
    return config_model_type(config.model)


def local_ranks() -> int:
    """Return how many ranks share this machine's cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def open_samples(config: RunConfig, *, train_paths: tuple[str, ...] | None = None) -> dict[str, SwiftEncoder]:
    """
    Open the data of each split, `train` and perhaps `eval`, on one template.

    Args:
        config: The run.

        train_paths: Data files of `train`, if not those of `custom.train_jsonl`.
    """
    packs = config.training.packing
    template = open_template(config.model, config.template, packing_length=config.packing_length, packs=packs)
    if packs:
        refuse_packing(template)
    opened: dict[str, SwiftEncoder] = {}
    paths = {"train": train_paths or config.custom.train_jsonl, "eval": config.custom.val_jsonl}
    for split, files in paths.items():
        if not files:
            continue
        spec = SampleSpec(
            config.model, config.template, config.custom, files, config.packing_length, records_cache(config)
        )
        opened[split] = SwiftEncoder(spec, template=template)
        opened[split].require_images()
        if os.environ.get("RANK", "0") == "0":
            for one in opened[split].data_files():
                log.info("%s: %s has records of the shape %s", split, one.file, one.shape)
        with_tags = opened[split].records.num_with_media_tags
        if with_tags and os.environ.get("RANK", "0") == "0":
            log.warning(
                "%s: %s of %s %s <video> or <audio> without such media, which stays text",
                split,
                f"{with_tags:,}",
                counted(len(opened[split]), "record"),
                agree(with_tags, "says", "say"),
            )
    return opened


def open_measurer(
    config: RunConfig, encoder: SwiftEncoder, *, measuring_ranks: int = 1, pool_start_s: float = POOL_START_S
) -> SwiftMeasurer:
    """
    Return what measures the samples of a split; see `SwiftMeasurer`.

    Args:
        config: The run.

        encoder: Gives the samples.

        measuring_ranks: Ranks on this machine that measure at the same time, and share its cores.

        pool_start_s: Seconds that a pool of workers takes to start.
    """
    return SwiftMeasurer(
        encoder,
        workers=config.training.packing_length_precompute_workers,
        sharers=measuring_ranks,
        pool_start_s=pool_start_s,
    )


@contextlib.contextmanager
def alone_in_output(config: RunConfig, group: RankGroup) -> Iterator[None]:
    """
    Keep other runs from training into the same folder; every rank calls this.

    Raises:
        ConfigError: Another run does so now, and both would write the same checkpoints.
    """
    folder = Path(config.training.output_dir)
    lock = FileLock(folder / "train.lock")
    taken = False
    if group.rank == 0:
        with writing(folder), contextlib.suppress(Timeout):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            taken = True
    if group.any(group.rank == 0 and not taken):
        reason = f"is {folder}, which another run trains into: both would write its checkpoints; name another folder"
        raise ConfigError.of("training.output_dir", reason)
    try:
        yield
    finally:
        lock.release()


def open_checkpoint(config: RunConfig, group: RankGroup) -> Checkpoint | None:
    """
    Return the checkpoint that a run resumes from, None if it starts from the beginning; ConfigError
    if it is none, or damaged. Every rank calls this.
    """
    training = config.training
    if training.resume_from_checkpoint is None:
        if group.rank == 0 and (newest := newest_checkpoint(training.output_dir)) is not None:
            log.warning(
                "%s is there, but this run starts from the beginning, and writes over the checkpoints that it meets: "
                "training.resume_from_checkpoint: last goes on from the newest whole one",
                newest,
            )
        return None
    return Checkpoint.read(find_checkpoint(training.resume_from_checkpoint, training.output_dir, group=group))


def open_arguments(config: RunConfig, batch_size: int, accumulation: Accumulation) -> TrainingArguments:
    """
    Build the trainer's arguments; ConfigError if ms-swift refuses them, or the trainer could not
    use them later.

    Args:
        config: The run.

        batch_size: Batch of a rank: packs, or samples if not packing.

        accumulation: Batches of a rank in one optimizer step.
    """
    arguments = training_arguments(
        config,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation.gradient_accumulation_steps,
    )
    if found := tuple(rehearsal_faults(arguments)):
        raise ConfigError("the section training", found)
    return arguments


def _logged_attention(config: RunConfig, group: RankGroup) -> Attention:
    attention = attention_of(config)
    if group.rank == 0:
        log.info("attention: %s", attention)
    return attention


def _open_model(
    config: RunConfig, arguments: TrainingArguments, samples: SwiftEncoder, group: RankGroup
) -> tuple[Any, Any]:
    """Load the model, and tell the template of it."""
    template = samples.template
    model: Any = open_model(
        config.model,
        config.training,
        attention=_logged_attention(config, group),
        device=None if shards_weights(arguments) else arguments.device,
    )
    if config.training.packing:
        _ask_loaded(config, model, whole=not shards_weights(arguments), keep=group.rank == 0)
    template.model = getattr(model, "get_base_model", lambda: model)()
    # Where the text's weights are frozen, a batch without images would depend on nothing that is
    # trained.
    if samples.sees_images and (group.world_size > 1 or config.training.freeze_llm):
        keep_in_step(model, template, arguments)
    template.packing = template.padding_free = config.training.packing
    return template, model


def keep_in_step(model: Any, template: Any, arguments: TrainingArguments) -> None:
    """
    Let ranks that share a model's weights or gradients use all of its vision tower in every batch.

    Args:
        model: Ready to train.

        template: Of the model.

        arguments: Of the trainer.

    Raises:
        ConfigError: The model does not say how it sees, or no image reaches a part of its tower.
    """
    dummy = DummyImage.of(model, template)
    if not shards_weights(arguments) and not arguments.ddp_find_unused_parameters:
        unreached = dummy.unreached()
        if unreached:
            reason = (
                f"is false, but no image reaches {counted(len(unreached), 'weight')} of the vision tower, as "
                f"{unreached[0]}, whose gradients the ranks would wait for: set it to true, or training.freeze_vit"
            )
            raise ConfigError.of("training.ddp_find_unused_parameters", reason)
    # Where ranks meet in each of its passes, one for images and one for videos, all take both.
    dummy.ensure_seen(passes=1 + (shards_weights(arguments) and sees_videos_apart(template)))


def _ask_loaded(config: RunConfig, model: Any, *, whole: bool, keep: bool) -> None:
    """
    Ask the model that is about to train too, unless it was asked in this place before.

    Args:
        config: The run.

        model: Ready to train.

        whole: Whether this rank holds all of it.

        keep: Whether this rank keeps the verdict.

    Raises:
        IsolationError: Its samples are not apart, or not equal to themselves alone.
    """
    verdict, place = verdict_of(config), place_of(model)
    if not whole:
        if keep and verdict.passes:
            log.info(
                "the loaded model was not asked whether it may pack, since ranks share its weights: "
                "what its small copy showed counts"
            )
    elif verdict.passes and place not in verdict.loaded_on:  # `app.check` looks at those that do not, too
        measured = probe_loaded(model, native=verdict.native)
        why_not = measured.why_not(limit=limit_of(model))
        if why_not is not None:
            reason = f"the loaded model ({place}) was asked, and {why_not}"
            raise IsolationError(verdict.model_type, config.model.attn_impl, reason)
        log.info("the loaded model (%s) was asked too: %s", place, measured)
        verdict = attrs.evolve(verdict, loaded_on=(*verdict.loaded_on, place))
    if keep:
        keep_verdict(config, verdict)


def build_stream_trainer(
    config: RunConfig,
    arguments: TrainingArguments,
    *,
    group: RankGroup,
    samples: Mapping[str, SwiftEncoder],
    planned: PlannedSplit | None,
    order: Order,
    rollout: tuple[Reward, Sampling] | None,
) -> StreamTrainer:
    """
    Load the model and build its trainer over a stream.

    Args:
        config: The run.

        arguments: Of the trainer.

        group: The ranks.

        samples: Of `train` and perhaps `eval`.

        planned: The evaluation's plan.

        order: Of the samples of `train` in an epoch.

        rollout: How prompts are answered and answers scored; None trains the data as they are.
    """
    training = config.training
    template, model = _open_model(config, arguments, samples["train"], group)
    stream = RecordStream(samples["train"], order)
    if rollout is not None:
        if shards_weights(arguments):
            reason = "answers prompts on each rank alone, which weights sharded over ranks do not allow: remove it"
            raise ConfigError.of("custom.rollout_reward", reason)
        reward, sampling = rollout
        stream = RolloutStream(
            samples["train"], order, model=model, reward=reward, sampling=sampling, device=arguments.device
        )
    options = CarryOptions(
        packing_length=config.packing_length,
        packing_buffer=training.packing_buffer,
        min_fill_ratio=training.packing_min_fill_ratio,
        drop_last=training.packing_drop_last,
        allow_single_long=training.packing_allow_single_long,
    )
    evaluated = None
    if planned is not None:
        evaluated = PackedDataset(samples["eval"], planned.raw.packs, planned.table, grouped=config.eval_packing)
    return StreamTrainer(
        packing_length=config.packing_length,
        max_dropped_share=training.packing_max_dropped_share,
        extra=stream.logs,
        group=group,
        reduction=training.loss_reduction,
        model=model,
        args=arguments,
        template=template,
        train_dataset=DynamicDataset(stream, options, rank=group.rank, world_size=group.world_size),
        eval_dataset=evaluated,
    )


def open_comparison(trainer: PackTrainer, samples: SwiftEncoder) -> PackComparison:
    """Return what compares packs with their samples alone, on a trainer that is ready to train."""
    return PackComparison(trainer, samples.encode)


def build_trainer(
    config: RunConfig,
    arguments: TrainingArguments,
    schedule: EpochSchedule,
    *,
    group: RankGroup,
    samples: Mapping[str, SwiftEncoder],
    planned: Mapping[str, PlannedSplit],
    works: SampleWorks,
) -> PackTrainer:
    """
    Load the model and build its trainer over the planned packs.

    Args:
        config: The run.

        arguments: The trainer's settings.

        schedule: What is trained when.

        group: The ranks.

        samples: Samples of `train`, and perhaps `eval`.

        planned: Plan of each split.

        works: What the samples of `train` cost.
    """
    template, model = _open_model(config, arguments, samples["train"], group)
    grouped = {"train": config.training.packing, "eval": config.eval_packing}
    data = {
        split: PackedDataset(samples[split], plan.raw.packs, plan.table, grouped=grouped[split])
        for split, plan in planned.items()
    }
    train = planned["train"]
    return PackTrainer(
        group=group,
        schedule=schedule,
        pack_stats=PackStats.of(
            train.raw, column(train.table, "length").astype(np.int64), packed=config.training.packing, works=works
        ),
        attention=attention_of(config),
        resume_state=lambda progress: attrs.evolve(resume_state_of(train, schedule, config), progress=progress),
        reduction=config.training.loss_reduction,
        model=model,
        args=arguments,
        template=template,
        train_dataset=data["train"],
        eval_dataset=data.get("eval"),
    )


def open_policy(config: RunConfig, group: RankGroup, samples: SwiftEncoder) -> PolicyWorker:
    """
    Load the policy of a run of reinforcement learning, for one worker; ConfigError if the workers
    cannot share rows.

    Args:
        config: The run.

        group: The workers, as ranks.

        samples: The prompts; their template encodes answers too.
    """
    if group.world_size % config.policy.context_parallel_size:
        reason = (
            f"is {config.policy.context_parallel_size}, which does not divide {group.world_size} workers: start a "
            "multiple"
        )
        raise ConfigError.of("policy.context_parallel_size", reason)
    grpo, trainer, policy = config.grpo, config.training.trainer, config.policy
    cuda = torch.cuda.is_available() and not runs_on_cpu(trainer)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    open_one = partial(
        open_model, config.model, config.training, attention=_logged_attention(config, group), device=device
    )
    model = open_one()
    reference = None
    if grpo.kl_coefficient:
        reference = open_one().eval().requires_grad_(requires_grad=False)
    return PolicyWorker(
        model,
        reference=reference,
        tokenizer=samples.template.tokenizer,
        reward=named_function(grpo.reward, REWARDS, key="grpo.reward"),
        loss=_open_loss(config),
        group=group,
        settings=PolicySettings(
            temperature=grpo.temperature,
            max_new_tokens=grpo.max_new_tokens,
            num_generations=grpo.num_generations_per_prompt,
            learning_rate=float(trainer.get("learning_rate", 1e-6)),
            weight_decay=float(trainer.get("weight_decay", 0.0)),
            max_grad_norm=float(trainer.get("max_grad_norm", 1.0)),
            context_parallel_size=policy.context_parallel_size,
        ),
    )


def _open_loss(config: RunConfig) -> FusedLoss | PackedLoss | PaddedLoss:
    """Return the loss that `grpo.loss` names; ConfigError if there is none."""
    name, policy = config.grpo.loss, config.policy
    if name in LOSSES:
        return FusedLoss(LOSSES[name](config.grpo))
    own = named_function(name, dict[str, Any](LOSSES), key="grpo.loss")
    in_parts = policy.sequence_packing.enabled or policy.dynamic_batching.enabled
    return PackedLoss(own) if in_parts else PaddedLoss(own)


def build_ray_worker(path: str, overrides: Sequence[str]) -> PolicyWorker:
    """Build one worker of a run in its own process, whose environment says which rank it is."""
    config = read_config(path, overrides, rl=True)
    trainer = config.training.trainer
    group: RankGroup = OneRank()
    if int(os.environ["WORLD_SIZE"]) > 1:
        group = TorchGroup(use_cpu=runs_on_cpu(trainer), timeout_s=float(trainer.get("ddp_timeout", 1800)))
    return open_policy(config, group, open_samples(config)["train"])


@contextlib.contextmanager
def open_workers(
    config: RunConfig, path: str, samples: SwiftEncoder, *, overrides: Sequence[str] = (), ray_workers: int
) -> Iterator[Workers]:
    """
    Start the workers of a run, and end them.

    Args:
        config: The run.

        path: Of its YAML, which workers in other processes read themselves.

        samples: Of `train`.

        overrides: Of the command line, over the YAML.

        ray_workers: Ray actors to start; 0: the ranks that torchrun's environment describes, or
        this process.
    """
    if ray_workers:
        if find_spec("ray") is None:
            reason = "is not installed: install packplan with its extra rl, or start the workers with torchrun"
            raise ConfigError("--ray-workers", (Fault("ray", reason),))
        from adapters.workers.ray import RayWorkers  # an extra

        gpus = 0.0 if runs_on_cpu(config.training.trainer) or not torch.cuda.is_available() else 1.0
        ray = RayWorkers(partial(build_ray_worker, path, overrides), num_workers=ray_workers, gpus_each=gpus)
        try:
            yield ray
        finally:
            ray.close()
        return
    with joined_ranks(config.training.trainer) as group:
        yield RankWorkers(open_policy(config, group, samples), group)
