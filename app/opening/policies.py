"""
Settings that decide a run's plans: packing policy, work of the model, and mixes of its epochs.
"""

from collections.abc import Iterable

from packplan.adapters.config.run import load_mixes
from packplan.adapters.model_folder import config_content
from packplan.core.config.identity import plan_policy
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecipe
from packplan.core.errors import ConfigError
from packplan.core.inspection import describe_few_positions
from packplan.core.mixes import Mixes, mixes_faults, stream_faults
from packplan.core.packers import ALGORITHMS
from packplan.core.policy import PlanPolicy
from packplan.core.samples.tables import DataFile, Table, column, source_sizes
from packplan.core.work.model import WorkModel


def policy_of_split(config: RunConfig, split: str) -> PlanPolicy:
    """
    Return the packing policy of a split.

    The policy includes the model's work if the packing algorithm uses work.
    """
    uses_works = config.training.packing and "works" in ALGORITHMS[config.training.packing_algorithm].takes
    return plan_policy(config, split, work=work_of_run(config)[0] if uses_works else None)


def work_of_run(config: RunConfig) -> tuple[WorkModel, str | None]:
    """
    Return the work of a run's model in forward and backward pass, and the reason if it is only
    estimated.
    """
    try:
        model, estimated = WorkModel.from_config_or_estimated(config_content(config.model))
    except ConfigError as error:
        model, estimated = WorkModel.estimated({}), str(error)
    training = config.training
    trained = model.trained(
        text=not training.adds_weights and not training.freeze_llm,
        vision=not training.adds_weights and not training.freeze_vit,
        vision_gradients=not training.freeze_vit,
    )
    return trained, estimated


def position_warning(config: RunConfig, table: Table) -> str:
    """Return the warning of `describe_few_positions` for a run, unless its lengths are of pairs."""
    if config.model.rope_scaling or (config.command and config.command.sequences_per_row != 1):
        return ""
    # The table of a command counts no videos.
    media = config.command is not None or bool(column(table, "images").any() or column(table, "videos").any())
    return describe_few_positions(column(table, "length"), config_content(config.model), media=media)


def epoch_recipe(config: RunConfig, split: str, files: Iterable[DataFile] | None = None) -> EpochRecipe | None:
    """
    Return the recipe of a split's epochs; None if all epochs have the same plan.

    Args:
        config: The run.
        split: `train` or `eval`.
        files: Open data files, whose numbers of records are checked against the mix; None skips the
            check.

    Raises:
        ConfigError: The mix has faults; the error lists all of them.
    """
    custom, training = config.custom, config.training
    if split != "train":
        return None
    if custom.planned_mix is None:
        return EpochRecipe() if training.packing_epochs == "replanned" else None
    mixes = load_mixes(custom.planned_mix) if files is None else require_mixes(config, files)
    return EpochRecipe(mixes=mixes, seed=training.seed)


def require_mixes(config: RunConfig, files: Iterable[DataFile]) -> Mixes:
    """
    Return the mixes of a run, checked against its open data files.

    Args:
        config: The run.
        files: Data files of the split `train`.

    Raises:
        ConfigError: The mixes have faults; the error lists all of them.
    """
    path = config.custom.fusion_config
    assert path is not None  # noqa: S101  # the caller has looked
    mixes, sizes = load_mixes(path), [*dict(source_sizes(files)).values()]  # fewer, if two have one name
    if len(sizes) != len(mixes.files):
        raise ConfigError.for_key("custom.source_names", "gives several files of the mix one name: give each its own")
    faults = [*mixes_faults(mixes, sizes), *(() if config.custom.planned_mix else stream_faults(mixes))]
    if faults:
        raise ConfigError(path, tuple(faults))
    return mixes
