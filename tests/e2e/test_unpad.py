"""A model that computes no padding gives what it gives with padding, at every real token."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from io import BytesIO
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from peft import PrefixTuningConfig, get_peft_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoProcessor,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
)

from packplan.adapters.attention.packed_row import PackedRow, RealTokens, read_row
from packplan.adapters.hf.packed_calls import TextStack, log_once
from packplan.adapters.proof import first_calls
from packplan.core.errors import ArgumentError, ModelError, PackplanError
from packplan.hf import flatten, separate_samples, unpad
from tests.e2e import unpad_rank
from tests.e2e.unpad_rank import POSITIONS, ROWS, adapted, batch_of, build, computed, padded
from tests.processes import finished

pytestmark = pytest.mark.slow


def assert_same(model, hooks, batch, **options):
    """A batch has the same results at real tokens, loss and gradients, with and without hooks."""
    calls = hooks.counts.calls
    found, gradients = computed(model, batch, **options)
    assert calls + 1 == hooks.counts.calls
    with hooks.paused():
        due, expected = computed(model, batch, **options)
    torch.testing.assert_close(found.loss, due.loss, atol=2e-6, rtol=2e-6)
    assert due.keys() - found.keys() <= {"past_key_values", "cache"}
    for name in found.keys() - {"loss", "logits" if found.logits.shape != due.logits.shape else ""}:
        assert_same_values(found[name], due[name], batch["attention_mask"].bool())
    torch.testing.assert_close(gradients, expected, atol=2e-6, rtol=1e-4)
    return found, due


def assert_same_values(found, due, own):
    """Outputs of each token, of all layers or of each row are the same, but for padding."""
    if isinstance(found, dict):  # of images
        found, due = (tuple(one.values()) for one in (found, due))
    if isinstance(found, (tuple, list)):
        for one, other in zip(found, due, strict=True):
            assert_same_values(one, other, own)
    else:
        by_token = own if found.shape[:2] == own.shape else own.flatten() if found.shape[:1] == (own.numel(),) else ...
        torch.testing.assert_close(found[by_token], due[by_token], atol=2e-5, rtol=1e-5)


@cache
def hooked(family: str = "qwen2", *, logits: bool = True):
    model = build(family)
    return model, unpad(model, logits=logits)


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


BETWEEN = padded() * (torch.arange(POSITIONS) % 5 != 3)

CASES = {
    **{family: (partial(build, family), {}) for family in ("gpt2", "opt", "gemma3_text")},
    "all layers": (partial(build, "qwen2"), {"output_hidden_states": True, "use_cache": True}),
    "experts": (partial(build, "qwen3_moe", router_aux_loss_coef=0.5), {"output_router_logits": True}),
    "adapters, checkpointing": (lambda: adapted(build("qwen2")).train(), {}),
    "positions": (partial(build, "gpt2"), {"position_ids": (padded().cumsum(1) - 1).clamp(min=0)}),
}
"""Case -> model, and further arguments of its calls."""


@pytest.mark.parametrize("case", CASES)
def test_a_model_trains_the_same(case):
    """Absolute positions, the caller's, windows, experts with their loss, adapters, all layers."""
    make, options = CASES[case]
    model = make()
    hooks = unpad(model)

    assert_same(model, hooks, batch_of(padded()), **options)
    assert_same(model, hooks, batch_of(BETWEEN), **options)

    if case == "all layers":
        batch = batch_of(padded())
        embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach()
        assert_same(model, hooks, batch | {"inputs_embeds": embedded}, **options)


@pytest.mark.parametrize("family", ["qwen2", "bert", "albert", "xlm-roberta", "modernbert"])
def test_heads_that_pool_read_the_same(family):
    """Rewards and classes, of models that read one way or both."""
    model = build(family, AutoModelForSequenceClassification, num_labels=2)
    model.config.architectures = [type(model).__name__]  # as of a checkpoint
    hooks = unpad(model)

    batch = batch_of(padded(left=(0, 0, 0, 0)))
    assert_same(model, hooks, batch | {"labels": torch.tensor([0, 1, 1, 0])})
    del batch["labels"]
    found = model.base_model(**batch, return_dict=False)
    with hooks.paused():
        due = model.base_model(**batch, return_dict=False)
    assert_same_values(found, due[: len(found)], batch["attention_mask"].bool())


def test_masks_that_number_samples_are_of_packed_rows():
    """Values above 1 number the samples of a row; other values but 0 are real tokens."""
    stack, batch = TextStack(hooked()[0]), batch_of(padded())
    numbers = batch["attention_mask"] * (1 + torch.arange(POSITIONS) // 7)
    assert stack.find_real_tokens({**batch, "attention_mask": numbers}) is None
    for mask in (padded(), padded().bool(), padded() * 2.0):
        assert torch.equal(
            padded().flatten().nonzero()[:, 0], stack.find_real_tokens({**batch, "attention_mask": mask}).places
        )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 3))
def test_chunks_are_counted_from_the_start_of_each_sample(lengths, size, gap):
    """Chunks are those of the sample alone; columns of a padded batch count padding too."""
    ids = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    offsets = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.arange(len(ids))
    for columns, place in ((None, offsets), (7 + (1 + gap) * offsets, (1 + gap) * offsets)):
        row = PackedRow(ids, columns)

        found = row.same_chunk(size)(None, None, tokens[:, None], tokens[None])

        due = place[:, None] // size == place[None] // size
        within = ids[:, None] == ids[None]
        assert torch.equal(due[within], found[within])


def test_rows_that_are_packed_or_could_not_be_told_apart_pass_through():
    """A cache; positions that restart, or go on from row to row where they alone tell it."""
    model, hooks = hooked("gpt2")
    calls = hooks.counts.calls
    for sign in ({"position_ids": torch.arange(POSITIONS)[None] % 7}, {"past_key_values": DynamicCache()}):
        model(**batch_of(padded()), **sign)
        assert calls == hooks.counts.calls
    stack, keys = TextStack(model), torch.ones(ROWS, 4, 2, 8)
    for cached in (DynamicCache(), ((keys, keys),) * 2):  # whatever the version calls it
        assert stack.find_real_tokens(batch_of(padded())) is not None
        assert stack.find_real_tokens({**batch_of(padded()), "cache": cached}) is None

    model = build("gptj", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    hooks = unpad(model)
    columns = torch.arange(POSITIONS)[None]
    batch = batch_of(torch.cat([columns < 9, columns >= 9]).long())
    calls = hooks.counts.calls
    model(**batch)
    assert calls + (not hooks.stack.by_positions) == hooks.counts.calls
    assert_same(model, hooks, batch_of(padded()))


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModelForTokenClassification])
def test_logits_of_padding_are_left_out_on_request(kind):
    """In training, where labels of next tokens read them; loss and gradients stay the same."""
    model = build("qwen2", kind, classifier_dropout=0.0).train()
    hooks = unpad(model, logits=False)
    batch = batch_of(padded())
    if kind is AutoModelForTokenClassification:
        batch["labels"].clamp_(max=1)

    found, _ = assert_same(model, hooks, batch)

    left = (1, int(batch["attention_mask"].sum())) if kind is AutoModelForCausalLM else (ROWS, POSITIONS)
    assert left == found.logits.shape[:2]
    # Labels that padding between tokens predicts.
    for one, is_training in ((batch, False), (batch | {"attention_mask": BETWEEN}, True)):
        assert (ROWS, POSITIONS) == model.train(is_training)(**one).logits.shape[:2]


class Noting:
    """Keeps what a mode notes."""

    def __init__(self):
        super().__init__()
        self.found = []


class Waits(Noting, TorchDispatchMode):
    """Notes operations that wait for a GPU to read numbers of tensors."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masks = args[1] if function is torch.ops.aten.index.Tensor else ()
        if any(one is not None and one.dtype == torch.bool for one in masks) or function.overloadpacket in WAITING:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


WAITING = {
    torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal, torch.ops.aten.masked_select,
}  # fmt: skip


class Copies(Noting, TorchFunctionMode):
    """Notes methods that copy a tensor to the host, which a CPU does without an operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in {"tolist", "cpu", "numpy"}:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "most"), [("qwen2", 2), ("gemma2", 3)])
def test_a_call_waits_for_the_device_at_most_three_times(family, most):
    """For its mask, its labels, and a window of its attention; a padded call waits twice."""
    model, _ = hooked(family, logits=False)
    batch = batch_of(padded())
    model(**batch)  # it is compared with the padded call

    with Copies() as copies, Waits() as waits:
        model(**batch)

    assert most == len(copies.found + waits.found), copies.found + waits.found


def test_states_along_a_row_are_kept_and_calls_that_pass_through_keep_all_logits():
    """The padded pass carries states over padding in between; a caller may choose logits."""
    model, hooks = hooked("qwen3_5_text", logits=False)
    batch = batch_of(padded(left=(0, 0, 0, 0)))
    assert_same(model, hooks, batch_of(padded()))

    model.train()
    for one in (batch_of(BETWEEN), batch | {"logits_to_keep": torch.arange(POSITIONS)}):
        assert (ROWS, POSITIONS) == model(**one).logits.shape[:2]


@pytest.mark.parametrize("family", ["opt", "qwen3_5_text"])
def test_a_backbone_that_is_called_by_itself_follows_its_rows(family):
    """Under checkpointing, with and without padding, as losses that have a head of their own do."""
    model, hooks = hooked(family, logits=False)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})

    def step(mask):
        model.zero_grad()
        batch = {"input_ids": batch_of(mask)["input_ids"], "attention_mask": mask}
        states = model.base_model(**batch).last_hidden_state[mask.bool()]
        states.square().mean().backward()
        return states.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    for mask in (padded(), torch.ones_like(padded())):
        calls = hooks.counts.calls
        found = step(mask)
        assert calls + (not mask.all()) == hooks.counts.calls
        with hooks.paused():
            torch.testing.assert_close(found, step(mask), atol=2e-5, rtol=1e-4)
    model.eval().gradient_checkpointing_disable()


def test_a_model_under_autocast_is_probed_by_its_rounding():
    """As accelerate wraps a trainer's reference model in 16 bits, whose weights are float32."""
    model = build("qwen2")
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    hooks = unpad(model)

    model(**batch_of(padded()))
    assert hooks.counts.calls


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
    rows = [given["input_ids"][0, :length].tolist() for length in (9, POSITIONS)]
    answering = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=[])
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    several = model.eval().generate_batch(rows, answering, continuous_batching_config=small)
    for row, answer in zip(rows, several.values(), strict=True):
        plain = model.generate(torch.tensor([row]), max_new_tokens=4, do_sample=False)
        assert plain[0, len(row) :].tolist() == answer.generated_tokens
    model.eval()


@pytest.mark.parametrize("logits", [True, False])
def test_threads_share_a_model(logits):
    """Each has its own batch, where the call that begins first ends first."""
    model, hooks = hooked(logits=logits)
    batches = [batch_of(padded()), batch_of(padded(left=(0, 0, 0, 0)))]
    begun, met = Event(), Event()
    for batch in batches:  # whose kinds are compared here
        model.train()(**batch)

    def wait(*_):
        if begun.is_set():
            met.set()
            first.result(timeout=60)
        begun.set()
        met.wait(timeout=60)

    with model.train().get_input_embeddings().register_forward_hook(wait), ThreadPoolExecutor() as threads:
        first = threads.submit(model, **batches[0])
        begun.wait(timeout=60)
        found = [model(**batches[1]).loss, first.result().loss][::-1]

    with hooks.paused():
        torch.testing.assert_close(found, [model(**batch).loss for batch in batches])


def test_a_removed_hook_leaves_the_model_alone():
    """After `remove` and after a call that failed; a copy, which would run by them, is refused."""
    model = build("qwen2")
    hooks = unpad(model)
    batch = batch_of(padded())
    as_long = torch.arange(5, 5 + int(batch["attention_mask"].sum()))[None]
    due = model(input_ids=as_long).logits
    with pytest.raises(IndexError):
        model(input_ids=batch["input_ids"] + 10_000, attention_mask=batch["attention_mask"])
    assert torch.equal(due, model(input_ids=as_long).logits)
    assert_same(model, hooks, batch)
    calls = hooks.counts.calls

    with pytest.raises(PackplanError, match="before copying"):
        copy.deepcopy(model)
    with pytest.raises(PackplanError, match="before copying"):
        torch.save(model, BytesIO())
    with pytest.raises(ArgumentError, match="output_attentions"):
        model(input_ids=as_long, output_attentions=True)
    with pytest.raises(ArgumentError, match="already"):
        unpad(model)
    hooks.remove()
    model(**batch)
    assert calls == hooks.counts.calls
    assert_same(model, unpad(model), batch)


def test_attention_weights_are_refused_by_their_name(monkeypatch):
    """In a call or in the config; also in a first call, whose padded pass would compute them."""
    with pytest.raises(ArgumentError, match=r"^unpad computes no attention weights: .*output_attentions"):
        hooked()[0](**batch_of(padded()), output_attentions=True)
    model = hooked()[0]
    # As models that were loaded for eager have it; other tests share this model.
    monkeypatch.setitem(vars(model.config), "_output_attentions", value=True)
    with pytest.raises(ArgumentError, match="or set its config"):
        model(**batch_of(padded()))


def test_hooks_print_what_they_have_computed():
    """The model, its packed calls, and their positions with and without padding."""
    hooks = unpad(model := build("qwen2"))
    batch = batch_of(padded())
    model(**batch)

    real, whole = int(batch["attention_mask"].sum()), batch["attention_mask"].numel()
    assert f"Unpadding({type(model).__name__}: 1 packed call, {real} of {whole} positions computed)" == repr(hooks)


def test_calls_under_another_attention_are_padded(caplog):
    """Rows are proven apart under one attention: others do not know where a row begins."""
    log_once.cache_clear()
    model, hooks = hooked()
    batch, calls = batch_of(padded()), hooks.counts.calls
    due = build("qwen2")(**batch).logits
    model.set_attn_implementation("sdpa")

    found = [model(**batch).logits for _ in range(2)]

    assert calls == hooks.counts.calls
    torch.testing.assert_close(found, [due] * 2)
    assert 1 == caplog.text.count("computed with padding, since the attention is sdpa")
    model.set_attn_implementation("packplan")
    assert_same(model, hooks, batch)


END = 2
"""Token that ends a text."""


def ended_batch(labels_of):
    """Return rows padded with their end token, under a mask of what is not that token."""
    lengths = torch.tensor([9, 24, 13, 4])[:, None]
    ids = batch_of(torch.ones(ROWS, POSITIONS).long())["input_ids"].where(torch.arange(POSITIONS) < lengths - 1, END)
    labels = ids.where(torch.arange(POSITIONS) < lengths, -100) if labels_of == "the end" else ids.clone()
    return {"input_ids": ids, "attention_mask": (ids != END).long(), "labels": labels}


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize(("labels_of", "packs"), [("the end", True), ("padding", False)])
def test_labels_where_the_mask_is_zero_count_as_in_the_padded_pass(labels_of, packs, logits, caplog):
    """Where pad is eos the mask hides the end of each text; labels left at padding count too."""
    log_once.cache_clear()
    model = build("qwen2", pad_token_id=END).train()
    hooks = unpad(model, logits=logits)

    loss, batch = model(**ended_batch(labels_of)).loss, ended_batch(labels_of)

    with hooks.paused():
        torch.testing.assert_close(loss, model(**batch).loss)
    assert packs == bool(hooks.counts.calls)
    assert packs == ("padding predicts a label" not in caplog.text)


@pytest.mark.parametrize("logits", [True, False])
def test_first_tokens_after_left_padding_are_not_learned(logits, caplog):
    """As in the samples alone, where nothing predicts them."""
    log_once.cache_clear()
    model = build("qwen2").train()
    mask = padded(right=(0, 0, 0, 0))
    batch = batch_of(mask)
    batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
    alone = [
        model(input_ids=row[own.bool()][None]).logits[0, :-1].log_softmax(-1).gather(1, row[own.bool()][1:, None])
        for row, own in zip(batch["input_ids"], mask, strict=True)
    ]

    hooks = unpad(model, logits=logits)

    torch.testing.assert_close(model(**batch).loss, -torch.cat(alone).mean())
    assert hooks.counts.calls
    assert "label of the first token" in caplog.text


def test_a_score_that_is_read_at_padding_is_that_of_the_padded_pass(caplog):
    """The head takes the last token that is not padding by its id, which the mask hides."""
    model = build("qwen2", AutoModelForSequenceClassification, num_labels=1)
    hooks = unpad(model)
    batch = {name: value for name, value in batch_of(padded(left=(0, 0, 0, 0))).items() if name != "labels"}
    assert_scores(model, hooks, batch)
    assert 1 == hooks.counts.calls

    hidden = batch["attention_mask"] * (torch.arange(POSITIONS) < 9)
    assert_scores(model, hooks, batch | {"attention_mask": hidden})
    assert "calls that score a masked token" in caplog.text


def assert_scores(model, hooks, batch):
    found = model(**batch).logits
    with hooks.paused():
        torch.testing.assert_close(found, model(**batch).logits)


def test_adapters_leave_logits_of_padding_out_too():
    """Calls of a model with adapters pass by the hooks of the model inside."""
    model = adapted(build("qwen2")).train()
    hooks = unpad(model, logits=False)
    batch = batch_of(padded())

    found, _ = assert_same(model, hooks, batch)

    assert (1, int(batch["attention_mask"].sum())) == found.logits.shape[:2]


REFUSED = {
    "not a str": lambda: "a/path",
    "not a Sequential": lambda: torch.nn.Sequential(build("qwen2")),
    "pass trainer.model": lambda: SimpleNamespace(get_train_dataloader=None),
    "prefix": lambda: get_peft_model(build("qwen2"), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    "bloom": lambda: build("bloom"),
    "gpt2 has an encoder": lambda: build("gpt2", add_cross_attention=True),
    "t5 has an encoder": lambda: build("t5", AutoModelForSequenceClassification, d_model=32, num_layers=1),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_packed_is_refused_by_name(named):
    model = REFUSED[named]()

    with pytest.raises((ModelError, ArgumentError), match=named):
        unpad(model)

    assert not isinstance(model, torch.nn.Module) or not any(module._forward_pre_hooks for module in model.modules())


FAULTS = {
    "order": lambda packed: {"input_ids": packed["input_ids"].flip(1)},
    "positions": lambda packed: {"position_ids": torch.arange(packed["input_ids"].shape[1])[None]},
    "shifted": lambda _: {},
}
"""Fault -> arguments of the packed call in its place."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_packed_call_with_a_fault_is_found_by_its_probe(fault):
    """Tokens in another order, positions that go on, and shifted results are refused."""
    model = build("gpt2")

    def is_packed(given):
        return given.get("input_ids") is not None and len(given["input_ids"]) == 1

    def spoil(_, args, given):
        return args, given | (FAULTS[fault](given) if is_packed(given) else {})

    def shift(_, args, given, output):
        if fault == "shifted" and is_packed(given):
            output["last_hidden_state"] = output["last_hidden_state"].roll(1, 1)

    model.transformer.register_forward_pre_hook(spoil, with_kwargs=True)
    model.transformer.register_forward_hook(shift, with_kwargs=True)

    with pytest.raises(ModelError, match="cannot leave padding out"):
        unpad(model)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_model_that_sees_trains_the_same(family, tmp_path):
    """Images keep their tokens, positions and features, whichever side is padded."""
    pytest.importorskip("torchvision")
    from tests.made.vision_models import write_vision_model

    write_vision_model(tmp_path, family, ["a red circle, a blue bar"] * 4, seed=0)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    hooks, processor, rows = unpad(model), AutoProcessor.from_pretrained(tmp_path), []
    stack = model.model.language_model
    stack.register_forward_pre_hook(lambda _, __, one: rows.append(read_row(one["position_ids"])), with_kwargs=True)

    for side in ("left", "right"):
        batch = pictures_batch(processor, family, side)
        assert_same(model, hooks, batch)
        assert batch["attention_mask"].sum(1).tolist() == [*rows[-2].lengths], "by their positions too"


@pytest.mark.parametrize("family", ["paligemma", "idefics3"])
def test_prefixes_and_images_attend_within_their_row(family):
    """Token types let them attend both ways, in models of which some make a cache of their own."""
    model = build(family, AutoModelForImageTextToText)
    hooks = unpad(model)
    batch = seeing_batch(family, padded())
    found, _ = assert_same(model, hooks, batch)

    batch["pixel_values"][0] += 1
    moved = (model(**batch).logits != found.logits).any(-1)
    assert moved[0].any()
    assert not moved[1:].any()


def seeing_batch(family: str, mask):
    """Return a batch of rows that begin with an image of four tokens, of a prefix of nine."""
    batch, own = batch_of(mask), mask.cumsum(1)
    is_image = mask.bool() & (own <= 4)
    batch["input_ids"].clamp_(max=298)[is_image] = 299
    pixels = torch.randn(ROWS, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    batch["labels"] = batch["labels"].clamp(max=298).masked_fill(is_image, -100)
    if family == "idefics3":  # several images a row, and no types
        return {**batch, "pixel_values": pixels[:, None]}
    return {**batch, "token_type_ids": (own > 9).long(), "pixel_values": pixels}


def test_arguments_and_outputs_are_packed_by_their_names():
    """Pixels are never by token; one row of token types stands for all."""
    stack, tokens = TextStack(hooked()[0]), RealTokens.from_mask(padded())
    given = {"attention_mask": padded(), "token_type_ids": torch.arange(POSITIONS)[None]}
    pixels, kept = torch.ones(ROWS, POSITIONS, 2), {"attentions": torch.ones(1, len(tokens.places))}

    packed = stack.pack({**given, "pixel_values": pixels}, tokens)

    assert torch.equal(tokens.places % POSITIONS, packed["token_type_ids"][0])
    assert packed["pixel_values"] is pixels
    assert kept == stack.put_results_back(dict(kept), tokens, keep_packed=False)


def pictures_batch(processor, family: str, side: str):
    """Return a batch of rows with and without an image."""
    from PIL import Image

    from tests.made.vision_models import VISION_FAMILIES

    processor.tokenizer.padding_side = side
    media = VISION_FAMILIES[family].media
    token = next(token for token, (key, _) in media.items() if key in {"image_token_id", "image_token_index"})
    images = [Image.new("RGB", (56 + 28 * number, 84), (40 * number, 100, 50)) for number in range(2)]
    texts = [token + "red " * 3, "blue " * 5, "circle " * 2 + token + " red" * 20]
    nested = [[images[0]], [], [images[1]]] if family == "internvl" else images
    batch = dict(processor(text=texts, images=nested, padding=True, return_tensors="pt"))
    return {**batch, "labels": batch_of(batch["attention_mask"])["labels"].clamp(max=200)}


def test_ranks_compute_the_same(server, tmp_path):
    """Under DDP, FSDP 2 and ZeRO 1 to 3, hooked before or after, with adapters and images."""
    assert [0, 0] == finished(server.ranks(2, unpad_rank.main, folder=tmp_path))


@pytest.mark.parametrize("named", ["packplan", "sdpa"])
def test_samples_of_a_row_stay_apart_by_default(named):
    """In a call without options. With a cache, or a mask of ones, our attention refuses the row."""
    model = build("qwen2", attn_implementation=named)
    alone = [{"input_ids": [7, 8, 9, 10, 11]}, {"input_ids": [5, 6, 7]}]
    row = flatten(alone)

    for options in ({"use_cache": True}, {"attention_mask": torch.ones_like(row["input_ids"])}):
        if named == "packplan":
            with pytest.raises(ArgumentError, match="position_ids begin 2 samples in one row"):
                model(**row, **options)
    separate_samples(model)
    found = model(**row).logits[0]
    due = torch.cat([model(input_ids=torch.tensor([one["input_ids"]])).logits[0] for one in alone])

    torch.testing.assert_close(found, due)


def test_ranks_that_share_weights_quote_the_refusal_of_another_without_its_remedy(monkeypatch):
    """The error of each rank adds the remedy once."""
    words = []
    monkeypatch.setattr(first_calls, "has_ranks", lambda: True)
    monkeypatch.setattr(first_calls, "find_sharded_weight", lambda _: "a weight")
    monkeypatch.setattr(first_calls, "_meet_ranks", lambda _, word: words.append(word) or ["", *words])

    with pytest.raises(ModelError, match="it leaks; train without packing"), first_calls.raising_together(None):
        raise ModelError("probe", "it leaks")
    assert ["ModelError: it leaks"] == words
    with pytest.raises(ModelError) as found, first_calls.raising_together(None):
        pass
    remedy = "train without packing (training.packing: false)"
    assert f"rank 1 failed while preparing the model: ModelError: it leaks; {remedy}" == str(found.value)
