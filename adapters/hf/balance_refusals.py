"""Settings and losses under which microbatches by tokens would not be the trainer's own step."""

from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from packplan.adapters.hf.refusals import of_sharing
from packplan.core.errors import ArgumentError

_LOSSES: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "GRPOTrainer": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
        "RLOOTrainer": (),
        "DPOTrainer": (
            "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard", "apo_zero", "apo_down",
            "discopop", "sft", "sigmoid_norm",
        ),
        "KTOTrainer": ("apo_zero_unpaired",),
        "RewardTrainer": (),
        "SFTTrainer": ("nll", "dft", "chunked_nll"),
        "Trainer": (),
    }
)  # fmt: skip
"""Trainer -> values of `loss_type` whose losses are sums or means over rows or tokens."""

_SETTINGS = MappingProxyType(
    {
        "packing": "makes rows of several samples",
        "padding_free": "makes one row of a batch",
        "use_liger_kernel": "divides losses in a kernel",
        "use_liger_loss": "divides losses in a kernel",
        "label_smoothing_factor": "divides losses by other counts",
        "entropy_coef": "averages entropy over a batch",
        "use_adaptive_entropy": "averages entropy over a batch",
    }
)
"""Arguments of a trainer that have to be off -> what they would do. Not every version has each."""


def is_old_trl() -> bool:
    """Return whether TRL is older than 1.0, which divides and logs some means differently."""
    return int(version("trl").partition(".")[0]) < 1


def checked_host(trainer: Any) -> str:
    """
    Return the name of the trainer's class that computes its loss, which can be cut.

    Raises:
        ArgumentError: A setting or the loss stands against it; all are named.
    """
    kind = type(trainer)
    hosts = (one for one in kind.__mro__ if one.__module__.startswith(("trl.", "transformers.")))
    base = next(one for one in hosts if one.__name__ in _LOSSES)  # ms-swift has the same names
    if any(getattr(kind, name, None) is not getattr(base, name, None) for name in ("compute_loss", "_compute_loss")):
        raise ArgumentError("host", f"{kind.__name__} computes a loss of its own: unpad alone serves it")
    if reasons := [*_of_losses(trainer, base.__name__), *_of_settings(trainer, base.__name__), *of_sharing(trainer)]:
        raise ArgumentError("host", f"the trainer's batches cannot be cut: {'; '.join(reasons)}")
    return base.__name__


def _of_losses(trainer: Any, host: str) -> Iterator[str]:
    named = getattr(trainer.args, "loss_type", None) or []
    losses = [named] if isinstance(named, str) else named
    for loss in sorted({*losses} - {*_LOSSES[host]}):
        yield f"loss_type is {loss!r}, which compares the rows of a batch, or is not known"
    if host == "DPOTrainer" and "sft" in losses and (len(losses) > 1 or trainer.args.use_weighting):
        yield "loss_type is 'sft' beside another one, or use_weighting is set: one counts tokens, the other rows"
    if host == "KTOTrainer" and is_old_trl():
        yield "KTOTrainer is of TRL before 1.0"
    sequence = getattr(trainer.args, "importance_sampling_level", None) == "sequence"
    if "luspo" in losses and is_old_trl() and not (sequence and not trainer.beta):
        yield "loss_type is 'luspo', which TRL before 1.0 divides by padding, unless by sequence and with beta 0"


def _of_settings(trainer: Any, host: str) -> Iterator[str]:
    args = trainer.args
    for name, reason in _SETTINGS.items():
        if getattr(args, name, False):
            yield f"{name} is set, which {reason}"
    if getattr(args, "top_entropy_quantile", 1.0) < 1:
        yield "top_entropy_quantile is below 1, which compares the tokens of a batch"
    config = trainer.model.config.get_text_config()
    weight = getattr(trainer, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0))
    if weight and getattr(trainer, "aux_loss_enabled", getattr(config, "output_router_logits", False)):
        yield f"router_aux_loss_coef is {weight}, whose loss compares the tokens of a batch"
    if trainer.accelerator.distributed_type == "DEEPSPEED":
        yield "DeepSpeed counts microbatches itself"
    own = trainer.compute_loss_func
    if host in ("SFTTrainer", "Trainer") and callable(own) and not own.__module__.startswith("trl."):
        yield "compute_loss_func is not known"
    if host == "Trainer" and not type(_bare(trainer.model)).__name__.endswith("ForCausalLM"):
        yield f"the loss of {type(_bare(trainer.model)).__name__} is not known"


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
