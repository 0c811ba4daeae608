"""A model packs if a probe shows it: every kind of family, planted faults, verdicts."""

import json
from functools import wraps

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from packplan.adapters.attention import layout, set_attention, varlen
from packplan.adapters.attention.rows import read_row, split_states
from packplan.adapters.probe import rows
from packplan.adapters.probe.probe import probe_config
from packplan.adapters.probe.rows import probe_loaded
from packplan.adapters.probe.shrink import LONGEST, shrink
from packplan.adapters.probe.small_model import SmallModels
from packplan.adapters.proof.comparison import compare, difference_limit, experts_may_differ, run_alone
from packplan.adapters.ranks.torch_group import OneRank
from packplan.app import sft
from packplan.app.plan import __main__ as plan
from packplan.app.wiring import verdicts
from packplan.app.wiring.runs import read_config
from packplan.core.equality import AUTO, BACKENDS, EQUALITY_LIMITS, VARLEN, AttentionChoice
from packplan.core.errors import ModelError, PackplanError
from tests.e2e.ready import train
from tests.e2e.test_proof import BackwardLeak
from tools import models
from tools.families import default_config, probe_family

pytestmark = pytest.mark.slow

PASSING = {
    "mamba": ("varlen", ("MambaMixer",)),
    "rwkv": ("own", ("RwkvFeedForward", "RwkvSelfAttention")),
    "deepseek_v32": ("own", ()),
    "gptj": ("own", ()),
    "qwen3_vl_moe": ("varlen", ()),
    "minicpmv4_7": ("varlen", ("Qwen3_5GatedDeltaNet",)),
}
"""Family -> its strategy, and the layers that run sample by sample."""


@pytest.mark.parametrize("family", PASSING)
def test_families_of_every_kind_pack(family):
    verdict = probe_family(family)

    assert PASSING[family] == (verdict.strategy, verdict.split), verdict.reason
    assert 0 == verdict.measured.isolation
    assert verdict.measured.equality <= EQUALITY_LIMITS["float32"] / 4
    assert () == verdict.not_exercised


@pytest.mark.parametrize("family", ["bloom", "xglm", "deepseek_v4"])
def test_families_that_leak_are_refused_with_the_numbers(family):
    verdict = probe_family(family)

    assert not verdict.passes
    assert verdict.measured.isolation > 0
    assert f"{verdict.measured.isolation:.2g}" in verdict.reason


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def test_rotary_parameters_of_each_kind_of_layer_shrink_as_they_do_alone():
    """None is left out: its factors may follow the row."""
    longrope = rope("longrope", long_factor=[1.0] * 48)
    kinds = {"full_attention": rope("dynamic", factor=2.0), "sliding_attention": longrope}

    def small(rope_parameters):
        return shrink({"model_type": "any", "rope_parameters": rope_parameters})["rope_parameters"]

    assert {kind: small(alone) for kind, alone in kinds.items()} == small(kinds)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(rope_parameters=rope("dynamic", factor=2.0)),
        Phi3Config(
            rope_parameters=rope(
                "longrope", short_factor=[1.0] * 48, long_factor=[1.0 + 0.5 * i for i in range(48)],
                original_max_position_embeddings=4096,
            ),
            max_position_embeddings=131072,
        ),
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_rotary_factors_that_follow_the_row_are_refused_with_the_numbers(config):
    """No gradient passes, and yet a sample beside a long one is another."""
    verdict = probe_config(config)

    assert not verdict.passes
    assert 0 == verdict.measured.isolation
    assert verdict.measured.equality > 1e-2
    assert "differ from themselves alone" in verdict.reason


def one_block(_, *, length, **__):
    """Read a row as one sample."""
    return layout.Layout(torch.tensor([0, length]), is_causal=True)


@pytest.fixture
def let_llama(monkeypatch):
    """Return a function that changes the hidden states that Llama computes."""
    plain = modeling_llama.LlamaModel.forward

    def compute(change):
        def forward(self, *arguments, **options):
            found = plain(self, *arguments, **options)
            found.last_hidden_state = change(found.last_hidden_state)
            return found

        monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)

    return compute


def leak_beyond(reach):
    """Let each token know of the one that is so many tokens before it."""
    return lambda seen: torch.cat([seen[:, :reach], seen[:, reach:] + 1e-3 * seen[:, :-reach]], 1)


@pytest.mark.parametrize("leak", [leak_beyond(64), BackwardLeak.apply])
def test_a_leak_in_the_model_is_refused(let_llama, leak):
    """One that short rows do not show, and one that no logit shows."""
    let_llama(leak)

    verdict = probe_family("llama")

    assert not verdict.passes
    assert verdict.measured.isolation > 0


def test_a_blind_probe_proves_nothing(let_llama):
    """A model whose logits do not depend on what it reads."""
    let_llama(lambda seen: seen * 0)

    verdict = probe_family("llama")

    assert not verdict.passes
    assert "nothing can be said" in verdict.reason


def test_a_window_that_is_ignored_is_refused(monkeypatch):
    """Samples are apart, and see more than they do alone; the model's own mask is taken instead."""
    plain = layout.read_layout
    monkeypatch.setattr(varlen, "read_layout", lambda *a, **o: plain(*a, **{**o, "window": None}))
    monkeypatch.setattr(layout, "sdpa_mask", None)  # unless the window is read off the mask itself
    monkeypatch.setattr(layout, "_is_causal_within", lambda *_: True)

    by_name, chosen = (probe_config(default_config("mistral"), attn_impl=name) for name in ("varlen", "auto"))

    assert not by_name.passes
    assert 0 == by_name.measured.isolation
    assert by_name.measured.equality > 1e-3
    assert "own" == chosen.strategy


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_positions_that_go_on_or_lack_a_row_are_refused(monkeypatch, family):
    """As a collator or a hook might hand them over."""
    plain = rows.ProbeRow.draw

    def draw(*arguments, **options):
        row = plain(*arguments, **options)
        positions = row.packed.inputs["position_ids"]
        wrong = positions[1:] if len(positions) == 4 else torch.arange(positions.shape[-1])[None]
        return attrs.evolve(row, packed=attrs.evolve(row.packed, inputs={**row.packed.inputs, "position_ids": wrong}))

    monkeypatch.setattr(rows.ProbeRow, "draw", draw)

    verdict = probe_family(family)

    assert not verdict.passes
    assert verdict.measured is None or verdict.measured.isolation > 0


@pytest.mark.parametrize("family", ["qwen3_vl", "minicpmv4_6", "qwen2_5_omni_thinker"])
def test_images_that_see_each_other_are_refused(monkeypatch, family):
    """A leak in the tower, of whole images or patches in a line; rows of text would not show it."""
    kind = type(SmallModels(default_config(family)).build(attention="sdpa"))
    plain = kind.get_image_features

    @wraps(plain)
    def blurred(*arguments, **options):
        found = plain(*arguments, **options)
        features = found.pooler_output
        mean = (torch.cat(list(features)) if isinstance(features, (tuple, list)) else features.flatten(0, -2)).mean(0)
        found.pooler_output = [one + 1e-3 * mean for one in features]
        return found

    monkeypatch.setattr(kind, "get_image_features", blurred)

    verdict = probe_config(default_config(family), attn_impl="varlen")

    assert not verdict.passes
    assert verdict.measured.isolation > 0


def test_what_stands_after_a_layer_stands_after_one_that_is_there():
    """And before another one; in a part, and beside parts; what counts from the end stays."""
    sizes = {
        "insert_layer_id": 6, "select_layer_id": -2,
        "vision_config": {"num_hidden_layers": 27, "insert_layer_id": 6},
        "text_config": {"num_hidden_layers": 24, "layer_types": ["linear"] * 3 + ["full"] + ["linear"] * 20},
    }  # fmt: skip

    small = shrink(sizes)

    assert (0, -2) == (small["insert_layer_id"], small["select_layer_id"])
    assert {"num_hidden_layers": 2, "insert_layer_id": 0} == small["vision_config"]
    assert 4 == small["text_config"]["num_hidden_layers"]


kinds = st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear_attention"]), min_size=3, max_size=14)


@given(kinds, st.integers(512, 8192), st.sampled_from([(32, 32), (32, 8), (16, 1)]))
def test_a_small_copy_keeps_each_kind_of_layer_and_their_order(layers, hidden, heads):
    """And whether heads share keys; what is long becomes shorter than a sample."""
    config = {
        "model_type": "any", "hidden_size": hidden, "num_hidden_layers": len(layers), "layer_types": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "sliding_window": hidden,
        "vocab_size": 151936, "pad_token_id": 151643, "rope_parameters": rope("default"),
    }  # fmt: skip

    small = shrink(config)

    kept = small["layer_types"]
    assert layers[: len(kept)] == kept
    assert set(layers) == set(kept)
    assert len(kept) == small["num_hidden_layers"]
    assert small["sliding_window"] < LONGEST / 2
    assert small["pad_token_id"] < small["vocab_size"] <= 128
    shared = (small["num_attention_heads"] == small["num_key_value_heads"], small["num_key_value_heads"] == 1)
    assert (heads[0] == heads[1], heads[1] == 1) == shared


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_a_row_is_read_off_positions_that_restart(lengths, four_rows):
    """The samples that were packed; padded batches and three rows of positions are no row."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    some = positions.expand(4, 1, -1) if four_rows else positions

    row = read_row(some)

    assert tuple(lengths) == row.lengths
    assert [sum(lengths[:i]) for i, length in enumerate(lengths) for _ in range(length)] == row.first.tolist()
    assert (
        read_row(positions.expand(3, 1, -1), torch.ones(1, 1))
        is read_row(positions.expand(2, -1))
        is read_row(None)
        is None
    )


def test_layers_that_are_computed_again_have_the_row_of_their_own_forward_pass():
    """Under checkpointing, with two rows under way at a time."""

    def gradients(*, checkpointed):
        model = SmallModels(default_config("lfm2")).build(attention="sdpa")
        set_attention(model, AttentionChoice("varlen", split=("Lfm2ShortConv",), follows_rows=True))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        drawn = [rows.ProbeRow.draw(model, lengths, ids=range(16, 96)) for lengths in ((9, 21), (4, 11, 15))]
        losses = [model(**row.packed.inputs).logits.square().mean() for row in drawn]
        torch.autograd.backward(losses[0])
        torch.autograd.backward(losses[1])
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    plain, again = gradients(checkpointed=False), gradients(checkpointed=True)

    assert plain.keys() == again.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(again[name], expected, msg=name)


def test_what_lost_its_row_is_an_error():
    """A split layer outside of its model, and a forward pass put back: both would leak."""

    class Mixer(torch.nn.Linear):
        pass

    layer = torch.nn.Sequential(Mixer(2, 2))
    split_states(layer, ["Mixer"])
    model = SmallModels(default_config("gpt_oss")).build(attention="eager")
    set_attention(model, AttentionChoice("varlen", native="eager", follows_rows=True))
    row = rows.ProbeRow.draw(model, (5, 9), ids=range(16, 96))
    model(**row.packed.inputs)
    del model.forward

    with pytest.raises(PackplanError, match="outside of its model"):
        layer(torch.ones(1, 3, 2))
    with pytest.raises(PackplanError, match="outside of its model"):
        model(**row.packed.inputs)


def loaded(family, *, attention="varlen", precision="bfloat16"):
    """Return a small model of a family in some precision, as a run has it."""
    model = SmallModels(default_config(family)).build(attention="sdpa").to(getattr(torch, precision)).train()
    set_attention(model, AttentionChoice(attention))
    return model


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_the_loaded_model_is_asked_and_left_as_it_was(precision):
    """In its own precision, without dropout, which is no difference between samples."""
    model = loaded("llama", precision=precision)
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.5))
    name = model.config._attn_implementation

    measured = probe_loaded(model, native="sdpa", named="auto")

    assert 0 == measured.isolation
    assert measured.equality < difference_limit(model)
    assert model.training
    assert name == model.config._attn_implementation
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "lfm2_moe"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_two_right_ways_to_compute_a_model_are_within_the_limit(family, precision):
    """Eager attention and sdpa round at other places, and experts are then chosen otherwise."""
    model = SmallModels(default_config(family)).build(attention="eager").to(getattr(torch, precision)).eval()
    samples = rows.ProbeRow.draw(model, rows.LOADED_LENGTHS, ids=range(16, 96)).samples
    eager = run_alone(model, samples, with_gradients=False)
    model.set_attn_implementation("sdpa")

    apart = compare(run_alone(model, samples, with_gradients=False), eager, typical=experts_may_differ(model))

    most = {"float32": 4e-5, "float16": 0.13, "bfloat16": 0.17}[precision]
    assert 0 < max(apart.logits) < difference_limit(model) < most


def test_a_leak_too_small_for_16_bits_is_refused_by_its_gradient(let_llama):
    """Of a thousandth, which rounding hides in logits."""
    let_llama(leak_beyond(17))

    with pytest.raises(ModelError, match="gradients pass between samples"):
        probe_loaded(loaded("llama"), native="sdpa", named="auto")


@pytest.fixture
def execute():
    """Return a function that trains in this process, and finds no verdict of other tests."""
    return lambda path: train(read_config(path), OneRank())


def test_a_second_start_asks_nothing(write_run, execute, monkeypatch):
    """Neither the small copy nor the loaded model; another config.json does."""
    one_step = {"max_steps": 1}
    path = write_run("qwen3", training=one_step)
    verdicts._probe_once.cache_clear()
    execute(path)
    stored = json.loads((path.parent / "run" / "static_packing" / "verdict.json").read_text())
    asked = []
    monkeypatch.setattr(verdicts, "probe_config", lambda *a, **o: asked.append("small") or probe_config(*a, **o))
    monkeypatch.setattr(verdicts, "probe_loaded", lambda *a, **o: asked.append("loaded") or probe_loaded(*a, **o))
    verdicts._probe_once.cache_clear()
    execute(path)

    assert [] == asked
    assert ["cpu, float32"] == stored["verdict"]["loaded_on"]
    execute(write_run("qwen3", model={"attn_impl": "eager"}, training=one_step))
    assert ["small", "loaded"] == asked


def test_a_loaded_model_that_leaks_ends_the_run_before_its_first_step(write_run, execute, monkeypatch):
    """With the numbers, and nothing trained."""

    def leaking(model, **options):
        monkeypatch.setattr(varlen, "mask_within_samples", None)
        monkeypatch.setattr(varlen, "read_layout", one_block)
        return probe_loaded(model, **options)

    monkeypatch.setattr(verdicts, "probe_loaded", leaking)

    with pytest.raises(ModelError, match=r"the loaded model \(cpu, float32\) was asked, and gradients pass"):
        execute(write_run("qwen3"))


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
