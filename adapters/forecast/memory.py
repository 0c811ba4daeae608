"""
Measures the memory of one training step on one rank by tracing the step.

The trainer runs with its real batch, loss, precision, gradient checkpointing and optimizer, but its
model's tensors have no content.

For FSDP 2, the model is wrapped as accelerate wraps it, in a fake process group that sends nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Trainer

from packplan.adapters.attention.varlen import tracing_as_on_gpu
from packplan.adapters.forecast.tracing import MemoryTracer, replace_meta_weights
from packplan.adapters.loaders.packs import PackOfRows
from packplan.adapters.loaders.rows import MEDIA_TYPE_IDS
from packplan.adapters.models import local_part
from packplan.adapters.trainer.trainer import CheckedTrainer
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ModelError
from packplan.core.forecast import MemoryKind, ModelSharding, StepTrace

_MOST_TOKENS = 131_072
"""Longest packing length to try if the model's config.json sets no limit to positions."""


class TracedTrainer(CheckedTrainer):
    """Trainer whose model stays on its device, since tensors without content cannot be moved."""

    def _move_model_to_device(self, *_: Any) -> None:
        """Do not move the model."""

    def _compute_acc(self, *_: Any, **__: Any) -> None:
        """Skip the accuracy, which needs the content of logits and takes little memory."""


@attrs.define(eq=False)
class StepTracer:
    """Traces training steps of one rank of a run."""

    trainer: TracedTrainer
    """Trainer with the model on the device `meta`, which is not yet prepared for training."""

    sharding: ModelSharding

    world_size: int

    accumulates: bool
    """Whether a step has several microbatches, so that gradients stay in memory between them."""

    on_gpu: bool
    """Whether to trace the attention kernel and the `foreach` optimizer of a GPU, not of a CPU."""

    _tracer: MemoryTracer = attrs.field(init=False)

    _optimizer: Any = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Prepare the model as the trainer does before its first step; ModelError on failure."""
        trainer = self.trainer
        output = trainer.template.get_base_model(trainer.model).get_output_embeddings()
        width = 0 if output is None else output.weight.shape[0]
        self._tracer = MemoryTracer(vocabulary=width)
        replace_meta_weights(trainer.model, self._tracer)
        trainer._prepare_gradient_checkpointing(  # noqa: SLF001  # `train` calls it
            trainer.template.get_base_model(trainer.model)
        )
        trainer.model.train()
        with self._tracer.record():
            trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, device_placement=False)
            if self.sharding == "fsdp2":
                shard_as_accelerate(trainer.model, self.world_size, mixed=trainer.accelerator.mixed_precision)
            self._optimizer = self._make_stepped_optimizer()

    def trace_step(self, samples: Sequence[dict[str, Any]]) -> StepTrace:
        """
        Trace an optimizer step on a pack: forward pass, backward pass and update.

        Args:
            samples: Encoded samples of the pack.

        Raises:
            ModelError: The step cannot be traced. The message names the function of the model.
        """
        batch = self._collate(samples)
        trainer, tracer, sharded = self.trainer, self._tracer, self.sharding == "fsdp2"
        weights = list(trainer.model.parameters())
        trained = [one for one in weights if one.requires_grad]
        with tracer.record():
            if self.accumulates and sharded:
                # As in accelerate, gradients stay unsharded until the step's last microbatch.
                trainer.model.set_requires_gradient_sync(False)
                self._run_passes(batch)
                trainer.model.set_requires_gradient_sync(True)
            elif self.accumulates:
                for one in trained:
                    one.grad = torch.empty_like(one)
            start = tracer.clock
            forward_end = self._run_passes(batch)
            _step_optimizer(self._optimizer, [one.grad for one in trained])
            states = (one for state in self._optimizer.state.values() for one in state.values())
            held: dict[MemoryKind, Iterable[Any]] = {
                "weights": (*weights, *trainer.model.buffers()),
                "gradients": (one.grad for one in trained if one.grad is not None),
                "optimizer": (one for one in states if isinstance(one, torch.Tensor)),
            }
            kinds = {tracer.record_block(one): kind for kind, tensors in held.items() for one in tensors}
            trace = tracer.step_trace(kinds, start=start, forward_end=forward_end)
            for one in trained:
                one.grad = None
        if self.sharding == "fsdp2" or self.world_size == 1:
            return trace
        return attrs.evolve(trace, buckets=sum(one.numel() * one.element_size() for one in trained))

    @property
    def max_tokens(self) -> int:
        """
        Longest packing length to try: the model's maximum number of positions, or `_MOST_TOKENS`.
        """
        config = self.trainer.template.get_base_model(self.trainer.model).config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or _MOST_TOKENS)

    @staticmethod
    def pack_of_length(samples: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
        """
        Return samples for a pack of *tokens* tokens, by repeating *samples* and adding text.

        In the added text, the share of supervised tokens is the same as in *samples*.

        Args:
            samples: Encoded samples of a pack.
            tokens: Number of tokens of the new pack, >= 1.
        """
        length = sum(one["length"] for one in samples)
        share = sum(label != IGNORED_LABEL for one in samples for label in one["labels"]) / length
        chosen: list[dict[str, Any]] = []
        for sample in chain.from_iterable(
            repeat(sorted(samples, key=lambda one: int(one["length"])), 1 + tokens // length)
        ):
            if sample["length"] <= tokens:
                chosen.append(sample)
                tokens -= sample["length"]
        return [*chosen, _text_sample(samples[0], tokens, share)] if tokens else chosen

    def _collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the collator's batch of a pack, in which pixel tensors have no content."""
        wide = {key: one.shape[1] for sample in samples for key, one in sample.items() if _looks_like_pixels(one)}
        # Collate one column of the pixels only, which saves memory.
        narrow = [{key: one[:, :1] if key in wide else one for key, one in sample.items()} for sample in samples]
        batch: dict[str, Any] = self.trainer.data_collator([PackOfRows(narrow, 0)])
        with self._tracer.record():
            pixels = {key: torch.empty(len(batch[key]), width) for key, width in wide.items()}
        return batch | pixels

    def _run_passes(self, batch: Mapping[str, Any]) -> int:
        """Run both passes on tensors without content; return the clock after the forward pass."""
        trainer, tracer = self.trainer, self._tracer
        given = {key: tracer.record_empty(one) if isinstance(one, torch.Tensor) else one for key, one in batch.items()}
        with tracing_as_on_gpu() if self.on_gpu else nullcontext(), trainer.media_hook():
            inputs = trainer._prepare_inputs(given)  # noqa: SLF001  # its own
            count = torch.tensor(batch["loss_normaliser"])
            loss = trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=count)
            forward_end = tracer.clock
            trainer.accelerator.backward(loss)
        return forward_end

    def _make_stepped_optimizer(self) -> Any:
        """Return the optimizer of this rank's weights, after one step has created its states."""
        trainer = self.trainer
        weights = [one for one in trainer.model.parameters() if one.requires_grad]
        try:
            kind, options = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
            if self.on_gpu and kind.__module__.startswith("torch.optim") and not options.get("fused"):
                options["foreach"] = True
            optimizer = kind([torch.nn.Parameter(local_part(one).detach()) for one in weights], **options)
            _step_optimizer(optimizer, [torch.empty_like(local_part(one)) for one in weights])
        except Exception as error:  # whatever kernels and packages an optimizer needs
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            name = trainer.args.optim
            raise ModelError("trace", f"the optimizer {name} (training.optim) cannot be traced ({reason})") from error
        return optimizer


def _step_optimizer(optimizer: Any, gradients: list[Any]) -> None:
    """Run an optimizer's step with *gradients*, one for each weight, then release the gradients."""
    own = [one for group in optimizer.param_groups for one in group["params"]]
    for weight, gradient in zip(own, gradients, strict=True):
        weight.grad = None if gradient is None else local_part(gradient)
    optimizer.step()
    optimizer.zero_grad()


def _text_sample(sample: dict[str, Any], tokens: int, share: float) -> dict[str, Any]:
    """Return a text sample with the keys of *sample*; the fraction *share* is supervised."""
    token, with_loss = int(sample["input_ids"][-1]), round(share * tokens)
    text: dict[str, Any] = {
        "input_ids": [token] * tokens,
        "labels": [IGNORED_LABEL] * (tokens - with_loss) + [token] * with_loss,
        "length": tokens,
        "lengths": [tokens],
        "num_images": 0,
        "num_videos": 0,
    }
    if MEDIA_TYPE_IDS in sample:
        text[MEDIA_TYPE_IDS] = torch.zeros(tokens, dtype=sample[MEDIA_TYPE_IDS].dtype)
    if "loss_scale" in sample:
        text["loss_scale"] = [1.0] * tokens
    return text


def _looks_like_pixels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2


def shard_as_accelerate(model: Any, world_size: int, *, mixed: str) -> None:
    """
    Shard a model in place by FSDP 2, which accelerate itself would do on GPUs only.

    Args:
        model: Model that its trainer has prepared for training.
        world_size: Number of ranks in the default process group.
        mixed: Accelerate's mixed precision, which is `no`, `bf16` or `fp16`.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision=mixed, is_main_process=False,
        device=torch.device("cpu"), torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("fsdp",)),
    )  # fmt: skip
    fsdp2_prepare_model(stand_in, model)


@contextmanager
def using_fake_ranks(world_size: int) -> Iterator[None]:
    """In this context, make this process rank 0 of a fake process group, which sends nothing."""
    if dist.is_initialized():
        raise ModelError("trace", "a rank of torchrun cannot simulate other ranks: start this command without torchrun")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
