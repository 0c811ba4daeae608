"""`packplan.testing` on others' batches: each known leak is found, with its module."""

import inspect
import math
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import DataCollatorWithFlattening, LlamaConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from packplan.adapters.attention import set_attention
from packplan.adapters.attention.packed_row import run_by_sample
from packplan.adapters.probe.small_model import SmallModels
from packplan.adapters.proof.comparison import read_logits
from packplan.core.equality import AttentionChoice
from packplan.core.errors import ArgumentError, MismatchError, ModelError
from packplan.testing import assert_equal_to_alone, assert_isolated
from tools.families import default_config

pytestmark = pytest.mark.slow

LENGTHS = (33, 3, 70, 51)

STARTS = [0, 33, 36, 106]

COLLATORS = {
    "transformers": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    "trl": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    "padded": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=16),
}


def rows(lengths=LENGTHS):
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(16, 96, (length,), generator=draw).tolist()} for length in lengths]


def batch_of(collator="transformers", lengths=LENGTHS):
    """Return the batch of a collator, with the arguments that models of any family take."""
    return dict(COLLATORS[collator](rows(lengths), return_tensors="pt"))


def positions_alone(rows=None):
    batch = COLLATORS["transformers"](rows, return_tensors="pt") if rows else batch_of()
    return {key: batch[key] for key in ("input_ids", "position_ids", "labels")}


def changed(**changes):
    return {key: value for key, value in (batch_of() | changes).items() if value is not None}


def several_rows(*, left=False, **changes):
    """Return two rows of samples, the second one padded, as arguments of a model."""
    draw, lengths = torch.Generator().manual_seed(4), ((33, 3, 70), (51, 40))
    shape = 2, max(map(sum, lengths))
    batch = {"input_ids": torch.randint(16, 96, shape, generator=draw), "labels": torch.full(shape, -100)}
    batch |= {key: torch.zeros(shape, dtype=torch.int64) for key in ("position_ids", "attention_mask")}
    for row, own in enumerate(lengths):
        start = first = shape[1] - sum(own) if left else 0
        for length in own:
            span, labelled = slice(start, start + length), slice(start + (start > first), start + length)
            batch["position_ids"][row, span] = torch.arange(length)
            batch["labels"][row, labelled] = batch["input_ids"][row, labelled]
            batch["attention_mask"][row, span] = 1
            start += length
    return {key: value for key, value in (batch | changes).items() if value is not None}


def model_of(family, attention="eager", config=None):
    with torch.random.fork_rng():
        model = SmallModels(default_config(family) if config is None else config).build(attention=attention)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    for module in model.modules():  # in a process that has loaded Qwen3.5 through ms-swift, which replaces them
        if getattr(type(module), "_ms_swift_sp_linear_patched", False):
            plain = inspect.getclosurevars(type(module).forward).nonlocals["origin_forward"]
            module.forward = MethodType(plain, module)
    return model


def adapted(family):
    adapters = LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(model_of(family), adapters)
    model.gradient_checkpointing_enable({"use_reentrant": True})  # in training, gradients of inputs are none
    return model


def half_reset():
    """A layer whose convolution is told its rows, and whose state is not."""
    model = model_of("qwen3_next", "sdpa")
    set_attention(model, AttentionChoice("varlen", keeps_rows=True))
    run_by_sample(model, ["Conv1d"])
    return model


def caching():
    """A model that, with its cache, reads a row as one sample."""
    model = model_of("llama")
    model.config.use_cache = True
    return model


class BackwardLeak(torch.autograd.Function):
    """Right numbers, whose gradients are passed to other samples, too."""

    @staticmethod
    def forward(_, seen):
        return seen.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient + 1e-3 * gradient.roll(-40, 1)


LEAKS = {
    "state": ("blocks.1.mix.inner", lambda seen: seen + 1e-3 * seen.cumsum(1)),
    "backward": ("blocks.1", BackwardLeak.apply),
    "in place": ("blocks.1", lambda seen: seen.add_(seen.cumsum(1), alpha=1e-3)),
    "faint": ("blocks.1", lambda seen: seen + 1e-20 * seen.cumsum(1)),  # nothing is left of it in a logit
    "rows": ("blocks.1", lambda seen: seen + 1e-3 * seen.roll(1, 0)),
}
"""Leak -> the module that has it, and what it makes of the module's numbers."""


class Tiny(nn.Module):
    """A model of nobody's library: tokens know those before them in their sample."""

    def __init__(self, leak=None, *, experts=False):
        super().__init__()
        self.table, self.head = nn.Embedding(100, 12), nn.Linear(12, 100)
        self.blocks = nn.ModuleList(Block(experts=experts) for _ in range(3))
        if leak:
            module, change = LEAKS[leak]
            self.get_submodule(module).register_forward_hook(lambda _, __, found: change(found))

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, inputs_embeds=None):
        own = (position_ids.diff(prepend=position_ids[:, :1]) != 1).cumsum(1)
        hidden = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            hidden = block(hidden, own)
        return self.head(hidden)


class Block(nn.Module):
    def __init__(self, *, experts):
        super().__init__()
        self.sorted, self.mix = Sorted() if experts else nn.Identity(), Boxed(Mean())

    def forward(self, hidden, own):
        hidden = self.sorted(hidden)
        return hidden + self.mix(hidden, own).found


class Mean(nn.Module):
    def forward(self, hidden, own):
        mask = hidden.new_ones(own.shape[1], own.shape[1]).tril() * (own[:, :, None] == own[:, None])
        return (mask / mask.sum(-1, keepdim=True)) @ hidden


class Boxed(nn.Module):
    """Returns no tensor, but an object that has one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *given):
        return SimpleNamespace(found=self.inner(*given))


class Sorted(nn.Module):
    """Computes tokens in another order, as experts do, and puts them back."""

    def __init__(self):
        super().__init__()
        self.sort = Sort()

    def forward(self, hidden):
        flat = hidden.flatten(0, 1)
        order = flat[:, 0].argsort()
        return self.sort(flat, order)[order.argsort()].view_as(hidden)


class Sort(nn.Module):
    def forward(self, hidden, order):
        return hidden[order]


class Lookup(nn.Module):
    """Embeds tokens, and is no embedding of torch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 12))

    def forward(self, ids):
        return self.weight[ids]


def looking_up():
    """A model that names its embedding, which no class tells."""
    model = Tiny()
    model.table = Lookup()
    model.get_input_embeddings = lambda: model.table
    return model


SOUND = {
    **{f"{name}, {kind}": (partial(model_of, "llama", kind), partial(batch_of, name))
       for name, kind in [*((name, "sdpa") for name in COLLATORS), ("transformers", "eager")]},
    "adapters": (partial(adapted, "llama"), positions_alone),
    "rows that are samples": (partial(model_of, "llama", "sdpa"), partial(several_rows, position_ids=None)),
    "packed rows": (Tiny, several_rows), "an embedding of its own": (looking_up, several_rows),
    "packed rows, padded on the left": (partial(Tiny, experts=True), partial(several_rows, left=True)),
    "embeddings": (Tiny, lambda: several_rows(input_ids=None, inputs_embeds=torch.randn(2, 106, 12))),
}  # fmt: skip


@pytest.mark.parametrize(("make", "batch"), SOUND.values(), ids=SOUND)
def test_sound_models_pass_on_batches_of_others(make, batch):
    """Exactly apart, and equal within rounding, as the numbers say; the model stays as it was."""
    model = make().train()

    assert_isolated(model, batch())
    found = assert_equal_to_alone(model, batch())

    assert max(found.logits) < 2e-6
    assert 0 < found.gradients < 2e-6
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())


NUMBERED = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None] + 1
"""A mask that numbers samples, as axolotl's collators of packs make it."""

IDS_ALONE = {"input_ids": batch_of()["input_ids"]}

ALL_ONES = torch.ones(1, sum(LENGTHS), dtype=torch.int64)

REPORTED = {
    "ms-swift 9565": (partial(model_of, "qwen3_5"), positions_alone(), "linear_attn"),
    "ms-swift 9618": (partial(model_of, "qwen3_5_moe"), positions_alone(), "linear_attn"),
    "transformers 46634": (partial(model_of, "llama", "sdpa"), changed(attention_mask=ALL_ONES), "self_attn"),
    "transformers 46859": (partial(model_of, "qwen3_5"), batch_of(), "linear_attn"),
    "axolotl 3796": (partial(model_of, "llama", "sdpa"), changed(attention_mask=NUMBERED), "self_attn"),
    "AReaL 1442": (partial(model_of, "llama", "sdpa"), changed(position_ids=None), "self_attn"),
    "slime 1686": (half_reset, positions_alone(), "linear_attn"),
    "Automodel 2147": (partial(model_of, "qwen3_5"), changed(seq_idx=None), "linear_attn"),
    "lmms-engine 167": (partial(model_of, "qwen3_5"), IDS_ALONE, "linear_attn"),
}
"""Report -> its model, its batch, and the module that mixes samples; docs has the same table."""

LEAKING = {
    **{name: (make, batch, STARTS, f"layers.0.{module}") for name, (make, batch, module) in REPORTED.items()},
    "a family without positions": (partial(model_of, "bloom"), IDS_ALONE, STARTS, "h.0.self_attention"),
    "a cache": (caching, positions_alone(), None, "layers.0.self_attn"),
    "masks of packed rows": (partial(model_of, "llama", "sdpa"), several_rows(), None, "layers.0.self_attn"),
    "an adapted model": (partial(adapted, "lfm2"), positions_alone(), None, "layers.0.conv"),
}


@pytest.mark.parametrize(("make", "batch", "starts", "module"), LEAKING.values(), ids=LEAKING)
def test_leaks_are_found(make, batch, starts, module):
    """Each by the module that its report names, without an error or a warning of its own."""
    with pytest.raises(MismatchError) as caught:
        assert_isolated(make(), batch, starts)

    assert "leak" == caught.value.kind
    assert (1, 0) == caught.value.details["samples"]
    assert caught.value.details["module"].endswith(module)
    assert (make is caching) == ("config.use_cache" in str(caught.value))


def test_factors_that_follow_the_row_are_found_by_equality_alone():
    """Samples are apart, and not what they are alone; the module of the factors is named."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model, batch = model_of("llama", config=LlamaConfig(rope_parameters=dynamic)), positions_alone()

    assert_isolated(model, batch)
    assert {"sample": 0, "module": "model.rotary_emb"} == difference(model, batch)


def difference(model, batch):
    with pytest.raises(MismatchError) as caught:
        assert_equal_to_alone(model, batch)
    assert "unlike_alone" == caught.value.kind
    assert isinstance(caught.value, AssertionError)
    return caught.value.details


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("leak", LEAKS)
def test_the_first_module_that_mixes_is_named(leak, experts):
    """Not its parts, the ones around it, later ones, or one that orders tokens otherwise."""
    for batch in (several_rows(), several_rows(left=True), *[positions_alone()] * (leak != "rows")):
        with pytest.raises(MismatchError) as caught:
            assert_isolated(Tiny(leak, experts=experts), batch)
        assert LEAKS[leak][0] == caught.value.details["module"]


@pytest.mark.parametrize("experts", [False, True])
def test_what_differs_from_the_sample_alone_is_named(experts):
    """The sample and the module of its logits; the weight, where gradients alone show the leak."""
    assert {"sample": 0, "module": "blocks.1"} == difference(Tiny("rows", experts=experts), several_rows())
    assert "table.weight" == difference(Tiny("backward", experts=experts), positions_alone())["weight"]
    scaled = Tiny(experts=experts)
    scaled.blocks[1].register_forward_pre_hook(lambda _, given: (given[0] + given[0].roll(1, 0), *given[1:]))
    assert {"sample": 0, "module": ""} == difference(scaled, several_rows()), "no module, but what it is given"
    crossing = several_rows()
    crossing["labels"][1, 51] = 20
    assert {"sample": 4, "module": None} == difference(Tiny(), crossing)


ALONE = [positions_alone([row]) for row in rows()]

GOING_ON = torch.arange(sum(LENGTHS))[None]

OTHER = batch_of(lengths=(33, 4, 69, 51))
"""A collator that told kernels other samples than positions have."""

WRONG = {
    "positions that go on": (changed(position_ids=GOING_ON), {"starts": STARTS}, "by starts, but not by position_ids"),
    "other kernels' starts": (changed(cu_seq_lens_q=OTHER["cu_seq_lens_q"]), {}, "at token 36 .*not by cu_seq_lens_q"),
    "other numbers": (changed(seq_idx=OTHER["seq_idx"]), {}, "at token 36 of row 0 .*not by seq_idx"),
    "a mask of other numbers": (changed(attention_mask=OTHER["seq_idx"] + 1), {}, "at token 36 .*not by attention_m"),
    "another start": (batch_of(), {"starts": [0, 34, 36, 106]}, "at token 33 of row 0 by "),
    "another start of a row": (several_rows(), {"starts": [[0, 33, 36], [0, 50]]}, "at token 50 of row 1 by starts"),
    "one sample": (batch_of(lengths=(9,)), {}, "has only one sample"),
    "no positions": (changed(position_ids=None), {}, "pass starts"),
    "starts beyond": (batch_of(), {"starts": [0, 33, 999]}, "has no token 999 in row 0"),
    "starts of one row": (several_rows(), {"starts": [0, 9]}, "has 2 rows, but starts"),
    "no rows": (changed(input_ids=torch.ones(20, dtype=torch.int64)), {}, r"of shape \(20,\)"),
    "padding in the middle": (changed(attention_mask=(GOING_ON != 50).long()), {}, "padding between .* of row 0"),
    "no tokens": ({"position_ids": GOING_ON}, {}, "neither input_ids nor inputs_embeds"),
    "no labels": ({**positions_alone(), "input_ids": None, "labels": None, "inputs_embeds": torch.ones(1, 157, 12)}, {},
                  "neither labels nor input_ids"),
    "pixels": (changed(pixel_values=torch.ones(4, 7)), {}, "has pixel_values, which cannot be cut"),
    "a sample dropped": (batch_of(), {"alone": ALONE[1:]}, "has 4 samples, but alone has 3"),
    "samples reordered": (batch_of(), {"alone": [ALONE[n] for n in (0, 2, 1, 3)]}, "other tokens in sample 1"),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "options", "said"), WRONG.values(), ids=WRONG)
def test_a_batch_that_disagrees_with_itself_is_refused(batch, options, said):
    """By each key that says where samples begin; samples alone are those of the row, in order."""
    with pytest.raises(ArgumentError, match=said) as caught:
        assert_equal_to_alone(Tiny(), batch, **options)
    assert "packed_batch" == caught.value.kind


def test_samples_alone_may_be_given():
    """By the collator of the row, and each start of each row."""
    assert_equal_to_alone(Tiny(), positions_alone(), alone=ALONE)
    assert_isolated(Tiny(), several_rows(), [[0, 33, 36], [0, 51]])


def shard(model):
    """Let a weight be one rank's, as FSDP 2 has it."""
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    weight = DTensor.from_local(model.head.weight.detach(), mesh, [Replicate()], run_check=False)
    model.head.weight = nn.Parameter(weight)


def quantise(model):
    """Let its last product have no gradient, as those of 8 bits."""
    model.requires_grad_(requires_grad=False)
    model.head.register_forward_pre_hook(lambda _, given: ((given[0].detach() * 16).to(torch.int8).float(),))


SILENT = {
    "ZeRO 3": (lambda model: setattr(model.head.weight, "data", torch.empty(0)), r"head\.weight is sharded"),
    "FSDP 1": (
        lambda model: setattr(model.table, "_flat_param", nn.Parameter(torch.ones(3))),
        "_flat_param is sharded",
    ),
    "FSDP 2": (shard, r"head\.weight is sharded"),
    "quantised": (quantise, "logits have no gradient"),
    "infinite": (
        lambda model: nn.init.constant_(model.head.weight, math.inf),
        "sample 0 have gradients that are 0 or not finite",
    ),
    "blind": (lambda model: nn.init.zeros_(model.head.weight), "sample 0 have gradients that are 0 or not finite"),
}


@pytest.mark.parametrize(("change", "said"), SILENT.values(), ids=SILENT)
def test_a_model_that_cannot_be_asked_is_an_error_and_no_proof(change, said):
    """Sharded, quantised, infinite, or saying nothing."""
    model = Tiny()
    change(model)
    with pytest.raises(ModelError, match=said) as caught:
        assert_isolated(model, positions_alone())
    assert "probe" == caught.value.kind


def test_a_model_without_logits_is_not_told_to_train_without_packing():
    """Since either its head is missing, or a fused loss computes no logits."""
    with pytest.raises(ModelError, match=r"returns dict without logits.* a head .* leave use_liger_kernel off$"):
        read_logits({"last_hidden_state": torch.ones(1, 3, 4)}, (1, 3))


def test_gradients_need_a_weight_that_trains():
    model = Tiny().requires_grad_(requires_grad=False)

    assert_isolated(model, positions_alone())
    with pytest.raises(ModelError, match="no weight with requires_grad"):
        assert_equal_to_alone(model, positions_alone())
