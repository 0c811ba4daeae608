"""Tiny models that compute no padding on one rank, however ranks share a model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packplan.core.errors import MismatchError
from packplan.hf import unpad

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
    outputs.loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return outputs, {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in gradients.items()}


def main() -> None:
    """Compare each case with its padded pass."""
    torch.use_deterministic_algorithms(mode=False)
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        assert_same(*case, batch_of(padded().roll(dist.get_rank(), 0), seed=dist.get_rank()), name)
    dist.destroy_process_group()


def assert_same(wrap: Any, family: str, hooked_first: Any, batch: dict[str, Any], name: str) -> None:
    """A step of a model has the loss and gradients of its padded pass."""
    model = build(family)
    hooks = unpad(model, logits=False) if hooked_first else None
    model = wrap(model).train()
    hooks = hooks or unpad(model)
    found, gradients = computed(model, batch)
    with hooks.paused():
        due, expected = computed(model, batch)
    assert len(gradients) == len(expected) > 0, name
    torch.testing.assert_close((found.loss, gradients), (due.loss, expected), atol=1e-5, rtol=0)
    assert hooks.counts.real < hooks.counts.padded, name


def shard(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


CASES = {
    "ddp": (DistributedDataParallel, "qwen2", False),
    "fsdp": (shard, "qwen2", False),
    "fsdp, hooked before, of experts": (shard, "qwen3_moe", True),
}
"""Case -> how ranks share the model, its family, and whether it is hooked before."""


def end_together() -> None:
    """Train with a fault that the last rank alone has: every rank ends with its words."""
    dist.init_process_group("gloo")
    model = build("qwen2").train()

    def roll(module: Any, _: Any, output: Any) -> None:
        if dist.get_rank() and module.training and len(output[0]) == 1:
            output["last_hidden_state"] = output[0].roll(1, 1)

    model.model.register_forward_hook(roll)
    hooks = unpad(model)
    model, batch = DistributedDataParallel(model), batch_of(padded() if dist.get_rank() else padded() | 1)
    optimizer = torch.optim.SGD(model.parameters())
    before = model.module.lm_head.weight.clone()
    for _ in range(2):  # batches of a step
        model(**batch).loss.backward()
    with pytest.raises(MismatchError, match="rank 1: the first call"):
        optimizer.step()
    assert torch.equal(before, model.module.lm_head.weight)
    assert hooks.counts.calls == 0, "calls go on with padding"
    dist.destroy_process_group()
