"""A step of packs that 1, 2 or 4 ranks share, each as many as its length needs, in a loop."""

import json
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.degrees import measure_ways
from packplan.adapters.attention import set_attention
from packplan.adapters.attention.shared_rows import RowGroups, attention_for_shared_rows, share_rows
from packplan.adapters.probe.probe_row import probe_ready_model
from packplan.core.equality import VARLEN, AttentionChoice
from tests.e2e.alone import POWERS, step_alone
from tests.e2e.ready import IS_CI
from tests.nearness import FLOAT32, apart

PACKING_LENGTH = 16

PACKS = [[50], [25], [5, 9, 2], [16], [11, 3], [7, 8], [20]]
"""Lengths of the samples of each pack."""

MICROBATCHES = {2: [[0, 0], [1, 1], [2, 3], [6, 6], [4, 5]], 4: [[0, 0, 0, 0], [1, 1, 2, 3], [6, 6, 4, 5]]}
"""Number of ranks -> the pack of each rank, in each microbatch of a step."""


def distribute(model):
    """Return a model in DDP, its backward pass, and gradients."""
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return wrapped, lambda loss, _: loss.backward(), lambda weight: weight.grad


def shard_fully(model):
    """Share the weights of a model over all ranks, by FSDP 2."""
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    return fully_shard(model), lambda loss, _=True: loss.backward(), lambda weight: weight.grad.full_tensor()


def open_engine(model, *, stage):
    """Return DeepSpeed's engine of a model."""
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=settings)

    def backward(loss, last=True):  # noqa: FBT002  # as those of the other ways
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.backward(loss)
        if not last:
            engine.step()

    return engine, backward, safe_get_full_grad


SHARDINGS = {"DDP": distribute, "FSDP 2": shard_fully}
SHARDINGS |= {f"ZeRO {stage}": partial(open_engine, stage=stage) for stage in (1, 2, 3)}
"""Way in which ranks share a model -> function that gives it, its backward pass, and gradients."""

WAYS = ("FSDP 2", "ZeRO 2", "ZeRO 3") if IS_CI else ("FSDP 2", "ZeRO 3")
"""Ways to share weights or gradients."""

CASES = {
    "text": {"folder": "qwen2"}, "text by sample": {"folder": "qwen2", "reduction": "sample"},
    "adapters": {"folder": "qwen2", "lora": True},
    **{f"text, {sharding}": {"folder": "qwen2", "sharding": sharding} for sharding in WAYS},
    "images beside text": {"folder": "qwen2_5_vl", "images": (0, 1, 2)},
    "images by sample": {"folder": "qwen2_5_vl", "images": (0, 1, 2), "reduction": "sample", "lora": True},
    **{f"images, {sharding}": {"folder": "qwen2_5_vl", "images": (*range(7),), "sharding": sharding}
       for sharding in WAYS if sharding != "ZeRO 3"},
}  # fmt: skip


def draw_packs(config, images):
    """Return the samples of each pack; longer ones of the packs in *images* have an image."""
    draw, packs = torch.Generator().manual_seed(3), []
    for pack, lengths in enumerate(PACKS):
        packs.append([])
        for length in lengths:
            ids = torch.randint(5, 250, (length,), generator=draw)
            sample = {"mm_token_type_ids": torch.zeros_like(ids)} if images else {}
            if pack in images and length > 6:
                ids[:5] = torch.tensor([config.vision_start_token_id, *[config.image_token_id] * 4])
                sample["mm_token_type_ids"][1:5] = 1
                sample["pixel_values"] = torch.randn(16, 1176, generator=draw)
                sample["image_grid_thw"] = torch.tensor([[1, 4, 4]])
            unlearned = (ids % 3 == 0) | (ids > 250) | (torch.arange(length) == 0)
            packs[-1].append({"input_ids": ids, "labels": ids.masked_fill(unlearned, -100), **sample})
    return packs


def join_samples(model, samples):
    """Return the row of a pack, as trainers give it to the model."""
    positions = [torch.arange(len(one["input_ids"]))[None] for one in samples]
    if "mm_token_type_ids" in samples[0]:
        find = next(part.get_rope_index for part in model.modules() if hasattr(part, "get_rope_index"))
        media = [find(one["input_ids"][None], one["mm_token_type_ids"][None], one.get("image_grid_thw"))[0]
                 for one in samples]  # fmt: skip
        positions = [torch.cat([text[None], three]) for text, three in zip(positions, media, strict=True)]
    row = {name: torch.cat([one[name] for one in samples])[None] for name in ("input_ids", "labels")}
    pixels = {name: torch.cat(found) for name in ("pixel_values", "image_grid_thw")
              if (found := [one[name] for one in samples if name in one])}  # fmt: skip
    return {**row, **pixels, "position_ids": torch.cat(positions, dim=-1), "use_cache": False}


def weigh_tokens(samples, reduction):
    """Return the weight of each token of a pack but the first, as the target of the one before."""
    learned = [one["labels"] != -100 for one in samples]
    each = [own / max(1, own.sum()) ** -POWERS[reduction] for own in learned]
    return torch.cat(each)[1:]


def open_model(folder, images, *, lora):
    """Return a model, perhaps with adapters, and the samples of its packs."""
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager").train()
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model, draw_packs(model.config, images)


@cache
def train_alone(folder, images, reduction, *, lora):
    """Return the step of all samples alone, however ranks share weights in the one beside it."""
    model, packs = open_model(folder, images, lora=lora)
    return step_alone(model, [sample for pack in packs for sample in pack], reduction)


def train_degrees(folder, *, sharding="DDP", reduction="token", lora=False, images=()):
    """Return how far the loss and gradients of a step are from those of its samples alone."""
    due = train_alone(folder, images, reduction, lora=lora)
    model, packs = open_model(folder, images, lora=lora)
    rank, size = dist.get_rank(), dist.get_world_size()
    set_attention(model, attention_for_shared_rows(AttentionChoice(VARLEN, native="eager")))
    degrees = [degree for degree in (2, 4) if degree <= size]
    groups = RowGroups.make(degrees, timedelta(minutes=2), packing_length=PACKING_LENGTH)
    share_rows(model, groups, logits=reduction != "token")
    isolation = probe_ready_model(model, native="eager", named=VARLEN, groups=groups).isolation
    model.train()
    wrapped, backward, gradient = SHARDINGS[sharding](model)
    mine = [packs[slots[rank]] for slots in MICROBATCHES[size]]
    rows, weights = [join_samples(model, pack) for pack in mine], [weigh_tokens(pack, reduction) for pack in mine]
    counted = [float(own.sum()) for own in weights if groups.counts(len(own) + 1)]
    dist.all_reduce(total := torch.tensor(sum(counted, 0.0)))
    loss = torch.zeros(())
    for number, (row, own) in enumerate(zip(rows, weights, strict=True), start=1):
        last = number == len(rows)
        with nullcontext() if last or sharding != "DDP" else wrapped.no_sync():
            if reduction == "token":
                part = wrapped(**row, num_items_in_batch=total).loss
            else:
                logits = wrapped(**row).logits[0, :-1].float()
                part = (cross_entropy(logits, row["labels"][0, 1:], reduction="none") * own).sum() / total
            part = part * size * groups.weight_of(len(own) + 1)  # ranks' gradients are averaged
            backward(part, last)
        loss += part.detach()
    dist.all_reduce(loss)
    found = {name: own for name, weight in model.named_parameters() if (own := gradient(weight)) is not None}
    distances = abs(float(loss) / size - due.loss) / due.loss, apart(found, due.gradients, scale=due.scale)
    return [float(isolation > 0) * 1e9, *(one / FLOAT32 for one in distances)]


def main(out, models):
    """Be one rank; write the distances of each case, over their limits."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    torch.set_num_threads(1)
    found = {name: train_degrees(**case | {"folder": f"{models}/{case['folder']}"}) for name, case in CASES.items()}
    Path(out, f"found{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(out):
    """Be one rank; write the most peaks of each way to share packs, over those of short ones."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    torch.set_num_threads(1)
    peaks: dict[str, float] = {}
    for vocabulary in (42, 8):  # times the width: of a 7B model, and of one in which logits count for little
        found = measure_ways(Namespace(tokens=64, width=64, vocabulary=vocabulary * 64))
        peaks = {way: max(peaks.get(way, 0), peak / found["short"][0]) for way, (peak, *_) in found.items()}
    Path(out, f"peaks{dist.get_rank()}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()
