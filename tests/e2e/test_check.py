"""`packplan check` finds packed training equal where it is, and each planted fault where not."""

import copy
import json
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState

from packplan.adapters.attention import layout as varlen_layout
from packplan.adapters.attention import varlen
from packplan.adapters.attention.layout import Layout
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer import loader
from tests.made.pictures import write_scenes

pytestmark = pytest.mark.slow

MODELS = ["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3"]

EXACT = {"positions", "labels"}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Records of every kind: text alone, one image, several."""
    folder = tmp_path_factory.mktemp("scenes")
    records = [json.loads(line) for line in write_scenes(folder, count=24).read_text().splitlines()]
    weighed = copy.deepcopy(records)
    for number, record in enumerate(weighed):
        record["messages"][-1] |= {"loss_scale": 0.25 + number % 3} if number % 4 else {}
    kinds = {
        "all": records, "weighed": weighed, "text": [one for one in records if "images" not in one],
        "image": [one for one in records if len(one.get("images", ())) == 1],
    }  # fmt: skip
    for name, chosen in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chosen))
    return folder


@pytest.fixture(scope="module")
def runs():
    """Runs by model, data and settings: tests that differ in the planted fault share one."""
    return {}


@pytest.fixture
def hooked():
    """Return a function that keeps the handle of a hook until the test ends."""
    handles = []
    yield handles.append
    for handle in handles:
        handle.remove()


@pytest.fixture
def compared(write_run, scenes, runs, monkeypatch):
    """Return a function that compares a run's packs, after planting an attribute or a hook."""
    from packplan.app.check import compare
    from packplan.app.wiring.runs import read_config
    from tests.e2e.ready import prepare

    def run(of: str, data: str = "", plant=None, num_packs=2, **overlay):
        data = data or ("all.jsonl" if of.endswith("vl") else "text.jsonl")
        key = json.dumps([of, data, overlay], sort_keys=True)
        if key not in runs:
            sections = {"custom": {"train_jsonl": str(scenes / data)}, "template": {"max_length": 256}, **overlay}
            sections["training"] = {**overlay.get("training", {}), "output_dir": str(scenes / f"run{len(runs)}")}
            path = write_run(of, **sections)
            config = read_config(path)
            runs[key] = config, prepare(config, OneRank(), may_leak=True)
        config, prepared = runs[key]
        if plant is not None:
            plant(prepared.trainer)
        report = compare(config, prepared.trainer, prepared.planned["train"], num_packs=num_packs)
        return report, {verdict.check for verdict in report.verdicts if not verdict.passed}

    return run


@pytest.mark.parametrize("attn_impl", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_model_passes(compared, model, attn_impl):
    """No gradient reaches another sample; a run that names no attention takes ours."""
    report, failed = compared(model, **({} if attn_impl == "varlen" else {"model": {"attn_impl": attn_impl}}))

    assert set() == failed
    assert attn_impl == report.attn_impl
    kinds = {kind for _, kind, _ in report.packs}
    assert ("mixed" if model.endswith("vl") else "text") in kinds
    worst = {verdict.check: verdict.worst.value for verdict in report.verdicts}
    assert all(worst[check] == 0 for check in (*EXACT, "isolation"))
    compared_numbers = ("logits", "sample loss", "step loss", "gradients")
    assert all(worst[check] < (1e-6 if attn_impl == "varlen" else 1e-5) for check in compared_numbers)


@pytest.mark.parametrize("reduction", ["token", "sqrt"])
def test_weights_of_messages_are_compared(compared, monkeypatch, reduction):
    """They pass; a collator that loses them in packs fails the loss of a step."""
    training = {"loss_reduction": reduction}
    assert set() == compared("qwen2_5_vl", "weighed.jsonl", training=training)[1]
    plain = loader.loss_weights
    monkeypatch.setattr(loader, "loss_weights", lambda *labels, **how: plain(*labels, **(how | {"scale": None})))

    assert {"step loss", "gradients"} <= compared("qwen2_5_vl", "weighed.jsonl", training=training)[1]


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_flex_attention_passes_for_text(compared, model):
    """By its block mask; a CPU has no backward pass for it, and that is said."""
    with torch.compiler.set_stance("force_eager"):
        report, failed = compared(model, num_packs=1, model={"attn_impl": "flex_attention"})

    assert set() == failed
    assert {"gradients", "step loss", "isolation"} == set(report.not_compared)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ("qwen2_5_vl", {}),
        ("qwen3_vl", {"tuner_type": "lora", "target_modules": ["q_proj", "v_proj"]}),
        ("qwen2", {"loss_reduction": "sample"}),
        ("qwen3", {"loss_reduction": "sqrt", "bf16": True}),
    ],
)
def test_adapters_reductions_and_mixed_precision_pass(compared, model, training):
    """The limits follow the precision; dropout is no difference; packs may be of images alone."""
    with patch.dict(AcceleratorState._shared_state):  # all trainers of a process have the precision of the last one
        report, failed = compared(model, "image.jsonl" if model.endswith("vl") else "", training=training)

    assert set() == failed
    assert {"image" if model.endswith("vl") else "text"} == {kind for _, kind, _ in report.packs}
    assert ("bfloat16" if training.get("bf16") else "float32") == report.precision


class Tampered:
    """A collator whose batches are tampered with."""

    def __init__(self, trainer, tamper):
        self._collate, self._tamper = trainer.data_collator, tamper

    def __call__(self, items):
        batch = self._collate(items)
        self._tamper(batch)
        return batch


def go_on(batch):
    """Let positions go on from sample to sample."""
    for key in ("position_ids", "text_position_ids"):
        if key in batch:
            batch[key] = torch.arange(batch[key].shape[-1]).expand(batch[key].shape).contiguous()


def predict_the_next_sample(batch):
    """Let the last token of a sample learn the first of the next."""
    text = batch["text_position_ids" if "text_position_ids" in batch else "position_ids"]
    second = text[0].eq(0).nonzero()[1]
    batch["labels"][0, second] = batch["input_ids"][0, second]


def tampered(tamper):
    return lambda trainer, patch: patch.setattr(trainer, "data_collator", Tampered(trainer, tamper))


def without_the_fourth_row(trainer, patch):
    """Prepare inputs as ms-swift does, which strips it."""
    from swift.trainers import Seq2SeqTrainer

    def plain(inputs):
        known = {key: value for key, value in inputs.items() if not key.startswith(("pack_", "loss_n"))}
        return Seq2SeqTrainer._prepare_inputs(trainer, known)

    patch.setattr(trainer, "_prepare_inputs", plain)


def cache_on(trainer, patch):
    """Let transformers build no block-diagonal mask."""
    config = trainer.model.config
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        patch.setattr(part, "use_cache", True)


def begin_late(_, patch):
    """Let the layout of a row begin the second sample one token late."""

    def read(*arguments, **options):
        found = varlen_layout.read_layout(*arguments, **options).cu_seqlens
        return Layout(found + torch.eye(len(found), dtype=found.dtype)[1], is_causal=True)

    patch.setattr(varlen, "read_layout", read)


APART = {"logits", "sample loss", "gradients"}

FAULTS = {
    "positions go on": ("qwen2", tampered(go_on), {"positions", "isolation"}),
    "positions of images go on": ("qwen2_5_vl", tampered(go_on), {"positions", "isolation"}),
    "a label crosses a border": ("qwen3", tampered(predict_the_next_sample), {"labels", "sample loss"}),
    "the fourth row is gone": (
        "qwen3_vl", without_the_fourth_row, {"positions", "logits", "isolation", "gradients"}
    ),
    "a cache": ("qwen3", cache_on, {"logits", "isolation"}),
    "a sample begins late": ("qwen3", begin_late, APART),
    "another reduction": (
        "qwen2", lambda trainer, patch: patch.setattr(trainer, "reduction", "sample"), {"step loss", "gradients"}
    ),
}  # fmt: skip
"""Fault -> model, function that plants it, and checks that fail."""


@pytest.mark.parametrize(("model", "plant", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(compared, monkeypatch, model, plant, expected):
    """After the model was asked whether it may pack; `test_vision_families` lets images leak."""
    report, failed = compared(model, plant=lambda trainer: plant(trainer, monkeypatch))

    assert expected <= failed
    if expected in (APART, {"step loss", "gradients"}):
        assert not failed & {"positions", "labels"}
    if plant is without_the_fourth_row:
        assert "row text" == next(one for one in report.verdicts if one.check == "positions").worst.detail


def test_losses_of_large_logits_are_equal_up_to_the_rounding_of_those(compared, hooked):
    """Rounding grows with what all logits have in common; the loss does not."""
    drawn = torch.Generator().manual_seed(0)

    def shift(_, __, logits):
        return logits + 1e3 * (1 + 1e-6 * torch.randn(logits.shape, generator=drawn))

    _, failed = compared("qwen2", plant=lambda trainer: hooked(trainer.model.lm_head.register_forward_hook(shift)))

    assert not failed & {"sample loss", "step loss"}


def test_the_command_prints_a_table_or_a_document_and_its_status_tells(write_run, scenes, capsys):
    """0 and 3; the worst sample is named by its record; nothing else is on standard output."""
    from packplan.adapters.trainer import loader
    from packplan.app.check import main

    path = str(write_run("qwen2", custom={"train_jsonl": str(scenes / "text.jsonl")}, template={"max_length": 256}))

    assert 0 == main([path, "--json", "--packs", "1"])
    document = json.loads(capsys.readouterr().out)
    assert document["passed"]
    assert 1 == len(document["packs"])

    class Crossing(loader.Collator):
        def __call__(self, items):
            batch = super().__call__(items)
            predict_the_next_sample(batch)
            return batch

    with patch("packplan.adapters.trainer.trainer.Collator", Crossing):
        assert 3 == main([path])
        shown = capsys.readouterr()
        assert "DIFFERS" in shown.out
        assert "text.jsonl, line " in shown.out
        assert "not the same training: labels" in shown.err
        assert 3 == main([path, "--json"])
        assert not json.loads(capsys.readouterr().out)["passed"]


def test_what_cannot_be_compared_is_said(write_run, scenes, capsys, monkeypatch):
    """Nothing packed; no pack of several samples; several processes."""
    from packplan.app.check import main

    custom = {"train_jsonl": str(scenes / "text.jsonl")}
    assert 2 == main([str(write_run("qwen2", custom=custom, training={"packing": False}))])
    assert "training.packing: is false" in capsys.readouterr().err
    assert 2 == main([str(write_run("qwen2", name="tight", custom=custom, template={"max_length": 30}))])
    assert "no pack of several samples" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert 2 == main([str(write_run("qwen2", custom=custom))])
    assert "without torchrun" in capsys.readouterr().err
