"""
Settings that a run's plans follow from: policy, work of its model, and the mixes of its epochs.
"""

from packplan.adapters.config.run import load_mixes
from packplan.adapters.model_folder import model_sizes
from packplan.adapters.samples.data_files import file_faults, open_records
from packplan.adapters.samples.data_set import FileRecords
from packplan.app.wiring.stores import records_cache
from packplan.core.config.identity import plan_policy
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecipe
from packplan.core.errors import ConfigError, DataSetError, Fault, ModelError
from packplan.core.mixes import Mixes, mixes_faults, stream_faults
from packplan.core.packers import ALGORITHMS
from packplan.core.policy import PlanPolicy
from packplan.core.work.model import WorkModel


def policy_of(config: RunConfig, split: str) -> PlanPolicy:
    """
    Return the policy by which a run plans its split `train` or `eval`, with its model's work if its
    packs depend on that.
    """
    uses_works = config.training.packing and ALGORITHMS[config.training.packing_algorithm].uses_works
    return plan_policy(config, split, work=trained_work(config)[0] if uses_works else None)


def trained_work(config: RunConfig) -> tuple[WorkModel, str | None]:
    """
    Return the work of a run's model, forward and backward, and why it is only estimated, if it is.
    """
    model, estimated = _model_of(config)
    training = config.training
    trained = model.trained(
        text=not training.adds_weights and not training.freeze_llm,
        vision=not training.adds_weights and not training.freeze_vit,
        vision_gradients=not training.freeze_vit,
    )
    return trained, estimated


def _model_of(config: RunConfig) -> tuple[WorkModel, str | None]:
    """Return the model's work, and why it is only estimated, if it is."""
    try:
        sizes = model_sizes(config.model)
    except ConfigError as error:
        return WorkModel.estimated({}), error.faults[0].reason
    try:
        return WorkModel.from_config(sizes), None
    except ModelError as error:
        return WorkModel.estimated(sizes), error.fact


def recipe_of(config: RunConfig, split: str) -> EpochRecipe | None:
    """
    Return the recipe of a split's epochs; None where all have one plan.

    Args:
        config: The run.
        split: `train` or `eval`.

    Raises:
        ConfigError: All faults of the mix.
    """
    custom, training = config.custom, config.training
    if split != "train":
        return None
    if custom.planned_mix is None:
        return EpochRecipe() if training.packing_epochs == "replanned" else None
    return EpochRecipe(mixes=load_mixes(custom.planned_mix), seed=training.seed)


def mixes_of(config: RunConfig) -> tuple[Mixes, list[FileRecords]]:
    """
    Read the mixes of a run, `custom.fusion_config`, and the records of each of their files.

    Raises:
        ConfigError: All that is wrong with them, or `custom.source_names` names another file.
    """
    custom = config.custom
    assert custom.fusion_config is not None  # noqa: S101  # the caller has looked
    mixes, cache = load_mixes(custom.fusion_config), records_cache(config)
    opened: dict[str, FileRecords] = {}
    reasons: dict[str, str] = {}
    for file in mixes.files:
        try:
            opened[file] = open_records((file,), cache=cache)
        except DataSetError as error:
            reasons[file] = str(error)
    faults = [
        Fault(f"{mixes.key_prefix(entry)}sources[{number}].jsonl", reasons[source.jsonl])
        for entry, mix in enumerate(mixes.entries)
        for number, source in enumerate(mix.sources)
        if source.jsonl in reasons
    ]
    faults += () if custom.planned_mix else stream_faults(mixes)
    if not faults:
        faults = list(mixes_faults(mixes, [len(records) for records in opened.values()]))
    if not faults:  # patterns may have files in common
        faults = [Fault("curriculum" if mixes.is_curriculum else "sources", text) for text in file_faults(mixes.files)]
    if faults:
        raise ConfigError(custom.fusion_config, tuple(faults))
    known = {*mixes.files, *custom.val_jsonl}
    reason = "is no file of the mix, nor of custom.val_jsonl: write it as it is written there"
    faults = [Fault(f"custom.source_names.{name}", reason) for name in custom.source_names if name not in known]
    if faults:
        raise ConfigError(config.source, tuple(faults))
    return mixes, list(opened.values())
