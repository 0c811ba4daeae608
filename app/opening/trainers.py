"""Builds the model, settings and trainer of a run, for a plan or a stream."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from transformers.utils.logging import disable_progress_bar

from packplan.adapters.attention.shared_rows import RowGroups, share_rows
from packplan.adapters.hf.refusals import warn_of_unclipped_gradients
from packplan.adapters.loaders.batches import PackBatches
from packplan.adapters.model_folder import PROCESSING_FILES, model_file_facts
from packplan.adapters.models import find_sharded_weight, plain_model
from packplan.adapters.probe.probe_row import probe_sharing_copy
from packplan.adapters.samples.arguments import swift_types
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.video_reading import has_separate_video_pass
from packplan.adapters.trainer.arguments import (
    TrainingArguments,
    make_training_arguments,
    shards_weights,
    yield_setting_faults,
)
from packplan.adapters.trainer.checkpoints import (
    CHECKPOINT_KEY,
    Checkpoint,
    State,
    find_checkpoint,
    newest_checkpoint,
    saved_plans,
)
from packplan.adapters.trainer.loader import PackedDataset
from packplan.adapters.trainer.model import open_model
from packplan.adapters.trainer.streams.dataset import StreamDataset
from packplan.adapters.trainer.streams.trainer import StreamTrainer
from packplan.adapters.trainer.trainer import PlanTrainer
from packplan.adapters.trainer.vision import dummy_image
from packplan.app.opening.ranks import read_settings_files, require_same_run, require_same_weights
from packplan.app.opening.stores import refuse_other_parts
from packplan.app.opening.verdicts import probe_loaded_model
from packplan.app.planning.schedule import accumulation_of
from packplan.app.planning.split import PlannedSplit, Split
from packplan.core.config.identity import flat_values, run_identity
from packplan.core.config.run import RunConfig, TrainingConfig
from packplan.core.equality import AttentionChoice
from packplan.core.errors import ConfigError, Difference, counted
from packplan.core.fingerprint import RunIdentity
from packplan.core.packs import Packs
from packplan.core.ports import RankGroup
from packplan.core.schedule import EpochSchedule, ResumeState
from packplan.core.stream import Order, RankState, StreamOptions, StreamProgress, StreamState, redistribute

log = logging.getLogger(__name__)

Differences = Callable[[State], tuple[Difference, ...]]
"""Function that returns the differences between a checkpoint's resume state and this run."""


def hide_trainer_progress(config: RunConfig) -> RunConfig:
    """
    Return a run whose trainer shows no progress bar by default, and hide transformers' own bars.
    """
    disable_progress_bar()
    trainer = {"disable_tqdm": True, **config.training.trainer}
    return attrs.evolve(config, training=attrs.evolve(config.training, trainer=trainer))


def warn_of_overwriting(training: TrainingConfig, group: RankGroup) -> None:
    """Warn on rank 0 if a run from the beginning may overwrite checkpoints of an earlier run."""
    if training.resume_from_checkpoint is not None or group.rank != 0:
        return
    if (newest := newest_checkpoint(training.output_dir)) is not None:
        fact = f"{newest} exists, but this run starts from the beginning, and overwrites checkpoints of the same steps"
        log.warning("%s. For the newest complete checkpoint, set training.resume_from_checkpoint: last", fact)


def open_checkpoint(config: RunConfig, group: RankGroup, kind: type[State]) -> Checkpoint[State] | None:
    """
    Return the checkpoint that a run resumes from; None if it starts from the beginning.

    Every rank has to call this function. The checkpoint's plan is not yet compared with the run's
    plan.

    Args:
        config: The run.
        group: All ranks.
        kind: Class of the resume state, `ResumeState` or `StreamState`.

    Raises:
        ConfigError: The checkpoint is missing or damaged.
        StaleError: The checkpoint was trained with another model, loss or settings.
        RunError: Ranks found different checkpoints.
    """
    if config.training.resume_from_checkpoint is None:
        return None
    now = identity_of_run(config)
    return _find_checkpoint(config, group, kind, lambda state: state.identity.fixed.differences(now.fixed))


def resumable_plans(config: RunConfig) -> frozenset[str] | None:
    """
    Return the names of the plans in the checkpoints that a run may resume from; None if the run
    does not resume.
    """
    asked = config.training.resume_from_checkpoint
    return None if asked is None else saved_plans(str(asked), config.training.output_dir)


def match_checkpoint(
    config: RunConfig, group: RankGroup, checkpoint: Checkpoint[State], differences: Differences[State]
) -> Checkpoint[State]:
    """
    Return *checkpoint* if it agrees with this run, else the newest checkpoint that agrees. Log
    settings that may change, and have changed.

    Other checkpoints are tried only if the run resumes from `last`. Raises StaleError if no
    checkpoint agrees.

    Args:
        config: The run.
        group: All ranks.
        checkpoint: Checkpoint that `open_checkpoint` returned.
        differences: Function that returns the differences between a resume state and this run.
    """
    if differences(checkpoint.resume_state):
        checkpoint = _find_checkpoint(config, group, type(checkpoint.resume_state), differences)
    if group.rank == 0:
        for one in checkpoint.resume_state.identity.changeable.differences(identity_of_run(config).changeable):
            log.warning("a setting has changed since %s, and this run's value is used: %s", checkpoint.folder, one)
    return checkpoint


def _find_checkpoint(
    config: RunConfig, group: RankGroup, kind: type[State], differences: Differences[State]
) -> Checkpoint[State]:
    """Find the checkpoint that a run names, and check that all ranks found the same checkpoint."""
    named, folder = str(config.training.resume_from_checkpoint), config.training.output_dir
    checkpoint: Checkpoint[State] = find_checkpoint(
        named, folder, group=group, state_class=kind, differences=differences
    )
    require_same_run(group, flat_values({"checkpoint": attrs.asdict(checkpoint.resume_state)}))
    engine = config.training.trainer.get("deepspeed")
    refuse_other_parts(CHECKPOINT_KEY, checkpoint.folder, engine, num_ranks=group.world_size)
    return checkpoint


def identity_of_run(config: RunConfig) -> RunIdentity:
    """Return the identity of a run, which its checkpoints store: model, loss and settings."""
    model = model_file_facts(Path(config.model.model), patterns=PROCESSING_FILES)
    model["template.template"] = swift_types(config.model, config.template)[1]
    return run_identity(config, files=read_settings_files(config), model=model)


def resume_state(config: RunConfig, train: PlannedSplit, schedule: EpochSchedule) -> ResumeState:
    """
    Return the resume state of a run before its first step: its plan, data and settings.

    Args:
        config: The run.
        train: Planned split `train`.
        schedule: Order of the split's packs.
    """
    return ResumeState.from_schedule(
        schedule,
        plan=train.plan_name(train.key, train.raw),
        data=train.data_digest,
        identity=identity_of_run(config),
        tuner=config.training.tuner_type,
        inputs=train.key.inputs,
    )


def open_arguments(config: RunConfig, *, world_size: int) -> TrainingArguments:
    """
    Build the trainer's arguments, with the accumulation steps that give the effective batch size.

    Args:
        config: The run.
        world_size: Number of ranks; a group of ranks that share rows counts as one.

    Raises:
        ArgumentError: The effective batch size is impossible with this number of ranks.
        ConfigError: ms-swift refuses a setting, or the trainer could not use a setting later.
    """
    accumulation = accumulation_of(config, world_size=world_size)
    arguments = make_training_arguments(config, gradient_accumulation_steps=accumulation.gradient_accumulation_steps)
    if found := tuple(yield_setting_faults(arguments)):
        raise ConfigError("the section training", found)
    warn_of_unclipped_gradients(arguments, "training")
    return arguments


def _open_model(
    config: RunConfig,
    arguments: TrainingArguments,
    encoder: SwiftEncoder,
    group: RankGroup,
    attention: AttentionChoice,
    *,
    degrees: Iterable[int] = (),
) -> tuple[Any, Any, RowGroups | None]:
    """
    Load and prepare the model; return its template, the model, and the groups of ranks that share
    rows. *degrees* are the numbers of ranks that share a pack.
    """
    template = encoder.template
    device = None if shards_weights(arguments) else arguments.device
    model: Any = open_model(config.model, config.training, attention=attention, device=device)
    is_whole = not arguments.fsdp and find_sharded_weight(model) is None  # FSDP shares them later
    if is_whole:
        require_same_weights(group, model)
    elif group.rank == 0:
        log.info("the weights of the ranks were not compared: they are sharded, so no rank holds all of them")
    rows = RowGroups.make([config.training.row_ranks], arguments.ddp_timeout_delta)
    if config.training.shares_by_degree:
        rows = RowGroups.make(degrees, arguments.ddp_timeout_delta, packing_length=config.packing_length)
    if rows is not None:
        share_rows(model, rows)
        if not is_whole:
            named, device = config.model.attn_impl, arguments.device
            probe_sharing_copy(model, attention, named=named, groups=rows, device=device)
    if config.training.packing and attention.verdict is not None:
        probe_loaded_model(config, model, attention.verdict, whole=is_whole, keep=group.rank == 0, groups=rows)
    template.model = plain_model(model)
    # Where the text's weights are frozen, a batch without images would depend on nothing that is
    # trained.
    if encoder.takes_images and (group.world_size > 1 or config.training.freeze_llm):
        use_vision_tower_in_each_batch(model, template, arguments)
    return template, model, rows


def use_vision_tower_in_each_batch(model: Any, template: Any, arguments: TrainingArguments) -> None:
    """
    Make all ranks that share weights or gradients run the whole vision tower in every batch.

    Args:
        model: Model that is prepared for training.
        template: Template of the model.
        arguments: Settings of the trainer.

    Raises:
        ConfigError: The model has no function for image features, or some trained weights of its
            vision tower are not used by any image.
    """
    dummy = dummy_image(model, template)
    waits = not shards_weights(arguments) and not arguments.ddp_find_unused_parameters
    if waits and (unreached := dummy.unreached_weights()):
        reason = (
            f"is false, but no image reaches {counted(len(unreached), 'weight')} of the vision tower, such as "
            f"{unreached[0]}, so ranks would hang: set it or training.freeze_vit to true"
        )
        raise ConfigError.for_key("training.ddp_find_unused_parameters", reason)
    # Ranks that share weights meet in each pass of the tower. If images and videos have separate
    # passes, every rank runs both.
    dummy.ensure_tower_runs(passes=1 + (shards_weights(arguments) and has_separate_video_pass(template)))


def build_trainer(
    config: RunConfig,
    arguments: TrainingArguments,
    splits: Mapping[str, PlannedSplit],
    schedule: EpochSchedule,
    state: ResumeState,
    *,
    attention: AttentionChoice,
    group: RankGroup,
) -> PlanTrainer:
    """
    Load the model, and build a trainer that trains the planned packs.

    Args:
        config: The run.
        arguments: Settings of the trainer, including the checkpoint to resume from.
        splits: The planned splits: `train`, and perhaps `eval`.
        schedule: Schedule of the packs of `train`; a group of ranks that share every row counts as
            one rank.
        state: Resume state of the run before training.
        attention: Attention backend of the run.
        group: All ranks.
    """
    train = splits["train"]
    stats = train.pack_stats
    shared = [split.aligned.shared_by for split in splits.values()]
    degrees = {int(one) for each in shared if each is not None for one in each}
    template, model, rows = _open_model(config, arguments, train.encoder, group, attention, degrees=degrees)
    trainer = PlanTrainer(
        group=group,
        pack_batches=PackBatches(schedule, group.rank // config.training.row_ranks, schedule.world_size, state=state),
        pack_stats=stats,
        attention=attention,
        reduction=config.training.loss_reduction,
        model=model,
        args=arguments,
        template=template,
        train_dataset=_packed_dataset(train, lambda epoch: stats(epoch).packs, epoch=schedule.start.epoch),
        eval_dataset=_eval_dataset(splits.get("eval")),
    )
    trainer.row_groups = rows
    return trainer


def _eval_dataset(split: PlannedSplit | None) -> PackedDataset | None:
    """
    Return the packs to evaluate; None if there is no split `eval`, or if it has no supervised
    tokens.
    """
    if split is None or not split.is_supervised:
        return None
    packs = split.raw.packs
    return _packed_dataset(split, lambda _: packs)


def _packed_dataset(split: PlannedSplit, packs_of: Callable[[int], Packs], *, epoch: int = 0) -> PackedDataset:
    """Return a data set of a planned split's packs, set to *epoch*."""
    dataset = PackedDataset(split.encoder, packs_of, split.table, packed=split.policy.packing)
    dataset.degrees = split.aligned.shared_by
    dataset.set_epoch(epoch)
    return dataset


def find_stream_start(
    checkpoint: Checkpoint[StreamState] | None, group: RankGroup, arguments: TrainingArguments
) -> tuple[StreamProgress, RankState]:
    """
    Return the progress of all ranks, and of this rank, from which a stream starts.

    Args:
        checkpoint: Checkpoint to resume from; None starts from the beginning.
        group: All ranks.
        arguments: Settings of the trainer.
    """
    now = {"world_size": group.world_size, "readers_per_rank": max(1, arguments.dataloader_num_workers)}
    if checkpoint is None:
        return StreamProgress(**now), RankState()
    progress, ranks = checkpoint.resume_state.progress, checkpoint.resume_state.ranks
    if attrs.evolve(progress, **now) != progress:
        progress, ranks = redistribute(progress, ranks, **now)
    return progress, ranks[group.rank]


def build_stream_trainer(
    config: RunConfig,
    arguments: TrainingArguments,
    train: Split,
    evaluation: PlannedSplit | None,
    *,
    attention: AttentionChoice,
    group: RankGroup,
    order: Order,
    start: tuple[StreamProgress, RankState],
    resume_state: Callable[[StreamProgress], StreamState],
) -> StreamTrainer:
    """
    Load the model, and build the trainer of a stream.

    Args:
        config: The run.
        arguments: Settings of the trainer.
        train: Opened split `train`.
        evaluation: The planned split `eval`, if there is one.
        attention: Attention backend of the run.
        group: All ranks.
        order: Order of the samples of `train` in an epoch.
        start: Progress of all ranks, and of this rank, from which training starts.
        resume_state: Function that makes a checkpoint's resume state from the stream's progress.
    """
    training, encoder = config.training, train.encoder
    template, model, _ = _open_model(config, arguments, encoder, group, attention)
    options = StreamOptions(
        packing_length=config.packing_length,
        packing_buffer=training.packing_buffer,
        min_fill_ratio=training.packing_min_fill_ratio,
        drop_last=training.packing_drop_last,
        allow_single_long=training.packing_allow_single_long,
    )
    return StreamTrainer(
        start=start,
        resume_state=resume_state,
        attention=attention,
        num_epochs=None if training.max_steps > 0 else int(training.num_train_epochs),
        group=group,
        reduction=training.loss_reduction,
        model=model,
        args=arguments,
        template=template,
        train_dataset=StreamDataset(encoder, order, options, rank=group.rank, world_size=group.world_size),
        eval_dataset=_eval_dataset(evaluation),
    )
