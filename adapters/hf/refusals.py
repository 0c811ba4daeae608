"""Settings, losses and data under which a trainer would not train a plan, or its step in parts."""

import os
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from packplan.core.config.refusals import refusals_of
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


def refuse(trainer: Any) -> None:
    """
    Check that a trainer will follow a plan.

    Raises:
        ArgumentError: A setting stands against it; all are named.
    """
    if reasons := [*_of_arguments(trainer.args), *_of_ranks(trainer)]:
        raise ArgumentError("host", f"the trainer would not follow the plan: {'; '.join(reasons)}")


def _of_arguments(args: Any) -> Iterator[str]:
    for refusal in refusals_of(args, "trainer"):
        yield f"{refusal.setting} is set, which {refusal.effect}"
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        yield f"train_sampling_strategy is {strategy!r}, which draws batches by itself"


def _of_ranks(trainer: Any) -> Iterator[str]:
    args = trainer.args
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        yield f"{started} processes were started, but the trainer sees {args.world_size}: on a CPU, set use_cpu=True"
    yield from of_sharing(trainer)
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield "average_tokens_across_devices is off, so ranks with few tokens would weigh as much as others"


def of_sharing(trainer: Any) -> Iterator[str]:
    """Yield what makes one process train on several GPUs, or ranks share rows."""
    if trainer.args.n_gpu > 1:
        yield f"one process trains on {trainer.args.n_gpu} GPUs: start one for each, with torchrun"
    sharing = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(sharing, name, None) or 1) > 1:
            yield f"parallelism_config.{name} is {size}, so ranks share rows"


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
    for refusal in refusals_of(args, "balance"):
        yield f"{refusal.setting} is set, which {refusal.effect}"
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
    model = type(getattr(trainer.model, "get_base_model", lambda: trainer.model)()).__name__
    if host == "Trainer" and not model.endswith("ForCausalLM"):
        yield f"the loss of {model} is not known"
