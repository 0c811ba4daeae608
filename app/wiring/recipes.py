"""Recipe of a run's epochs, where these have plans of their own."""

from packplan.adapters.config.run import load_mixes
from packplan.core.config import RunConfig
from packplan.core.epochs import EpochRecipe


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
    if custom.fusion_schedule is None:
        return EpochRecipe() if training.packing_epochs == "replanned" else None
    assert custom.fusion_config is not None  # noqa: S101  # `faults` refuses a schedule of no mix
    return EpochRecipe(mixes=load_mixes(custom.fusion_config), seed=training.seed)
