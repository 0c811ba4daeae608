"""`packplan check` finds packed training equal where it is, and each planted fault where not."""

import json
import shutil
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState
from swift.trainers import Seq2SeqTrainer

from packplan.adapters.attention import NAME, varlen
from packplan.adapters.attention import layout as varlen_layout
from packplan.adapters.attention.layout import Layout
from packplan.adapters.ranks.torch_group import OneRank
from packplan.app.check import compare_packs, main
from packplan.app.opening.runs import read_config
from packplan.core.errors import ArgumentError
from tests.e2e.ready import prepare
from tests.made.pictures import write_scenes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Records of every kind: text, one image, several; and text whose messages have weights."""
    folder = tmp_path_factory.mktemp("scenes")
    records = [json.loads(line) for line in write_scenes(folder, count=24).read_text().splitlines()]
    text, image = ([one for one in records if len(one.get("images", ())) == number] for number in (0, 1))
    weighed = [json.loads(json.dumps(one)) for one in text]
    for number, record in enumerate(weighed):
        record["messages"][-1] |= {"loss_scale": 0.25 + number % 3} if number % 4 else {}
    for name, chosen in {"all": records, "weighed": weighed, "text": text, "image": image}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chosen))
    return folder


@pytest.fixture(scope="module")
def runs():
    """Runs by model, data and settings: tests that differ in the planted fault share one."""
    return {}


@pytest.fixture
def compared(write_run, scenes, runs, monkeypatch):
    """Return a function that compares a run's packs, after planting attributes."""

    def run(of, data="", plant=lambda _: (), num_packs=2, **overlay):
        data = data or ("all" if of.endswith("vl") else "text")
        key = json.dumps([of, data, overlay], sort_keys=True)
        if key not in runs:
            sections = {"custom": {"train_jsonl": str(scenes / f"{data}.jsonl")}, "template": {"max_length": 256}}
            sections["training"] = {**overlay.pop("training", {}), "output_dir": str(scenes / f"run{len(runs)}")}
            config = read_config(write_run(of, **sections, **overlay))
            runs[key] = config, prepare(config, OneRank(), may_leak=True)
        config, prepared = runs[key]
        for attribute in plant(prepared.trainer):
            monkeypatch.setattr(*attribute)
        report = compare_packs(config, prepared.trainer, prepared.planned["train"], num_packs=num_packs)
        return report, {verdict.check for verdict in report.verdicts if not verdict.passed}

    return run


LORA = {"tuner_type": "lora", "target_modules": ["q_proj", "v_proj"]}

SOUND = {
    **{(model, "varlen"): {} for model in ("qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3")},
    ("qwen2_5_vl", "sdpa"): {"data": "image"}, ("qwen3_vl", "eager"): {"training": LORA},
    ("qwen2", "eager"): {"training": {"loss_reduction": "sample"}},
    ("qwen3", "sdpa"): {"training": {"loss_reduction": "sqrt", "bf16": True}},
    ("qwen3", "flex_attention"): {"num_packs": 1}, ("qwen2", "varlen", "token"): {"data": "weighed"},
    ("qwen2", "varlen", "sqrt"): {"data": "weighed", "training": {"loss_reduction": "sqrt"}},
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND, ids=" ".join)
def test_packed_training_is_equal(compared, case):
    """
    For each model, attention, reduction, precision, with adapters and weights of messages.

    A run that names no attention takes ours. Flex attention has no backward pass on a CPU.
    """
    model, attention, *_ = case
    is_16_bit, flex = "bf16" in str(SOUND[case]), attention == "flex_attention"
    named = {} if attention == "varlen" else {"model": {"attn_impl": attention}}
    # All trainers of a process have the precision of the last one.
    restored = patch.dict(AcceleratorState._shared_state) if is_16_bit else nullcontext()
    with restored, torch.compiler.set_stance("force_eager"):
        report, failed = compared(model, **named, **SOUND[case])

    assert set() == failed
    assert (attention, "bfloat16" if is_16_bit else "float32") == (report.attn_impl, report.precision)
    kind = SOUND[case].get("data") if model == "qwen2_5_vl" else None
    assert {kind or ("mixed" if model.endswith("vl") else "text")} <= {kind for _, kind, _ in report.packs}
    assert set(report.not_compared) == ({"gradients", "step loss", "isolation"} if flex else set())
    worst = {verdict.check: verdict.worst.value for verdict in report.verdicts}
    assert {0} == {worst.pop(check) for check in ("positions", "labels", "isolation") if check in worst}
    assert max(worst.values()) < (1 if is_16_bit else 1e-6 if attention == "varlen" else 1e-5)


def tampered(tamper):
    """Return what plants a collator whose batches are tampered with."""

    def plant(trainer):
        collate = trainer.data_collator

        def collate_and_tamper(items):
            batch = collate(items)
            tamper(batch)
            return batch

        return [(trainer, "data_collator", collate_and_tamper)]

    return plant


def go_on(batch):
    """Let positions go on from sample to sample."""
    for key in {"position_ids", "text_position_ids"} & batch.keys():
        batch[key] = torch.arange(batch[key].shape[-1]).expand(batch[key].shape).contiguous()


def predict_the_next_sample(batch):
    """Let the last token of a sample learn the first of the next."""
    second = batch["position_ids"][0].eq(0).nonzero()[1]
    batch["labels"][0, second] = batch["input_ids"][0, second]


def lose_weights(batch):
    batch["loss_scale"] = batch["loss_scale"].sign()


def without_the_fourth_row(trainer):
    """Prepare inputs as ms-swift does, which strips it."""

    def plain(inputs):
        known = {key: value for key, value in inputs.items() if not key.startswith(("pack_", "loss_n"))}
        return Seq2SeqTrainer._prepare_inputs(trainer, known)

    return [(trainer, "_prepare_inputs", plain)]


def cache_on(trainer):
    """Let transformers build no block-diagonal mask."""
    return [(one, "use_cache", True) for one in (trainer.model.config, trainer.model.config.get_text_config())]


def begin_late(_):
    """Let the layout of a row begin the second sample one token late."""

    def read(*arguments, **options):
        found = varlen_layout.read_layout(*arguments, **options).cu_seqlens
        return Layout(found + torch.eye(len(found), dtype=found.dtype)[1], is_causal=True)

    return [(varlen, "read_layout", read)]


def changed_logits(change):
    """Return what plants a change of a model's logits."""

    def plant(trainer):
        head = trainer.model.lm_head
        plain = head.forward
        return [(head, "forward", lambda hidden: change(trainer.model, plain(hidden)))]

    return plant


def enlarge(_, logits):
    """Let logits have much in common, by which rounding grows, and the loss does not."""
    drawn = torch.Generator().manual_seed(logits.shape[1])
    return logits + 1e3 * (1 + 1e-6 * torch.randn(logits.shape, generator=drawn))


def differ_under_ours(model, logits):
    return logits * (1 + model.config._attn_implementation.startswith(NAME))


STEP = {"step loss", "gradients"}

ROWS = {"positions", "labels"}

FAULTS = {
    "positions go on": ("qwen2", "", tampered(go_on), {"positions", "isolation"}, set()),
    "positions of images go on": ("qwen2_5_vl", "", tampered(go_on), {"positions", "isolation"}, set()),
    "a label crosses a border": ("qwen3", "", tampered(predict_the_next_sample), {"labels", "sample loss"}, set()),
    "the fourth row is gone": (
        "qwen3_vl", "", without_the_fourth_row, {"positions", "logits", "isolation", "gradients"}, set()
    ),
    "a sample begins late": ("qwen3", "", begin_late, {"logits", "sample loss", "gradients"}, ROWS),
    "another reduction": ("qwen2", "", lambda trainer: [(trainer, "reduction", "sample")], STEP, ROWS),
    "weights are lost": ("qwen2", "weighed", tampered(lose_weights), STEP, ROWS),
    "large logits": ("qwen2", "", changed_logits(enlarge), set(), {"sample loss", "step loss"}),
    "our attention": ("qwen2", "", changed_logits(differ_under_ours), {"logits", "sample loss", "step loss"}, ROWS),
}  # fmt: skip
"""Fault -> model, data, what plants it, checks that fail, and checks that do not."""


@pytest.mark.parametrize(("model", "data", "plant", "fail", "pass_"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(compared, model, data, plant, fail, pass_):  # noqa: PLR0917  # a table
    """After the model was asked whether it may pack; `test_vision_families` lets images leak."""
    report, failed = compared(model, data, plant)

    assert fail <= failed
    assert not failed & pass_
    if plant is without_the_fourth_row:
        assert "row text" == next(one for one in report.verdicts if one.check == "positions").worst.detail


def test_a_cache_that_joins_samples_is_refused(compared):
    """By the attention itself, before anything is computed."""
    with pytest.raises(ArgumentError, match=r"position_ids begin . samples in one row, .*: pass use_cache=False"):
        compared("qwen3", "", cache_on)


def test_the_command_prints_a_table_or_a_document_and_its_status_tells(demo, write_run, scenes, tmp_path, capsys):
    """3 where something differs, named by its record; `test_families` has what passes."""
    shutil.copytree(demo / "models" / "qwen2", tmp_path / "leaking")
    config = tmp_path / "leaking" / "config.json"
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    config.write_text(json.dumps(json.loads(config.read_text()) | rope | {"max_position_embeddings": 65}))
    custom = {"train_jsonl": str(scenes / "text.jsonl")}
    path = str(write_run(custom=custom, template={"max_length": 256}, model={"model": str(tmp_path / "leaking")}))

    assert 3 == main([path])
    shown = capsys.readouterr()
    assert all(words in shown.out for words in ("DIFFERS", "worst", "limit"))
    assert "text.jsonl, line " in shown.out
    assert "packed and unpacked training differ in logits" in shown.err
    assert 3 == main([path, "--json", "--packs", "1"])
    document = json.loads(capsys.readouterr().out)
    assert (False, 1) == (document["passed"], len(document["packs"]))


def test_what_cannot_be_compared_is_said(write_run, scenes, capsys, monkeypatch):
    """Nothing packed; no pack of several samples; several processes."""
    custom = {"train_jsonl": str(scenes / "text.jsonl")}
    assert 2 == main([str(write_run("qwen2", custom=custom, training={"packing": False}))])
    assert "training.packing is false" in capsys.readouterr().err
    assert 2 == main([str(write_run("qwen2", name="tight", custom=custom, template={"max_length": 30}))])
    assert "no pack of several samples" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert 2 == main([str(write_run("qwen2", custom=custom))])
    assert "without torchrun" in capsys.readouterr().err
