"""A model that computes no padding gives what it gives with padding, at every real token."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoProcessor,
)

from packplan.adapters.hf.packed_calls import TextStack
from packplan.core.errors import ArgumentError, ModelError, PackplanError
from packplan.hf import unpad
from tests.e2e import unpad_rank
from tests.e2e.unpad_rank import POSITIONS, ROWS, batch_of, build, padded
from tests.made.vision_models import VISION_FAMILIES, write_vision_model
from tests.processes import finished

pytestmark = pytest.mark.slow


def computed(model, batch, **options):
    """Return outputs and gradients of a batch."""
    model.zero_grad()
    outputs = model(**batch, **options)
    outputs.loss.backward()
    return outputs, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_same(model, hooks, batch, **options):
    """A batch has the same results at real tokens, loss and gradients, with and without hooks."""
    calls = hooks.counts.calls
    found, gradients = computed(model, batch, **options)
    assert calls + 1 == hooks.counts.calls
    with hooks.paused():
        due, expected = computed(model, batch, **options)
    own = batch["attention_mask"].bool()
    torch.testing.assert_close(found.loss, due.loss, atol=2e-6, rtol=2e-6)
    if found.logits.shape[:2] == own.shape:
        torch.testing.assert_close(found.logits[own], due.logits[own], atol=2e-5, rtol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, one in gradients.items():
        torch.testing.assert_close(
            one, expected[name], atol=2e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    return found, due


@cache
def hooked(family: str = "qwen2"):
    model = build(family)
    return model, unpad(model)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["qwen2", "gpt2"]),
)
def test_any_mask_gives_the_padded_results_at_real_tokens_and_zeros_elsewhere(mask, family):
    """Rows may be padded left, right, in between, wholly, or not at all."""
    model, hooks = hooked(family)
    own = torch.tensor(mask).bool()
    is_packed = not own.all() and own.any()
    event(f"packed: {is_packed}; a row of zeros: {bool((~own).all(1).any())}")
    batch = {"input_ids": batch_of(mask)["input_ids"], "attention_mask": own.long()}
    calls = hooks.counts.calls

    with torch.no_grad():
        found = model.base_model(**batch).last_hidden_state
        with hooks.paused():
            due = model.base_model(**batch).last_hidden_state

    assert int(is_packed) == hooks.counts.calls - calls
    torch.testing.assert_close(found[own], due[own], atol=2e-5, rtol=1e-5)
    assert not is_packed or not found[~own].any()


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "gemma3_text", "qwen3_moe", "qwen3_5_text"])
def test_a_family_trains_the_same(family):
    """Absolute positions, windows, experts and states along the row included."""
    model = build(family)
    hooks = unpad(model)

    assert_same(model, hooks, batch_of(padded()))
    if family != "qwen3_5_text":  # its own padded pass carries states over padding in between
        assert_same(model, hooks, batch_of(padded() * (torch.arange(POSITIONS) % 5 != 3)))


def test_rows_are_apart_where_positions_go_on_from_one_to_the_next():
    """A model that finds samples by positions alone computes such a batch padded."""
    model = build("gptj", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    hooks = unpad(model)
    columns = torch.arange(POSITIONS)[None]
    batch = batch_of(torch.cat([columns < 9, columns >= 9]).long())
    calls = hooks.counts.calls

    found, _ = computed(model, batch)
    with hooks.paused():
        due, _ = computed(model, batch)

    assert calls == hooks.counts.calls
    torch.testing.assert_close(found.loss, due.loss)
    assert_same(model, hooks, batch_of(padded()))


def test_positions_of_the_caller_are_kept():
    """Trainers count positions as they like; rows that are packed already pass through."""
    model, hooks = hooked("gpt2")
    batch = batch_of(padded())
    counted = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)

    assert_same(model, hooks, batch | {"position_ids": counted})
    calls = hooks.counts.calls
    model(**batch, position_ids=counted % 7)

    assert calls == hooks.counts.calls


def test_embeddings_and_all_hidden_states_are_put_back():
    """A caller that embeds tokens itself reads every layer where the padded pass has it."""
    model, hooks = hooked()
    batch = batch_of(padded())
    own = batch["attention_mask"].bool()
    embedded = {**batch, "inputs_embeds": model.get_input_embeddings()(batch.pop("input_ids")).detach()}
    embedded.pop("input_ids")

    found, due = assert_same(model, hooks, embedded, output_hidden_states=True)

    for mine, other in zip(found.hidden_states, due.hidden_states, strict=True):
        torch.testing.assert_close(mine[own], other[own], atol=2e-5, rtol=1e-5)


def test_the_auxiliary_loss_of_experts_is_that_of_the_padded_pass():
    """Scores of routers go back too, where the mask leaves padding out."""
    model = build("qwen3_moe", router_aux_loss_coef=0.5)
    hooks = unpad(model)

    found, due = assert_same(model, hooks, batch_of(padded()), output_router_logits=True)

    assert 0 < due.aux_loss.item()
    torch.testing.assert_close(found.aux_loss, due.aux_loss)


@pytest.mark.parametrize("family", ["qwen2", "xlm-roberta", "modernbert"])
def test_heads_that_pool_read_the_same(family):
    """Rewards and classes, of models that read one way or both."""
    model = build(family, AutoModelForSequenceClassification, num_labels=2)
    model.config.architectures = [type(model).__name__]  # as of a checkpoint
    hooks = unpad(model)
    batch = batch_of(padded(left=(0, 0, 0, 0))) | {"labels": torch.tensor([0, 1, 1, 0])}

    found, due = assert_same(model, hooks, batch)

    torch.testing.assert_close(found.logits, due.logits, atol=2e-6, rtol=1e-5)


def test_logits_of_padding_are_left_out_on_request():
    """The loss and its gradients are the same, and in training logits have real tokens alone."""
    model = build("qwen2")
    hooks = unpad(model, logits=False)
    batch = batch_of(padded())
    model.train()

    found, _ = assert_same(model, hooks, batch)

    assert (1, int(batch["attention_mask"].sum())) == found.logits.shape[:2]
    assert (ROWS, POSITIONS) == model.eval()(**batch).logits.shape[:2]


@pytest.mark.parametrize("kind", [AutoModelForTokenClassification, AutoModelForCausalLM])
def test_only_labels_of_next_tokens_are_packed(kind):
    """Another loss, a choice of logits, and calls that pass through keep all logits."""
    model = build("qwen3_5_text" if kind is AutoModelForCausalLM else "qwen2", kind, classifier_dropout=0.0)
    hooks = unpad(model, logits=False)
    model.train()
    batch = batch_of(padded(left=(0, 0, 0, 0)))
    if kind is AutoModelForTokenClassification:
        batch["labels"] = batch["labels"].clamp(max=1)
        found, _ = assert_same(model, hooks, batch)
        assert (ROWS, POSITIONS) == found.logits.shape[:2]
        return
    between = batch_of(padded() * (torch.arange(POSITIONS) % 5 != 3))
    for one in (between, batch | {"logits_to_keep": torch.arange(POSITIONS)}):
        assert (ROWS, POSITIONS) == model(**one).logits.shape[:2]


def test_a_model_under_autocast_is_probed_by_its_rounding():
    """As accelerate wraps a trainer's reference model in 16 bits, whose weights are float32."""
    model = build("qwen2")
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    hooks = unpad(model)

    model(**batch_of(padded()))
    assert hooks.counts.calls


def test_a_copy_is_refused_by_name():
    """It would run by the hooks, and perhaps the weights, of the model that was copied."""
    model = build("qwen2")
    hooks = unpad(model)
    copied = copy.deepcopy(model)

    with pytest.raises(PackplanError, match="copy"):
        copied(**batch_of(padded()))

    assert_same(model, hooks, batch_of(padded()))


def test_generation_passes_through():
    """Answers are those of the model, also in the middle of training."""
    model, hooks = hooked()
    batch = batch_of(padded(right=(0, 0, 0, 0)))
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    calls = hooks.counts.calls

    answers = model.train().generate(**given, max_new_tokens=4, do_sample=False)

    assert (ROWS, POSITIONS + 4, calls) == (*answers.shape, hooks.counts.calls)
    assert torch.equal(answers, model.generate(**given, max_new_tokens=4, do_sample=False, use_cache=False))
    assert calls + 4 == hooks.counts.calls  # without a cache, each pass is packed
    model.eval()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_and_checkpointing(checkpointing):
    """Hooks lie inside of adapters, and layers are computed again from the packed row."""
    model = get_peft_model(build("qwen2"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    hooks = unpad(model)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()

    assert_same(model, hooks, batch_of(padded()))


def test_threads_share_a_model():
    """Each has its own batch, whichever call ends first."""
    model, hooks = hooked()
    batches = [batch_of(padded()), batch_of(padded(left=(0, 0, 0, 0)))] * 4

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda batch: model(**batch).loss, batches))

    with hooks.paused():
        torch.testing.assert_close(found, [model(**batch).loss for batch in batches])


def test_a_removed_hook_leaves_the_model_alone():
    """After `remove`, and after a call that failed, the model computes padding as before."""
    model = build("qwen2")
    hooks = unpad(model)
    batch = batch_of(padded())
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"] + 10_000, attention_mask=batch["attention_mask"])
    assert_same(model, hooks, batch)
    calls = hooks.counts.calls

    with pytest.raises(ArgumentError, match="already"):
        unpad(model)
    hooks.remove()
    model(**batch)

    assert calls == hooks.counts.calls


def shared_out():
    """Return a model whose weights are named as those of DeepSpeed's ZeRO 3 are."""
    model = build("qwen2")
    next(model.parameters()).ds_id = 0
    return model


REFUSED = {
    "prefix": lambda: get_peft_model(build("qwen2"), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    "bloom": lambda: build("bloom"),
    "DeepSpeed": shared_out,
    "gpt2 attends to an encoder": lambda: build("gpt2", add_cross_attention=True),
    "t5 attends to an encoder": lambda: build("t5", AutoModelForSequenceClassification, d_model=32, num_layers=1),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_packed_is_refused_by_name(named):
    model = REFUSED[named]()

    with pytest.raises(ModelError, match=named):
        unpad(model)

    assert not any(module._forward_pre_hooks for module in model.modules())


FAULTS = {
    "order": lambda given, tokens: {"input_ids": tokens.take(given["input_ids"]).flip(1)},
    "positions": lambda _, tokens: {"position_ids": torch.arange(len(tokens.places))[None]},
    "mask": lambda given, tokens: {
        "attention_mask": tokens.take(given["attention_mask"]) * (tokens.restarting_positions != 1)
    },
}
"""Fault -> arguments of the packed call in its place."""


@pytest.mark.parametrize("fault", [*FAULTS, "shifted"])
def test_a_fault_of_the_hook_is_found_by_its_probe(fault, monkeypatch):
    """Tokens in another order, positions that go on, a mask, and shifted results are refused."""
    if fault == "shifted":
        back = TextStack.put_back

        def shift(self, output, tokens, *, keep):
            output = back(self, output, tokens, keep=keep)
            output["last_hidden_state"] = output["last_hidden_state"].roll(1, 1)
            return output

        monkeypatch.setattr(TextStack, "put_back", shift)
    else:
        pack, wrong = TextStack.pack, FAULTS[fault]
        monkeypatch.setattr(TextStack, "pack", lambda *call: pack(*call) | wrong(*call[1:]))

    with pytest.raises(ModelError, match="padded rows cannot be packed"):
        unpad(build("gpt2"))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_model_that_sees_trains_the_same(family, side, tmp_path):
    """Images keep their tokens, positions and features, whichever side is padded."""
    write_vision_model(tmp_path, family, ["a red circle, a blue bar"] * 4, seed=0)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    hooks = unpad(model)

    assert_same(model, hooks, pictures_batch(AutoProcessor.from_pretrained(tmp_path), family, side))


def pictures_batch(processor, family: str, side: str):
    """Return a batch of rows with and without an image."""
    from PIL import Image

    processor.tokenizer.padding_side = side
    media = VISION_FAMILIES[family].media
    token = next(token for token, (key, _) in media.items() if key in {"image_token_id", "image_token_index"})
    images = [Image.new("RGB", (56 + 28 * number, 84), (40 * number, 100, 50)) for number in range(2)]
    texts = [token + "red " * 3, "blue " * 5, "circle " * 2 + token + " red" * 20]
    nested = [[images[0]], [], [images[1]]] if family == "internvl" else images
    batch = dict(processor(text=texts, images=nested, padding=True, return_tensors="pt"))
    return {**batch, "labels": batch_of(batch["attention_mask"])["labels"].clamp(max=200)}


def test_ranks_compute_the_same(server, tmp_path):
    """Under DDP and FSDP 2 with checkpointing, hooked before or after; on two ranks."""
    assert [0, 0] == finished(server.ranks(2, unpad_rank.main, str(tmp_path), folder=tmp_path))

    for rank in range(2):
        for name, (loss, gradients, share) in json.loads((tmp_path / f"found{rank}.json").read_text()).items():
            assert (True, True, True) == (loss < 1e-5, gradients < 1e-5, share < 1), name
