"""Work of a run's samples, by the sizes of its model."""

import attrs

from packplan.adapters.model_folder import model_sizes
from packplan.app.planning.split import table_works
from packplan.core.config import RunConfig, plan_policy
from packplan.core.errors import ConfigError, ModelError
from packplan.core.packers import ALGORITHMS
from packplan.core.policy import PlanPolicy
from packplan.core.samples import Table
from packplan.core.work import SampleWorks, WorkModel


@attrs.frozen(eq=False)
class Work:
    """Work of the samples of a split."""

    samples: SampleWorks
    """Works in FLOPs, which balance levels and logs show."""

    unit: str
    """Unit of the work, for people to read."""

    estimated: str | None
    """Reason why the model's sizes are not counted; None where they are."""


def work_of(config: RunConfig, table: Table) -> Work:
    """
    Return the work of training samples, by the sizes of the run's model, or by tokens and squares.

    Args:
        config: The run.
        table: Measurements of the records; shape (num_records, num_columns).
    """
    model, estimated = trained_work(config)
    counted = "FLOPs of an ordinary model" if estimated else "FLOPs of the model"
    return Work(table_works(model, table), f"{counted}, forward and backward", estimated)


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


def policy_of(config: RunConfig, split: str) -> PlanPolicy:
    """
    Return the policy by which a run plans its split `train` or `eval`, with its model's work if its
    packs depend on that.
    """
    weighs = config.training.packing and ALGORITHMS[config.training.packing_algorithm].weighs
    return plan_policy(config, split, work=trained_work(config)[0] if weighs else None)
