"""One rank of a group that shares a packed row."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from packplan.adapters.attention import set_attention
from packplan.adapters.attention.shared_rows import (
    attention_for_shared_rows,
    compute_whole_rows,
    context_parallel,
    share_rows,
)
from packplan.adapters.probe.rows import probe_loaded
from packplan.core.context_parallel import PackedLayout
from packplan.core.equality import VARLEN, AttentionChoice
from packplan.core.errors import MismatchError
from tests.e2e.unpad_rank import build
from tests.nearness import apart

LENGTHS = [13, 1, 30, 8, 2]
"""Ragged, one of a single token, one that two ranks share without padding."""


def sequences() -> list[torch.Tensor]:
    """Return the tokens of each sequence."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tokens that have a target; -1 is none."""
    return torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")


def load(folder: str, dtype: str = "float32") -> torch.nn.Module:
    """Return a model to train."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()


def share(
    folder: str, *, dtype: str = "float32", checkpointing: bool = False, give_positions: bool = True
) -> dict[str, object]:
    """Run a model on this rank's part; return logits, loss and gradients of all ranks."""
    model = load(folder, dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    plain = model.config._attn_implementation
    layout = PackedLayout.from_lengths(LENGTHS, cp_size=dist.get_world_size())
    row = torch.full((layout.num_positions,), 7)
    row[layout.is_token] = torch.cat(sequences())
    positions = layout.positions(dist.get_rank())
    targets = torch.where(torch.as_tensor(layout.targets) < 0, -1, row[layout.targets])
    inputs = {"input_ids": row[None, positions]}
    if give_positions:
        inputs["position_ids"] = torch.as_tensor(layout.position_ids[positions])[None]
    with context_parallel(model, layout=layout):
        logits = model(**inputs).logits
        loss = token_loss(logits[0], targets[positions])
        loss.backward()
    assert plain == model.config._attn_implementation
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    loss = loss.detach()
    dist.all_reduce(loss)
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    return {
        "logits": torch.cat(parts, dim=1)[0, layout.restore][layout.is_token],
        "loss": loss,
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "work": layout.causal_work(),
    }


def be_sharing(out: str, cases: dict[str, dict]) -> None:
    """Be one rank of those that share rows; write how far each case is from whole rows."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {name: differences(**options) for name, options in cases.items()}
    Path(out, f"found{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def differences(*, family: str, checkpointing: bool = False, **sizes: int) -> list[float]:
    """Return the isolation of a model that shares rows, and its differences from whole rows."""
    model = build(family, **sizes).train()
    set_attention(model, attention_for_shared_rows(AttentionChoice(VARLEN)))
    model.config.use_cache = False
    share_rows(model, dist.group.WORLD)
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.cat(sequences())[None] + 5
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
    labels = ids.masked_fill((batch["position_ids"] == 0) | (ids % 3 == 0), -100)
    learned = (labels != -100)[0]
    keep = torch.nn.functional.pad(learned[1:], (0, 1), value=True)
    kept = {"logits_to_keep": keep, "labels": torch.nn.functional.pad(labels[:, learned], (1, 0), value=-100)}

    def taken(**more):
        model.zero_grad()
        loss = model(**batch, **more).loss
        loss.backward()
        return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}

    with compute_whole_rows():
        expected, gradients = taken(labels=labels)
        padded = model(input_ids=ids.view(2, -1)).logits
        logits = model(**batch).logits.detach()
    apart_of = [float((model(input_ids=ids.view(2, -1)).logits - padded).abs().max())]
    apart_of.append(apart({"": model(**batch).logits.detach()}, {"": logits}))
    for more in ({"labels": labels}, kept):
        loss, found = taken(**more)
        for gradient in found.values():
            dist.all_reduce(gradient.div_(dist.get_world_size()))
        apart_of += [apart({"": loss[None]}, {"": expected[None]}), apart(found, gradients)]
    isolation = probe_loaded(model, native="eager", named=VARLEN).isolation
    with pytest.raises(MismatchError, match="were given different ones"):
        model(**{**batch, "input_ids": ids + dist.get_rank()})
    return [isolation, *apart_of]


def main(out: str, cases: dict[str, dict]) -> None:
    """Be one rank; rank 0 keeps each case's results."""
    dist.init_process_group("gloo")
    for name, options in cases.items():
        result = share(**options)
        if dist.get_rank() == 0:
            torch.save(result, Path(out, f"{name}.pt"))
    dist.destroy_process_group()
