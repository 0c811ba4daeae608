"""Steps of a run that are traced for their memory: its model and trainer, without weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch

from packplan.adapters.forecast.memory import OutlineTrainer, StepTracer, ranks_in_name
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.trainer.arguments import training_arguments
from packplan.adapters.trainer.model import open_model
from packplan.adapters.trainer.vision import DummyImage, plain_model
from packplan.core.config import RunConfig
from packplan.core.equality import AttentionChoice
from packplan.core.memory import Sharding

_NOT_TRACED = (
    "deepspeed", "fsdp", "fsdp_config", "fp16", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "use_liger_kernel", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor",
)  # fmt: skip
"""Settings that need other devices, or are computed, or have no part in a step."""


def as_traced(config: RunConfig) -> RunConfig:
    """Return a run with the settings by which its step is traced on this machine's CPU."""
    settings: Mapping[str, Any] = config.training.trainer
    kept = {name: value for name, value in settings.items() if name not in _NOT_TRACED}
    # Both halves have the same size.
    kept |= {"bf16": bool(settings.get("bf16") or settings.get("fp16")), "use_cpu": True, "report_to": []}
    # What flash attention holds is what ours holds.
    model = attrs.evolve(config.model, quant_method=None)
    if "flash" in model.attn_impl:
        model = attrs.evolve(model, attn_impl="auto")
    return attrs.evolve(config, model=model, training=attrs.evolve(config.training, trainer=kept))


@contextmanager
def open_step_tracer(
    config: RunConfig,
    samples: SwiftEncoder,
    *,
    attention: AttentionChoice,
    sharding: Sharding,
    world_size: int,
    accumulates: bool,
) -> Iterator[StepTracer]:
    """
    Yield a tracer of the steps of one rank, on the model that a run trains, with its freezes and
    adapters, on the device `meta`.

    Args:
        config: The run.
        samples: Samples of `train`.
        attention: Attention of the result of `as_traced`.
        sharding: Way in which ranks share the model.
        world_size: Ranks.
        accumulates: Whether a step has several microbatches.

    Raises:
        ModelError: The model cannot be traced.
    """
    on_gpu, config = not config.training.trainer.get("use_cpu"), as_traced(config)
    cpu = torch.device("cpu")
    model = open_model(config.model, config.training, attention=attention, device=cpu, outline=True)
    template = samples.template
    template.model = plain_model(model)
    arguments = training_arguments(config, per_device_train_batch_size=config.batch_size, gradient_accumulation_steps=1)
    if samples.sees_images and (world_size > 1 or config.training.freeze_llm):
        DummyImage.from_model(model, template).ensure_seen()
    template.packing = template.padding_free = config.training.packing
    trainer = OutlineTrainer(
        group=OneRank(), eval_dataset=None, reduction=config.training.loss_reduction, model=model, args=arguments,
        template=template, train_dataset=None,
    )  # fmt: skip
    with ranks_in_name(world_size) if sharding == "fsdp2" else nullcontext():
        yield StepTracer(trainer, sharding, world_size, accumulates, on_gpu)
