"""`packplan.testing` on others' batches: each known leak is found, with its module."""

import inspect
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening, LlamaConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from packplan.adapters.attention import set_attention
from packplan.adapters.attention.rows import split_states
from packplan.adapters.probe.small_model import SmallModels
from packplan.core.equality import AttentionChoice
from packplan.core.errors import ArgumentError, MismatchError, ModelError
from packplan.testing import assert_equal_to_alone, assert_isolated
from tools.families import default_config

pytestmark = pytest.mark.slow

LENGTHS = (33, 3, 70, 51)

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


def positions_alone(batch):
    return {key: value for key, value in batch.items() if key in ("input_ids", "position_ids", "labels")}


def changed(**changes):
    batch = batch_of()
    return {key: value for key, value in {**batch, **changes}.items() if value is not None}


NUMBERED = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None] + 1
"""A mask that numbers samples, as axolotl's collators of packs make it."""

GOING_ON = torch.arange(sum(LENGTHS))[None]


@pytest.fixture(autouse=True)
def _as_transformers_has_them(monkeypatch):
    """Take back what ms-swift replaces in a process that has loaded Qwen3.5 through it."""
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        module = sys.modules.get(f"transformers.models.{family}.modeling_{family}")
        for kind in vars(module).values() if module else ():
            if getattr(kind, "_ms_swift_sp_linear_patched", False):
                plain = inspect.getclosurevars(kind.forward).nonlocals["origin_forward"]
                monkeypatch.setattr(kind, "forward", plain)


def model_of(family, attention="eager", config=None):
    with torch.random.fork_rng():
        model = SmallModels(default_config(family) if config is None else config).build(attention=attention)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sound_models_pass_on_batches_of_others(collator, attention):
    """Exactly apart, and equal within rounding, as the numbers say; the model stays as it was."""
    model = model_of("llama", attention).train()

    assert_isolated(model, batch_of(collator))
    found = assert_equal_to_alone(model, batch_of(collator))

    assert 0 < max(found.logits) < 2e-6
    assert 0 < found.gradients < 2e-6
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())


def test_a_family_that_positions_do_not_keep_apart_is_found():
    """Without an error or a warning of its own; by the layer that mixes."""
    model, batch, starts = model_of("bloom"), {"input_ids": batch_of()["input_ids"]}, [0, 33, 36, 106]

    with pytest.raises(MismatchError, match=r"sample 1 .* on sample 0, .*h\.0\.self_attention \(BloomA.*\)$") as caught:
        assert_isolated(model, batch, starts)
    assert (1, 0) == caught.value.details["samples"]
    with pytest.raises(AssertionError, match="logits of sample 1 differ"):
        assert_equal_to_alone(model, batch, starts)


def half_reset():
    """A layer whose convolution is told its rows, and whose state is not."""
    model = model_of("qwen3_next", "sdpa")
    set_attention(model, AttentionChoice("varlen", follows_rows=True))
    split_states(model, ["Conv1d"])
    return model


ALL_ONES = torch.ones(1, sum(LENGTHS), dtype=torch.int64)

REPORTED = {
    "ms-swift 9565": (lambda: model_of("qwen3_5"), lambda: positions_alone(batch_of()), "linear_attn"),
    "ms-swift 9618": (lambda: model_of("qwen3_5_moe"), lambda: positions_alone(batch_of()), "linear_attn"),
    "transformers 46634": (lambda: model_of("llama", "sdpa"), lambda: changed(attention_mask=ALL_ONES), "self_attn"),
    "transformers 46859": (lambda: model_of("qwen3_5"), batch_of, "linear_attn"),
    "axolotl 3796": (lambda: model_of("llama", "sdpa"), lambda: changed(attention_mask=NUMBERED), "self_attn"),
    "AReaL 1442": (lambda: model_of("llama", "sdpa"), lambda: changed(position_ids=None), "self_attn"),
    "slime 1686": (half_reset, lambda: positions_alone(batch_of()), "linear_attn"),
    "Automodel 2147": (lambda: model_of("qwen3_5"), lambda: changed(seq_idx=None), "linear_attn"),
    "lmms-engine 167": (lambda: model_of("qwen3_5"), lambda: {"input_ids": batch_of()["input_ids"]}, "linear_attn"),
}
"""Report -> its model, its batch, and the module that mixes samples; docs has the same table."""


@pytest.mark.parametrize(("make", "batch", "module"), REPORTED.values(), ids=REPORTED)
def test_reported_leaks_are_found(make, batch, module):
    """Each by the module that its report names."""
    with pytest.raises(MismatchError, match=rf"sample 1 depends on sample 0, .*layers\.0\.{module} "):
        assert_isolated(make(), batch(), [0, 33, 36, 106])


def test_a_cache_that_hides_the_borders_is_named():
    """With it, transformers reads a row as one sample."""
    model = model_of("llama")
    model.config.use_cache = True

    with pytest.raises(MismatchError, match=r"config\.use_cache is true"):
        assert_isolated(model, positions_alone(batch_of()))


def test_factors_that_follow_the_row_are_found_by_equality_alone():
    """Samples are apart, and not what they are alone; the module of the factors is named."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model, batch = model_of("llama", config=LlamaConfig(rope_parameters=dynamic)), positions_alone(batch_of())

    assert_isolated(model, batch)
    with pytest.raises(MismatchError, match=r"first in model\.rotary_emb \(LlamaRotaryEmbedding\)"):
        assert_equal_to_alone(model, batch)


class Tiny(nn.Module):
    """A model of nobody's library: tokens know those before them, within samples told by starts."""

    def __init__(self, size=12, *, leak=None, experts=False):
        super().__init__()
        self.table = nn.Embedding(100, size)
        self.blocks = nn.ModuleList(Block(leak if number == 1 else None, experts=experts) for number in range(3))
        self.head = nn.Linear(size, 100)

    def forward(self, input_ids, position_ids=None):
        own = (position_ids.diff(prepend=position_ids[:, :1]) != 1).cumsum(1)
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = block(hidden, own)
        return self.head(hidden)


class Block(nn.Module):
    """The mean of the tokens before, and in a leak those of other samples or their gradients."""

    def __init__(self, leak, *, experts):
        super().__init__()
        self.leak = leak
        self.sorted = Sorted() if experts else nn.Identity()
        mean = Mean("mask" if leak in ("mask", "boxed") else None)
        self.mix = Boxed(mean) if leak == "boxed" else mean

    def forward(self, hidden, own):
        hidden = self.sorted(hidden)
        mixed = self.mix(hidden, own)
        hidden = hidden + getattr(mixed, "found", mixed)
        if self.leak == "backward":
            return BackwardLeak.apply(hidden)
        if self.leak == "faint":  # nothing is left of it in a logit
            hidden = hidden + 1e-20 * hidden.roll(40, 1)
        if self.leak == "rows":
            hidden = hidden + 1e-3 * hidden.roll(1, 0)
        if self.leak == "in place":
            hidden += 1e-3 * hidden.roll(40, 1)
        return hidden


class Mean(nn.Module):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, hidden, own):
        causal = hidden.new_ones(own.shape[1], own.shape[1]).tril()
        mask = causal if self.leak else causal * (own[:, :, None] == own[:, None])
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


class BackwardLeak(torch.autograd.Function):
    """Right numbers, whose gradients are passed to other samples, too."""

    @staticmethod
    def forward(_, seen):
        return seen.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient + 1e-3 * gradient.roll(-40, 1)


@pytest.mark.parametrize(
    ("leak", "module"),
    {
        "mask": r"blocks\.1\.mix \(Mean\)",
        "boxed": r"blocks\.1\.mix\.inner \(Mean\)",
        "backward": r"blocks\.1 \(Block\)",
        "in place": r"blocks\.1 \(Block\)",
        "faint": r"blocks\.1 \(Block\)",
    }.items(),
)
@pytest.mark.parametrize("experts", [False, True])
def test_the_first_module_that_mixes_is_named(leak, module, experts):
    """Not its parts, the ones around it, later ones, or one that orders tokens otherwise."""
    with pytest.raises(MismatchError, match=rf"; first in {module}$"):
        assert_isolated(Tiny(leak=leak, experts=experts), positions_alone(batch_of()))


def several_rows(*, left=False):
    """Return two rows of samples, the second one padded, as arguments of a model."""
    draw, lengths = torch.Generator().manual_seed(4), ((33, 3, 70), (51, 40))
    tokens = max(map(sum, lengths))
    batch = {
        "input_ids": torch.randint(16, 96, (2, tokens), generator=draw),
        "position_ids": torch.zeros(2, tokens, dtype=torch.int64),
        "labels": torch.full((2, tokens), -100),
        "attention_mask": torch.zeros(2, tokens, dtype=torch.int64),
    }
    for row, own in enumerate(lengths):
        start = tokens - sum(own) if left else 0
        for length in own:
            span = slice(start, start + length)
            batch["position_ids"][row, span] = torch.arange(length)
            batch["labels"][row, span][1:] = batch["input_ids"][row, span][1:]
            batch["attention_mask"][row, span] = 1
            start += length
    return batch


class Rows(Tiny):
    """Takes a mask, which its positions make needless."""

    def forward(self, input_ids, position_ids, attention_mask=None):
        return super().forward(input_ids, position_ids)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_several_rows_with_padding_are_asked(left, experts):
    """Samples of one row, and of different rows, on either side of padding."""
    batch = several_rows(left=left)

    assert_isolated(Rows(experts=experts), batch)
    assert_equal_to_alone(Rows(experts=experts), batch)
    with pytest.raises(MismatchError, match=r"sample 1 depends on sample 0, .*; first in blocks\.1\.mix \(Mean\)$"):
        assert_isolated(Rows(leak="mask", experts=experts), batch)
    with pytest.raises(MismatchError, match=r"sample 0 depends on sample [34], .*; first in blocks\.1 \(Block\)$"):
        assert_isolated(Rows(leak="rows", experts=experts), batch)
    with pytest.raises(MismatchError, match=r"logits of sample 0 differ .*; first in blocks\."):
        assert_equal_to_alone(Rows(leak="rows", experts=experts), batch)


def test_rows_that_are_samples_are_asked():
    """As trainers pad them without packing; with packed rows, their mask hides the borders."""
    batch, packed = several_rows(), several_rows()
    del batch["position_ids"]

    assert_isolated(model_of("llama", "sdpa"), batch)
    assert_equal_to_alone(model_of("llama", "sdpa"), batch)
    with pytest.raises(MismatchError, match=r"sample 1 depends on sample 0, .*layers\.0\.self_attn"):
        assert_isolated(model_of("llama", "sdpa"), packed)


def test_borders_of_each_row_are_compared():
    """Those that are given, and those of labels, name the row."""
    batch = several_rows()

    assert_isolated(Rows(), batch, [[0, 33, 36], [0, 51]])
    with pytest.raises(ArgumentError, match=r"at token 50 of row 1 by starts, but not by position_ids"):
        assert_isolated(Rows(), batch, [[0, 33, 36], [0, 50]])
    batch["labels"][1, 51] = 20
    with pytest.raises(MismatchError, match="sample 3 would learn the first token of sample 4"):
        assert_equal_to_alone(Rows(), batch)


def test_a_leak_that_only_gradients_show_is_found_by_gradients():
    """Its logits and losses are those of the samples alone."""
    with pytest.raises(MismatchError, match=r"gradients differ from the sum of the samples' own by .* most of all"):
        assert_equal_to_alone(Tiny(leak="backward"), positions_alone(batch_of()))


WRONG = {
    "positions that go on": (
        changed(position_ids=GOING_ON),
        [0, 33, 36, 106],
        r"a sample at token 33 of row 0 by starts, but not by pos",
    ),
    "another start": (batch_of(), [0, 34, 36, 106], "a sample at token 33 of row 0 by "),
    "one sample": (batch_of(lengths=(9,)), None, "holds one sample"),
    "no positions": (changed(position_ids=None), None, "give starts"),
    "starts beyond": (batch_of(), [0, 33, 999], "has no token 999 in row 0, which starts name"),
    "starts of one row": (changed(input_ids=torch.ones(2, 20, dtype=torch.int64)), [0, 9], "has 2 rows, but starts"),
    "no rows": (changed(input_ids=torch.ones(20, dtype=torch.int64)), [0, 9], r"of shape \(20,\): give rows"),
    "padding in the middle": (
        changed(attention_mask=(torch.arange(sum(LENGTHS)) != 50).long()[None]),
        [0, 33, 36, 106],
        "padding between the tokens of row 0",
    ),
    "no tokens": ({"position_ids": GOING_ON}, [0, 9], "neither input_ids nor inputs_embeds"),
}


@pytest.mark.parametrize(("batch", "starts", "said"), WRONG.values(), ids=WRONG)
def test_a_batch_that_disagrees_with_itself_is_refused(batch, starts, said):
    """By each key that says where samples begin."""
    with pytest.raises(ArgumentError, match=said) as caught:
        assert_isolated(Tiny(), batch, starts)
    assert "packed_batch" == caught.value.kind


@pytest.mark.parametrize("key", ["cu_seq_lens_q", "seq_idx", "attention_mask"])
def test_each_key_that_tells_borders_is_compared(key):
    """A collator that told kernels other samples than positions have."""
    other = batch_of(lengths=(33, 4, 69, 51))
    value = other["seq_idx"] + 1 if key == "attention_mask" else other[key]

    with pytest.raises(
        ArgumentError, match=rf"a sample at token 36 of row 0 by (starts|position_ids), but not by {key}"
    ):
        assert_isolated(Tiny(), changed(**{key: value}))


def test_a_collator_that_drops_or_reorders_is_named():
    """Batches of the samples alone have to be those of the row, in its order."""
    alone = [positions_alone(COLLATORS["transformers"]([row], return_tensors="pt")) for row in rows()]
    batch = positions_alone(batch_of())

    assert_equal_to_alone(Tiny(), batch, alone=alone)
    with pytest.raises(ArgumentError, match="has 4 samples, but alone has 3"):
        assert_equal_to_alone(Tiny(), batch, alone=alone[1:])
    with pytest.raises(ArgumentError, match="other tokens in sample 1 than alone"):
        assert_equal_to_alone(Tiny(), batch, alone=[alone[number] for number in (0, 2, 1, 3)])
    with pytest.raises(ArgumentError, match="has pixel_values, which is not by tokens: give each sample by itself"):
        assert_equal_to_alone(Tiny(), {**batch, "pixel_values": torch.ones(4, 7)})


def quantised():
    class Eight(nn.Module):
        """8 bits of a weight, whose product has no gradient."""

        def forward(self, hidden):
            return (hidden.detach() * 16).to(torch.int8).float()

    model = Tiny()
    model.head = nn.Sequential(Eight(), model.head)
    return model.requires_grad_(requires_grad=False)


def broken(value):
    model = Tiny()
    with torch.no_grad():
        model.head.weight.mul_(value)
        model.head.bias.mul_(value)
    return model


def sharded():
    """Return a model of one rank whose weights are those of FSDP 2."""
    from torch.distributed.tensor import DTensor, Replicate

    model = Tiny()
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    weight = DTensor.from_local(model.head.weight.detach(), mesh, [Replicate()], run_check=False)
    model.head.weight = nn.Parameter(weight)
    return model


def flattened():
    model = Tiny()
    model.table._flat_param = nn.Parameter(torch.ones(3))
    return model


def placeholder():
    model = Tiny()
    model.head.weight.data = model.head.weight.data.new_empty(0)
    return model


SILENT = {
    "ZeRO 3": (placeholder, r"its weight head\.weight is sharded"),
    "FSDP 1": (flattened, r"its weight table\._flat_param is sharded"),
    "FSDP 2": (sharded, r"its weight head\.weight is sharded"),
    "quantised": (quantised, "logits have no gradient"),
    "infinite": (lambda: broken(math.inf), "no gradient reaches sample 0"),
    "blind": (lambda: broken(0.0), "no gradient reaches sample 0"),
}


@pytest.mark.parametrize(("make", "said"), SILENT.values(), ids=SILENT)
def test_a_model_that_cannot_be_asked_is_an_error_and_no_proof(make, said):
    """Sharded, quantised, infinite, or saying nothing."""
    with pytest.raises(ModelError, match=said):
        assert_isolated(make(), positions_alone(batch_of()))


def test_adapters_are_asked_with_their_model():
    """Embeddings that do not train get a gradient for the proof alone."""
    from peft import LoraConfig, get_peft_model

    def adapted(family):
        adapters = LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
        return get_peft_model(model_of(family), adapters)

    model, leaking = adapted("llama"), adapted("lfm2")

    assert_isolated(model, positions_alone(batch_of()))
    assert 0 < assert_equal_to_alone(model, positions_alone(batch_of())).gradients < 2e-6
    with pytest.raises(MismatchError, match=r"first in base_model\.model\.model\.layers\.0\.conv \(Lfm2ShortConv\)"):
        assert_isolated(leaking, positions_alone(batch_of()))


def test_gradients_need_a_weight_that_trains():
    model = Tiny().requires_grad_(requires_grad=False)

    assert_isolated(model, positions_alone(batch_of()))
    with pytest.raises(ModelError, match="none of its weights trains"):
        assert_equal_to_alone(model, positions_alone(batch_of()))


def test_embeddings_may_be_given():
    """As models that see are given them."""

    class Embedded(Tiny):
        def forward(self, inputs_embeds, position_ids):
            self.table.forward = lambda _: inputs_embeds
            return super().forward(position_ids, position_ids)

    given = torch.randn(1, sum(LENGTHS), 12)
    batch = {"inputs_embeds": given, "position_ids": batch_of()["position_ids"]}

    assert_isolated(Embedded(), batch)
    with pytest.raises(MismatchError, match=r"blocks\.1\.mix"):
        assert_isolated(Embedded(leak="mask"), batch)
