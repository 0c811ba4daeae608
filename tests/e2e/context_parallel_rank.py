"""One rank of a group that shares packed rows: how far its results are from those alone."""

import json
import math
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
from tests.nearness import FLOAT32, apart, norm

LENGTHS = [13, 1, 30, 8, 2]
"""Ragged, one of a single token, one that two ranks share without padding."""

Difference = float
"""Distance of results over the limit of it: at most 1."""


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


def alone(folder: str, dtype: str = "float32") -> dict:
    """Return what the plain model gives each sequence by itself."""
    model = load(folder, dtype)
    logits, loss, scale, gradients = [], torch.zeros(()), 0.0, {}
    for tokens in sequences():
        model.zero_grad()
        logits.append(model(input_ids=tokens[None]).logits[0])
        own = token_loss(logits[-1], torch.cat([tokens[1:], torch.tensor([-1])]))
        own.backward()
        loss = loss + own.detach()
        mine = {name: p.grad for name, p in model.named_parameters()}
        scale += norm(mine)
        gradients |= {name: gradients.get(name, 0) + gradient for name, gradient in mine.items()}
    return {"logits": torch.cat(logits).detach(), "loss": loss, "gradients": gradients, "scale": scale}


def distances(found: dict, expected: dict) -> list[float]:
    """Return how far logits, losses and gradients are apart, each on the scale of its terms."""
    values = [apart({"": found[name]}, {"": expected[name]}) for name in ("logits", "loss")]
    return [*values, apart(found["gradients"], expected["gradients"], scale=expected["scale"])]


def in_context(
    folder: str, *, dtype: str = "float32", checkpointing: bool = False, give_positions: bool = True
) -> list[Difference]:
    """Run a model on this rank's part of a row, as a loop of one's own does."""
    model, expected = load(folder, dtype), alone(folder)
    if checkpointing:
        model.gradient_checkpointing_enable()
    plain = model.config._attn_implementation
    layout = PackedLayout.from_lengths(LENGTHS, cp_size=dist.get_world_size())
    assert 1 == len(set(layout.causal_work()))
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
    gradients = {name: p.grad for name, p in model.named_parameters()}
    loss = loss.detach()
    for part in (loss, *gradients.values()):
        dist.all_reduce(part)
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    whole = torch.cat(parts, dim=1)[0, layout.restore][layout.is_token]
    limits = [FLOAT32] * 3
    if dtype != "float32":
        limits = [max(2 * rounding, 1e-3) for rounding in distances(alone(folder, dtype), expected)]
    found = distances({"logits": whole, "loss": loss, "gradients": gradients}, expected)
    return [distance / limit for distance, limit in zip(found, limits, strict=True)]


def in_model(*, family: str, checkpointing: bool = False, **sizes: int) -> list[Difference]:
    """Run a model whose calls share rows, as a trainer does."""
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
        return {"": loss.detach()[None]}, {name: weight.grad.clone() for name, weight in model.named_parameters()}

    def logits():
        return [{"": model(**given).logits.detach()} for given in ({"input_ids": ids.view(2, -1)}, batch)]

    with compute_whole_rows():
        expected, gradients = taken(labels=labels)
        due = logits()
    found = [apart(*pair) for pair in zip(logits(), due, strict=True)]
    # The label of a row's first token is none, as nothing predicts it.
    for more in ({"labels": torch.cat([ids[:, :1], labels[:, 1:]], 1)}, kept):
        loss, own = taken(**more)
        for gradient in own.values():
            dist.all_reduce(gradient.div_(dist.get_world_size()))
        found += [apart(loss, expected), apart(own, gradients)]
    isolation = probe_loaded(model, native="eager", named=VARLEN).isolation
    with pytest.raises(MismatchError, match="were given different ones"):
        model(**{**batch, "input_ids": ids + dist.get_rank()})
    return [math.inf if isolation else 0.0, *(distance / FLOAT32 for distance in found)]


def main(out: str, cases: dict[str, dict]) -> None:
    """Be one rank; write the differences of each case."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {name: (in_context if "folder" in case else in_model)(**case) for name, case in cases.items()}
    Path(out, f"found{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
