"""Tiny models that compute no padding on one rank, however ranks share a model."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packplan.adapters.hf import unpad as hooking
from packplan.adapters.hf.packed_calls import TextStack
from packplan.adapters.models import find_sharded_weight
from packplan.adapters.proof import first_calls
from packplan.adapters.proof.steps import gather_from_ranks
from packplan.core.errors import MismatchError, ModelError, RunError
from packplan.hf import ensure_vision_forward, unpad
from tests.hosts import law
from tests.processes import lives, wait_for

_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip

_TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32, "vision_use_head": False,
}  # fmt: skip

_OWN = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 256},
    "opt": _SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1, "dropout": 0.0},
    "gemma3_text": _SIZES | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_5_text": _SIZES | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32,
    },
    "modernbert": _SIZES | {"local_attention": 8, "num_hidden_layers": 4, "cls_token_id": 1, "sep_token_id": 2},
    "paligemma": {
        "text_config": _SIZES | {"model_type": "gemma"}, "vision_config": _TOWER, "image_token_id": 299,
        "projection_dim": 32, "hidden_size": 32,
    },
    "idefics3": {
        "text_config": _SIZES | {"model_type": "llama"}, "image_token_id": 299, "scale_factor": 2,
        "vision_config": {name: size for name, size in _TOWER.items() if name != "model_type"} | {"patch_size": 7},
    },
    "xlm-roberta": _SIZES | {"pad_token_id": 1},
}  # fmt: skip

_SPECIAL = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0}

ROWS, POSITIONS = 4, 24


def build(family: str, kind: type = AutoModelForCausalLM, **keys):
    """Return a tiny model with random weights, in evaluation."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(_SPECIAL | _OWN.get(family, _SIZES) | keys))
    return kind.from_config(config).eval()


def batch_of(mask, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens under a mask; labels follow real tokens alone."""
    mask = torch.as_tensor(mask)
    ids = torch.randint(5, 300, mask.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def padded(left=(0, 3, 0, 9), right=(0, 2, 11, 0)) -> torch.Tensor:
    """Return the mask of rows with padding on each side."""
    columns = torch.arange(POSITIONS)
    return torch.stack([((columns >= a) & (columns < POSITIONS - b)).long() for a, b in zip(left, right, strict=True)])


def computed(model: Any, batch: dict[str, Any], **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return outputs and gradients of a batch, those of sharded weights whole."""
    model.zero_grad()
    outputs = model(**batch, **options)
    if hasattr(model, "zero_optimization"):
        from deepspeed.utils import safe_get_full_grad  # the newest trainers run without it

        model.backward(outputs.loss)
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        gradients = {name: safe_get_full_grad(one).clone() for name, one in trained.items()}
        model.step()
        return outputs, gradients
    outputs.loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return outputs, {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in gradients.items()}


def main(*names: str) -> None:
    """Compare each case, or those of the names, with its padded pass; ZeRO if installed."""
    torch.use_deterministic_algorithms(mode=False)
    dist.init_process_group("gloo")
    for name in names or [name for name in CASES if "zero" not in name or find_spec("deepspeed")]:
        assert_same(*(CASES | MORE)[name], name)
    dist.destroy_process_group()


def assert_same(wrap: Any, family: str, hooked_first: Any, name: str) -> None:
    """A step of ranks with and without padding has the loss and gradients of its padded pass."""
    rank, sees = dist.get_rank(), family == "qwen2_5_vl"
    model = law.model_of(family) if sees else build(family)
    own = padded().roll(rank, 0)
    batches = [batch_of(own, seed=rank), batch_of(own | rank)]  # the last rank has one without padding
    hooks = unpad(model, logits=False) if hooked_first else None
    model = wrap(model)
    model.train()
    hooks = hooks or unpad(model)
    assert ("zero 3" in name or "fsdp" in name) == (find_sharded_weight(model) is not None), name
    if sees:  # the last rank has no image in its second call
        batches = [seen_batch(own, seed=rank), seen_batch(own, seed=rank, blind=bool(rank))]
        ensure_vision_forward(model, batches[0])
    for batch in batches:
        found, gradients = computed(model, batch)
        with hooks.paused():
            due, expected = computed(model, batch)
        assert len(gradients) == len(expected) > 0, name
        torch.testing.assert_close((found.loss, gradients), (due.loss, expected), atol=1e-5, rtol=0)
    assert hooks.counts.real < hooks.counts.padded, name


def seen_batch(mask: torch.Tensor, *, seed: int, blind: bool = False) -> dict[str, torch.Tensor]:
    """Return a batch with an image of four tokens in each row, unless it is blind."""
    batch = batch_of(mask, seed=seed)
    ids = batch["input_ids"].clamp_(max=law.LAST)
    if blind:
        return batch | {"labels": ids.where(batch["labels"] != -100, -100), "mm_token_type_ids": torch.zeros_like(ids)}
    for row, first in enumerate(mask.argmax(1).tolist()):
        ids[row, first + 1 : first + 5] = law.IMAGE
    batch["labels"] = ids.where(batch["labels"] != -100, -100)
    grids, pixels = torch.tensor([[1, 4, 4]] * ROWS), torch.randn(ROWS * 16, 3 * 2 * 14 * 14)
    kinds = (ids == law.IMAGE).long()
    return batch | {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def adapted(model: Any) -> Any:
    """Add adapters and checkpointing to a model."""
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model: Any, *, reshards: bool | None = None) -> Any:
    """Share a model's weights by FSDP 2, with checkpointing."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model, reshard_after_forward=reshards)


def shard_seen(model: Any) -> Any:
    """Share the weights of a model that sees, perhaps with adapters, by FSDP 2."""
    for layer in getattr(model, "get_base_model", lambda: model)().model.language_model.layers:
        fully_shard(layer)
    return fully_shard(model)


def engine(model: Any, *, stage: int) -> Any:
    """Return an engine of DeepSpeed that shares a model by ZeRO, and whose steps change nothing."""
    import deepspeed  # the newest trainers run without it

    trained = [one for one in model.parameters() if one.requires_grad]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(trained, lr=0.0)
    return deepspeed.initialize(model=model, model_parameters=trained, optimizer=optimizer, config=config)[0]


CASES: dict[str, tuple[Callable[[Any], Any], str, bool]] = {
    "ddp": (DistributedDataParallel, "qwen2", False),
    "fsdp": (shard, "qwen2", False),
    "fsdp, hooked before, of experts": (partial(shard, reshards=True), "qwen3_moe", True),
    "fsdp, adapters, images": (lambda model: shard_seen(adapted(model)), "qwen2_5_vl", False),
    "zero 2, adapters, images": (lambda model: engine(adapted(model), stage=2), "qwen2_5_vl", False),
    "zero 3, hooked before, adapters": (lambda model: engine(adapted(model), stage=3), "qwen2", True),
}
"""Case -> how ranks share the model, its family, and whether it is hooked before."""

MORE = {
    "zero 1": (partial(engine, stage=1), "qwen2", True),
    "zero 3": (partial(engine, stage=3), "opt", False),
    "zero 3, images": (partial(engine, stage=3), "qwen2_5_vl", False),
    "zero 3, hooked before, images, adapters": (lambda model: engine(adapted(model), stage=3), "qwen2_5_vl", True),
    "fsdp, hooked before, images": (shard_seen, "qwen2_5_vl", True),
}
"""Further cases, for `make test-hosts`."""


def end_together(folder: str, how: str) -> None:
    """
    Update weights on rank 0 first, which then ends by itself, or is killed before it does.

    Where the last rank has a fault in its first call, every rank ends with its words.
    """
    dist.init_process_group("gloo")
    rank, waits, pids = dist.get_rank(), Path(folder, "waits"), gather_from_ranks(os.getpid())
    model = build("qwen2").train()

    def roll(module: Any, _: Any, output: Any) -> None:
        if rank and module.training and len(output[0]) == 1:
            output["last_hidden_state"] = output[0].roll(1, 1)

    if how == "a fault":
        model.model.register_forward_hook(roll)
    hooks = unpad(model)
    model, batch = DistributedDataParallel(model), batch_of(padded() if rank else padded() | 1)
    optimizer, before = torch.optim.SGD(model.parameters()), model.module.lm_head.weight.clone()
    for _ in range(2):  # batches of a step
        model(**batch).loss.backward()
    if rank:
        wait_for(lambda: waits.exists() or not lives(pids[0]), "rank 0 neither waits nor ends")
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with {
        "a fault": pytest.raises(MismatchError, match="rank 1: the first call"),
        "killed": pytest.raises(RunError, match="rank 0 has ended"),
    }.get(how, nullcontext()):
        optimizer.step()
    assert (how == "no fault") != torch.equal(before, model.module.lm_head.weight)
    assert (hooks.counts.calls == 0) == (how == "a fault" or not rank), "after a fault, calls go on with padding"
    if not rank:
        sleep = time.sleep
        mock.patch.object(time, "sleep", lambda seconds: waits.touch() or sleep(seconds)).start()
    dist.destroy_process_group()


def refuse_together() -> None:
    """Faults that the last rank alone has end all ranks by name, and none waits for another."""
    dist.init_process_group("gloo")
    rank, batch, find = dist.get_rank(), batch_of(padded()), hooking._find_stack

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("a fault")

    failing = mock.patch.object(hooking, "probe_small_copy", fail if rank else hooking.probe_small_copy)
    refused = pytest.raises(ValueError, match="a fault") if rank else pytest.raises(ModelError, match="rank 1 failed")
    with failing, refused:
        unpad(shard(build("qwen2")))

    for wrap, family, plant, words in FAULTS:

        def find_with_fault(model: Any, *args: Any, plant: Any = plant, **options: Any) -> Any:
            stack, why_not = find(model, *args, **options)
            return plant(stack, model) if rank else stack, why_not

        with mock.patch.object(hooking, "_find_stack", find_with_fault):
            model = wrap(build(family))
            unpad(model)
        with pytest.raises(MismatchError, match=f"rank 1: the first call .*{words}"):
            model(**batch)

    model = shard_seen(law.model_of("qwen2_5_vl"))
    unpad(model)
    with pytest.raises(MismatchError, match="run the vision tower 0 to 1 times in a call"):
        model(**seen_batch(padded(), seed=0, blind=bool(rank)))

    hooks = unpad(engine(build("qwen2"), stage=3))  # as a reference model
    if rank:
        hooks.remove()
    else:
        with pytest.raises(MismatchError, match="on every rank"):
            hooks.model(**batch)

    alone = shard(build("qwen2"))
    if not rank:
        briefly = mock.patch.object(first_calls, "_PATIENCE", timedelta(seconds=1))
        with briefly, pytest.raises(MismatchError, match="waited for rank 1 to call"):
            unpad(alone)
        unpad(build("qwen2"))  # whose weights no rank shares
    dist.barrier()


class _GoingOn(TextStack):
    """A stack whose positions go on from sample to sample."""

    def _packed_positions(self, given: dict[str, Any], tokens: Any) -> torch.Tensor:
        return torch.arange(len(tokens.places))[None]


FAULTS = [
    (shard, "qwen2", lambda stack, model: attrs.evolve(stack, module=model), "loss"),
    (partial(engine, stage=3), "gpt2", lambda stack, _: _GoingOn(stack.module), "state"),
]
"""How ranks share a model, its family, what changes the last rank's stack, and what differs."""
