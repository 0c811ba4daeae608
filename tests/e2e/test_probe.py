"""A model packs if a probe shows it: every kind of family, planted faults, verdicts."""

import json
import re
import shutil
from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, Phi3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from packplan.adapters.attention import NAME, set_attention
from packplan.adapters.attention.packed_row import read_row, run_by_sample
from packplan.adapters.probe import probe_row
from packplan.adapters.probe.probe import probe_small_copy
from packplan.adapters.probe.probe_row import ordinary_token_ids, probe_images, probe_ready_model
from packplan.adapters.probe.shrink import shrink_config
from packplan.adapters.probe.small_model import SmallModels, open_model_config
from packplan.adapters.proof.comparison import compare, difference_limit, experts_may_differ, run_alone
from packplan.adapters.ranks.torch_group import OneRank
from packplan.app import sft
from packplan.app.opening.runs import read_config
from packplan.app.opening.verdicts import (
    load_verdict,
    needs_verdict,
    probe_unless_stored,
    require_packing_model,
    store_verdict,
)
from packplan.app.plan import __main__ as plan
from packplan.core.config.run import ModelConfig
from packplan.core.equality import AUTO, BACKENDS, EQUALITY_LIMITS, VARLEN, AttentionChoice
from packplan.core.errors import ConfigError, ModelError, PackplanError
from tests.documents import parsed
from tests.e2e.ready import prepare
from tests.e2e.test_proof import BackwardLeak
from tools import models
from tools.families import default_config

pytestmark = pytest.mark.slow


class FaultyConfig(LlamaConfig):
    """Configuration of a Llama with a fault, by its name in `FAULTS`."""

    model_type = "faulty"


class Faulty(LlamaForCausalLM):
    """A model with a fault in each copy that is built of it."""

    config_class = FaultyConfig

    def __init__(self, config):
        super().__init__(config)
        FAULTS[config.fault](self)


class BlurredConfig(Qwen3VLConfig):
    model_type = "blurred"


class Blurred(Qwen3VLForConditionalGeneration):
    """A model whose images see each other."""

    config_class = BlurredConfig

    def __init__(self, config):
        super().__init__(config)
        blur(self)


AutoModelForCausalLM.register(FaultyConfig, Faulty)
AutoModelForImageTextToText.register(BlurredConfig, Blurred)


def replace_forward(module, forward):
    """Let a module compute *forward* of its plain forward pass and its input."""
    module.forward = partial(forward, module.forward)


def at_the_end(change):
    """Return what plants a change of the last hidden states."""

    def forward(plain, *arguments, **options):
        found = plain(*arguments, **options)
        found.last_hidden_state = change(found.last_hidden_state)
        return found

    return lambda model: replace_forward(model.model, forward)


def in_layers(make, *parts):
    """Return what plants a forward pass, made anew for some parts of each layer."""

    def plant(model):
        for layer in model.model.layers:
            for part in parts:
                replace_forward(layer.get_submodule(part), make())

    return plant


def leak_beyond(reach, seen):
    """Let each token know of the one that is so many tokens before it."""
    return torch.cat([seen[:, :reach], seen[:, reach:] + 1e-3 * seen[:, :-reach]], 1)


def leak_by_gate(model):
    """Leak by a weight that is 0 at first."""
    model.gate = torch.nn.Parameter(torch.zeros(2))
    at_the_end(lambda seen: seen + model.gate[0] * seen.cumsum(1))(model)


def carry(plain, seen):
    """Carry a state along the row."""
    return plain(seen) + 0.02 * seen.cumsum(1)


def differ_under_ours(model):
    """Give other results under our attention."""
    at_the_end(lambda seen: seen * (1 + model.config._attn_implementation.startswith(NAME)))(model)


def carry_whole_rows():
    """Carry a state along the row, and refuse to run sample by sample."""
    calls = []

    def forward(plain, seen):
        calls.append(seen.shape[1])
        if calls[-4:] == [33, 3, 70, 51]:
            raise RuntimeError
        return carry(plain, seen)

    return forward


def remember(*, carries):
    """Remember from call to call, and carry a state perhaps."""
    last = []

    def forward(plain, seen):
        mixed = seen + 0.1 * last.pop() if last else seen
        last.append(seen[:, -1:].detach())
        return plain(mixed) + carries * seen.cumsum(1)

    return forward


def stiff(model):
    """Refuse to be built with a span below 1,024, which may be the rows of a table."""
    if model.config.memory_span < 1024:
        raise ValueError
    if getattr(model.config, "with_table", False):
        model.slots = torch.nn.Parameter(torch.zeros(model.config.memory_span, 2))


def remember_a_span(model):
    """Leak as far as a key says that no rule knows."""
    span = getattr(model.config, "memory_span", None) or model.config.spans[0]
    at_the_end(partial(leak_beyond, span))(model)


FAULTS = {
    "a leak that short rows do not show": at_the_end(partial(leak_beyond, 64)),
    "a leak too small for 16 bits": at_the_end(partial(leak_beyond, 17)),
    "a leak of gradients alone": at_the_end(BackwardLeak.apply), "a leak by a closed gate": leak_by_gate,
    "a blind model": at_the_end(lambda seen: seen * 0), "another result under our attention": differ_under_ours,
    "a state, and another result under our attention":
        lambda model: (in_layers(lambda: carry, "mlp")(model), differ_under_ours(model)),
    "states of two kinds": in_layers(lambda: carry, "mlp", "input_layernorm"),
    "a state that cannot be split": in_layers(carry_whole_rows, "mlp"),
    "a memory of calls": in_layers(partial(remember, carries=0.0), "mlp"),
    "a memory of calls, and a state": in_layers(partial(remember, carries=0.1), "mlp"),
    "too many weights": lambda model: model.register_parameter("more", torch.nn.Parameter(torch.empty(21_000_000))),
    "a span": remember_a_span, "a span that cannot shrink": stiff,
}  # fmt: skip


def faulty(fault, **keys):
    return FaultyConfig(num_hidden_layers=2, fault=fault, **keys)


def blur(model):
    """Let the images of a pass see each other, whole images or patches in a line."""
    plain = model.get_image_features

    def blurred(*arguments, **options):
        found = plain(*arguments, **options)
        features = found.pooler_output
        mean = (torch.cat(list(features)) if isinstance(features, (tuple, list)) else features.flatten(0, -2)).mean(0)
        found.pooler_output = [one + 1e-3 * mean for one in features]
        return found

    blurred.__wrapped__ = plain  # the probe reads its parameters
    model.get_image_features = blurred


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


LONGROPE = {"long_factor": [1.0 + 0.5 * i for i in range(48)], "original_max_position_embeddings": 4096}

PASSING = {
    **{family: (default_config(family), *shown) for family, shown in {
        "deepseek_v32": ("own", ()), "gptj": ("own", ()), "qwen3_vl_moe": ("varlen", ()),
        "minicpmv4_7": ("varlen", ("Qwen3_5GatedDeltaNet",)), "paligemma": ("varlen", ()),
    }.items()},
    "states of two kinds": (faulty("states of two kinds"), "varlen", ("LlamaMLP", "LlamaRMSNorm")),
    "numbers that say nothing": (
        LlamaConfig(pretraining_tp=4096, release={"steps": 120_000, "batches": [512, 1024]}), "varlen", ()),
    "a span that is a size of weights": (
        faulty("a span that cannot shrink", memory_span=4096, with_table=True), "varlen", ()),
    "its own attention": (faulty("a state, and another result under our attention"), "own", ("LlamaMLP",)),
}  # fmt: skip
"""Model -> its configuration, its strategy, and the layers that run sample by sample."""


@pytest.mark.parametrize(("config", "strategy", "split"), PASSING.values(), ids=PASSING)
def test_models_of_every_kind_pack(config, strategy, split):
    verdict = probe_small_copy(config)

    assert (strategy, split) == (verdict.strategy, verdict.split), verdict.reason
    assert 0 == verdict.measured.isolation
    assert verdict.measured.equality <= EQUALITY_LIMITS["float32"] / 4
    assert () == verdict.not_exercised


REFUSED = {
    **{family: (default_config(family), "isolation", "gradients pass") for family in ("bloom", "xglm")},
    **{name: (faulty(name), "isolation", "") for name in list(FAULTS)[:4]},
    "images that see each other": (BlurredConfig(**default_config("qwen3_vl").to_dict()), "isolation", ""),
    **{f"a span under {key}": (faulty("a span", **{key: value}), "isolation", "")
       for key, value in {"memory_span": 4096, "spans": [4096, 4096]}.items()},
    "a state that cannot be split": (
        faulty("a state that cannot be split"), "isolation",
        "LlamaMLP carries state along the row, and does not run by sample"),
    "a memory of calls": (faulty("a memory of calls"), "equality", ""),
    "a memory of calls, and a state": (faulty("a memory of calls, and a state"), "equality", ""),
    "dynamic factors": (
        LlamaConfig(rope_parameters=rope("dynamic", factor=2.0)), "equality", "differ from the same samples alone"),
    "longrope": (
        Phi3Config(rope_parameters=rope("longrope", short_factor=[1.0] * 48, **LONGROPE),
                   max_position_embeddings=131072), "equality", "differ from the same samples alone"),
    "a blind model": (faulty("a blind model"), "", "the test proves nothing"),
    "too many weights": (faulty("too many weights"), "", "more than 20,000,000"),
    "a span that cannot shrink": (
        faulty("a span that cannot shrink", memory_span=4096, other_span=4096), "",
        r"sample to sample: memory_span \(4,096\)$"),
}  # fmt: skip
"""Model -> its configuration, what shows that it may not pack, and its reason."""


@pytest.mark.parametrize(("config", "shows", "reason"), REFUSED.values(), ids=REFUSED)
def test_models_that_leak_are_refused_with_the_numbers(config, shows, reason):
    """By gradients between samples, or by equality alone; what cannot be shown is refused, too."""
    verdict = probe_small_copy(config)

    assert not verdict.passes
    assert re.search(reason, verdict.reason)
    if shows:
        number = getattr(verdict.measured, shows)
        assert (verdict.measured.isolation > 0) == (shows == "isolation")
        assert number > 1e-3 * (shows == "equality")
        assert f"{number:.2g}" in verdict.reason


@pytest.mark.parametrize("family", ["qwen3_vl", "minicpmv4_6", "qwen2_5_omni_thinker"])
def test_images_that_see_each_other_are_found(family):
    """In each form in which towers take images; rows of text would not show it."""
    model = SmallModels(default_config(family)).build(attention="sdpa")
    assert 0 == probe_images(model, native="sdpa").isolation
    blur(model)

    assert probe_images(model, native="sdpa").isolation > 0


@pytest.mark.parametrize("family", ["paligemma", "gemma3"])
def test_blocks_of_token_types_that_join_samples_are_found(family):
    """Masks of transformers let prefixes, and adjacent images, attend to other samples."""
    assert probe_small_copy(default_config(family), attn_impl="sdpa").measured.isolation > 0


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, {takes}*arguments, **options):
        found = super().forward(*arguments, **options)
        found.logits = found.logits + {leak} * found.logits.cumsum(1)
        return found
"""


@pytest.mark.parametrize(("leak", "takes"), [("0.0", ""), ("0.1", ""), ("0.0", "pixel_values, ")])
def test_code_beside_a_model_is_asked_where_the_user_trusts_it(tmp_path, leak, takes):
    """It packs if it proves that it may; code that computes no row without images is refused."""
    (tmp_path / "own.py").write_text(CODE.format(leak=leak, takes=takes))
    content = {
        **LlamaConfig(num_hidden_layers=2).to_dict(), "model_type": "own", "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = open_model_config(ModelConfig(model=str(tmp_path), trust_remote_code=True))

    verdict = probe_small_copy(config, trust_remote_code=True)

    assert verdict.passes == ((leak, takes) == ("0.0", ""))
    if takes:
        assert re.search(r"a small copy of the model does not run \(TypeError.*'pixel_values'", verdict.reason)
        assert "training.packing" not in verdict.reason  # whoever refuses the model adds the remedy once


SHRUNK = [
    ({"insert_layer_id": 6, "select_layer_id": -2, "vision_config": {"num_hidden_layers": 27, "insert_layer_id": 6},
      "text_config": {"n_layer": 24, "after_layer_idx": 6, "layer_types": [*"sssf", *"s" * 20]}},
     {"insert_layer_id": 0, "select_layer_id": -2, "vision_config": {"num_hidden_layers": 2, "insert_layer_id": 0},
      "text_config": {"n_layer": 4, "after_layer_idx": 2, "layer_types": [*"sssf"]}}),
    ({"n_layer": 24, "attn_layer_period": 6, "num_kv_shared_layers": 9, "window_size": 4096, "eos_token_id": None},
     {"n_layer": 7, "attn_layer_period": 6, "num_kv_shared_layers": 1, "window_size": 24, "eos_token_id": None}),
    ({"num_layers": 24, "first_k_dense_replace": 3}, {"num_layers": 4, "first_k_dense_replace": 3}),
    ({"num_layers": 4, "first_k_dense_replace": 4, "attn_period": 4},
     {"num_layers": 2, "first_k_dense_replace": 4, "attn_period": 4}),
    ({"depth": 24, "full_idxs": [5, 6, 9], "hidden_size": [4096] * 24, "a_ids": [*range(24)], "spans": [[1, 2]] * 24},
     {"depth": 6, "full_idxs": [5], "hidden_size": [64] * 6, "a_ids": [*range(6)], "spans": [[1, 2]] * 6}),
    ({"use_layers": [True, False], "sizes": [7, 8]}, {"use_layers": [True, False], "sizes": [7, 8]}),
    ({"depth": 9, "per_layer_config": {"1": {"hidden_size": 4096}, "2": {"hidden_size": 4096}}},
     {"depth": 2, "per_layer_config": {"1": {"hidden_size": 64}}}),
    ({"head_dim": 128, "rope_parameters": {"mrope_section": [30, 1, 1], "partial_rotary_factor": 0.5}},
     {"head_dim": 32, "rope_parameters": {"mrope_section": [6, 1, 1], "partial_rotary_factor": 0.5}}),
    ({"head_dim": 64, "qk_rope_head_dim": 64, "rope_scaling": {"type": "yarn", "long_factor": [*range(48)]}},
     {"head_dim": 8, "qk_rope_head_dim": 8, "rope_scaling": {"type": "yarn", "long_factor": [*range(4)]}}),
    ({"rope_parameters": {"full": rope("dynamic", factor=2.0), "sliding": rope("longrope", **LONGROPE)}},
     {"rope_parameters": {
         "full": rope("dynamic", factor=2.0, original_max_position_embeddings=48),
         "sliding": rope("longrope", long_factor=LONGROPE["long_factor"][:8], original_max_position_embeddings=48)}}),
    ({"hidden_size": 4096, "sliding_window": 4096, "vocab_size": 151936, "pad_token_id": 151643},
     {"hidden_size": 64, "sliding_window": 24, "vocab_size": 96, "pad_token_id": 0}),
    *(({"n_head": 32, "num_key_value_heads": shared}, {"n_head": 4, "num_key_value_heads": small})
      for shared, small in {32: 4, 8: 2, 1: 1}.items()),
    ({"n_head": 32, "expand": 2, "head_dim": 64}, {"n_head": 8, "expand": 2, "head_dim": 16}),
    ({"n_head": 32, "state_size": 16}, {"n_head": 4, "state_size": 16}),
    ({"n_ctx": 32768, "rope_scaling": {"type": "dynamic"}},
     {"n_ctx": 48, "rope_scaling": {"type": "dynamic", "original_max_position_embeddings": 48}}),
    ({"n_ctx": 32768, "patch_size": 14, "window_size": 112, "quantization_config": {"hidden_size": 8}},
     {"n_ctx": 512, "patch_size": 14, "window_size": 112, "quantization_config": {"hidden_size": 8}}),
    ({"compress_rates": {"a": 4, "b": 128}, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "moe_k": 8},
     {"compress_rates": {"a": 4, "b": 8}, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_k": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "small"), SHRUNK)
def test_each_key_shrinks_by_its_rule(config, small):
    """Layers named by index stay ones that exist; lists keep entries of the kept layers."""
    assert small == shrink_config(config)


@given(st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear_attention"]), min_size=3, max_size=14))
def test_a_small_copy_keeps_each_kind_of_layer_and_their_order(layers):
    small = shrink_config({"num_hidden_layers": len(layers), "layer_types": layers})

    kept = small["layer_types"]
    assert layers[: len(kept)] == kept
    assert set(layers) == set(kept)
    assert len(kept) == small["num_hidden_layers"]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.booleans())
def test_a_row_is_read_off_positions_that_restart(lengths, four_rows):
    """The samples that were packed; padded batches and three rows with a mask are no row."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    row = read_row(positions.expand(4, 1, -1) if four_rows else positions)

    assert tuple(lengths) == row.lengths
    assert [sum(lengths[:i]) for i, length in enumerate(lengths) for _ in range(length)] == row.starts_by_token.tolist()
    assert read_row(positions.expand(3, 1, -1), torch.ones(1, 1)) is read_row(positions.expand(2, -1)) is None
    assert read_row(positions, torch.arange(sum(lengths))[None] == 0) is None or sum(lengths) == 1, "padding"
    with pytest.raises(PackplanError, match="need the text positions as their first row"):
        read_row(positions.expand(3, 1, -1))


def test_layers_that_are_computed_again_have_the_row_of_their_own_forward_pass():
    """Under checkpointing, with two rows under way at a time."""

    def gradients(*, checkpointed):
        model = SmallModels(default_config("lfm2")).build(attention="sdpa")
        set_attention(model, AttentionChoice("varlen", split=("Lfm2ShortConv",), keeps_rows=True))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        drawn = [probe_row.ProbeRow.draw(model, lengths, ids=range(16, 96)) for lengths in ((9, 21), (4, 11, 15))]
        losses = [model(**row.packed.inputs).logits.square().mean() for row in drawn]
        torch.autograd.backward(losses[0])
        torch.autograd.backward(losses[1])
        functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
        assert {one.args[0].func for one in functions if one} == ({checkpoint} if checkpointed else set()), "once"
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    plain, again = gradients(checkpointed=False), gradients(checkpointed=True)

    assert plain.keys() == again.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(again[name], expected, msg=name)


def test_what_lost_its_row_is_an_error():
    """A split layer outside of its model, and a forward pass put back: both would leak."""
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    run_by_sample(layer, ["Linear"])
    model = SmallModels(default_config("gpt_oss")).build(attention="eager")
    set_attention(model, AttentionChoice("varlen", native="eager", keeps_rows=True))
    row = probe_row.ProbeRow.draw(model, (5, 9), ids=range(16, 96))
    model(**row.packed.inputs)
    for module in model.modules():
        vars(module).pop("forward", None)

    with pytest.raises(PackplanError, match="outside of its model"):
        layer(torch.ones(1, 3, 2))
    with pytest.raises(PackplanError, match="outside of its model"):
        model(**row.packed.inputs)


def loaded(config, precision="bfloat16"):
    """Return a small model in some precision, as a run has it."""
    model = SmallModels(config).build(attention="sdpa").to(getattr(torch, precision)).train()
    set_attention(model, AttentionChoice("varlen"))
    return model


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_the_loaded_model_is_asked_and_left_as_it_was(precision):
    """In its own precision, without dropout, which is no difference between samples."""
    model = loaded(default_config("llama"), precision)
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.5))
    name = model.config._attn_implementation

    measured = probe_ready_model(model, native="sdpa", named="auto")

    assert 0 == measured.isolation
    assert measured.equality < difference_limit(model)
    assert model.training
    assert name == model.config._attn_implementation
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "lfm2_moe"])
@pytest.mark.parametrize(("precision", "most"), {"float32": 4e-5, "float16": 0.13, "bfloat16": 0.17}.items())
def test_two_right_ways_to_compute_a_model_are_within_the_limit(family, precision, most):
    """Eager attention and sdpa round at other places, and experts are then chosen otherwise."""
    model = SmallModels(default_config(family)).build(attention="eager").to(getattr(torch, precision)).eval()
    samples = probe_row.ProbeRow.draw(model, probe_row.LOADED_LENGTHS, ids=range(16, 96)).samples
    eager = run_alone(model, samples, with_gradients=False)
    model.set_attn_implementation("sdpa")

    apart = compare(run_alone(model, samples, with_gradients=False), eager, median=experts_may_differ(model))

    assert 0 < max(apart.logits) < difference_limit(model) < most


@pytest.mark.parametrize(
    ("fault", "says"),
    {
        "a leak too small for 16 bits": "gradients pass between samples",
        "another result under our attention": "differ from the same samples alone",
    }.items(),
)
def test_a_loaded_model_is_refused_with_the_numbers(fault, says):
    """By a gradient that rounding hides in logits; by samples under transformers' attention."""
    with pytest.raises(ModelError, match=says):
        probe_ready_model(loaded(faulty(fault)), native="sdpa", named="auto")


@pytest.fixture
def changed_run(demo, write_run, tmp_path):
    """Return a function that copies a model with another config.json, and gives its run."""

    def write(**keys):
        shutil.copytree(demo / "models" / "qwen2", tmp_path / "model", dirs_exist_ok=True)
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
        return read_config(write_run("qwen2", model={"model": str(tmp_path / "model")}, training={"max_steps": 1}))

    return write


def test_a_second_start_asks_nothing(changed_run):
    """Neither the small copy nor the loaded model; another config.json does."""
    config = changed_run()
    prepare(config, OneRank())
    store_verdict(config, attrs.evolve(load_verdict(config), reason="of the first start"))

    prepare(config, OneRank())

    again = load_verdict(config)
    assert ("of the first start", ("cpu, float32",)) == (again.reason, again.loaded_on)
    assert load_verdict(changed_run(rms_norm_eps=1e-5)) is None


def test_a_loaded_model_that_leaks_ends_the_run_before_its_first_step(changed_run):
    """With the numbers, whatever its small copy showed."""
    verdict = probe_unless_stored(changed_run())
    leaking = changed_run(rope_parameters=rope("dynamic", factor=2.0), max_position_embeddings=16)
    store_verdict(leaking, verdict)

    with pytest.raises(ModelError, match=r"the loaded model was tested \(cpu, float32\): packed samples differ"):
        prepare(leaking, OneRank())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 3}, "layer"),
        ({"model_type": "nothing_that_is_known"}, "nothing_that_is_known"),
        ({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "model.trust_remote_code: true"),
        ({"model_type": "bloom"}, "gradients pass between samples"),
    ],
    ids=["lies", "unknown", "code", "leaks"],
)
def test_a_model_that_cannot_be_asked_or_leaks_is_refused_before_measuring(write_run, tmp_path, capfd, content, says):
    """By training and by building; exit status 2, with the reason and the remedy."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    path = write_run(model={"model": str(tmp_path)})

    for command in (sft.main, lambda arguments: plan.main(["build", *arguments])):
        assert 2 == command([str(path)])
        assert says in capfd.readouterr().err
    assert not list(tmp_path.rglob("lengths*"))


def test_a_configuration_of_more_layers_than_the_weights_have_is_refused(changed_run, tmp_path):
    """Before it is asked: what trains would be random numbers, in part."""
    config, file = changed_run(num_hidden_layers=4, layer_types=["full_attention"] * 4), "model/model.safetensors"

    with pytest.raises(ConfigError, match=r"config\.json has 4 layers \(num_hidden_layers\), but the weights have 2"):
        require_packing_model(config)
    weights = load_file(tmp_path / file)
    more = {
        name.replace(f"layers.{n}", f"layers.{n + 2}"): one.clone() for name, one in weights.items() for n in (0, 1)
    }
    save_file(weights | more, tmp_path / file)
    assert require_packing_model(config).passes
    (tmp_path / file).write_bytes(b"\xff" * 64)
    (tmp_path / "model" / "config.json").write_text(
        (tmp_path / "model" / "config.json").read_text().replace("1e-06", "1e-05")
    )
    with pytest.raises(ConfigError, match=r"model\.safetensors, which is truncated, or is not a weight file"):
        require_packing_model(config)


def test_a_run_needs_a_verdict_where_it_packs_or_its_attention_follows_from_it():
    for packing, backend, needs in ((True, "sdpa", True), (False, AUTO, True), (False, "sdpa", False)):
        assert needs == needs_verdict(parsed({"model.attn_impl": backend}, packing=packing))


def test_families_are_listed(capsys):
    """With their strategies, or why they do not pack; a name that is none is an error."""
    assert 0 == models.main(["families", "--names", "llama", "bloom"])
    found = capsys.readouterr().out
    assert "llama: varlen: " in found
    assert "bloom: does not pack: gradients pass" in found
    assert 2 == models.main(["families", "--names", "nope"])
    assert "nope: no such family" in capsys.readouterr().err


def test_each_backend_is_one_of_transformers_or_ours():
    """`flash_attn` is ms-swift's word for what is installed."""
    of_transformers = {*ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager", "flash_attn"}
    assert {AUTO, VARLEN} == {*BACKENDS} - of_transformers, "a backend of one's own is tried here: add its trial"


def test_probes_draw_no_token_that_a_configuration_names():
    config = LlamaConfig(vocab_size=6, pad_token_id=0, bos_token_id=1, eos_token_id=4)
    assert [2, 3, 5] == ordinary_token_ids(config)
