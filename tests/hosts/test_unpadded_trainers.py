"""TRL's trainers compute the same without padding: loss, gradients, and what they log."""

import json
from functools import partial

import pytest

pytest.importorskip("trl")

# isort: split
import torch
import trl
from datasets import Dataset

import packplan as pp
from benchmarks.__main__ import main
from packplan.adapters.hf.refusals import is_old_trl
from packplan.core.errors import ArgumentError, MismatchError
from packplan.hf import row_lengths, unpad, use_plan
from packplan.testing import assert_step_loss, assert_unpadded_equal
from tests.hosts.law import CONFIGS, arguments, model_of, rows_of, tokenizer

# isort: split
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

_WORDS = ["red", "blue " * 3, "a circle of many words " * 4, "bars " * 9]

_TEXTS = {"chosen": _WORDS * 4, "rejected": _WORDS[::-1] * 4}

_ROWS = {
    "DPOTrainer": {"prompt": _WORDS * 4} | _TEXTS,
    "KTOTrainer": {"prompt": _WORDS * 4, "completion": _WORDS[::-1] * 4, "label": [True, False] * 8},
    "RewardTrainer": _TEXTS,
    "SFTTrainer": {"text": _WORDS * 4},
    "GRPOTrainer": {"prompt": _WORDS * 4},
    "RLOOTrainer": {"prompt": _WORDS * 4},
    "Trainer": {name: [[7 + one % 3] * (1 + 5 * one % 17) for one in range(16)] for name in ("input_ids", "labels")},
}

_NEAR = {"rel": 2e-5, "abs": 2e-6}

_TIMES = ("time", "per_second", "flos")

_OVER_PADDING = ("entropy", "accuracy", "logits")
"""Words of the names of means over padding."""


build = partial(model_of, "qwen2", pad_token_id=0, eos_token_id=1)


def trainer_of(host, folder):
    """Return a trainer as its users make it."""
    keys = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2}
    keys["gradient_checkpointing"] = False
    rows = Dataset.from_dict(_ROWS[host])
    if host == "Trainer":
        collate = DataCollatorForTokenClassification(tokenizer(*_WORDS))
        return Trainer(build(), arguments(TrainingArguments, folder, **keys), collate, train_dataset=rows)
    given = {"train_dataset": rows, "processing_class": tokenizer(*_WORDS)}
    if host in ("GRPOTrainer", "RLOOTrainer"):
        keys |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
        given["reward_funcs"] = lambda completions, **_: [float(number % 3) for number in range(len(completions))]
    if host in ("DPOTrainer", "KTOTrainer"):
        given["ref_model"] = build()
    own = {"kind": AutoModelForSequenceClassification, "num_labels": 1} if host == "RewardTrainer" else {}
    args = arguments(getattr(trl, host.replace("Trainer", "Config")), folder, **keys)
    return getattr(trl, host)(build(**own), args=args, **given)


def logged(trainer):
    """Train, and return the numbers of each step."""
    trainer.train()
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in (*_TIMES, *_OVER_PADDING))}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("host", _ROWS)
def test_a_trainer_computes_the_same(host, tmp_path):
    """A batch's loss and gradients; then two steps, with all that the trainer logs."""
    expected = logged(trainer_of(host, tmp_path))
    trainer = trainer_of(host, tmp_path)

    found = assert_unpadded_equal(trainer)
    hooks = [unpad(one) for one in (trainer.model, getattr(trainer, "ref_model", None)) if one is not None]

    assert 0 < found.real < found.padded
    for mine, due in zip(logged(trainer), expected, strict=True):
        assert mine == pytest.approx(due, **_NEAR)
    assert all(one.counts.real < one.counts.padded for one in hooks)


def test_a_fault_is_an_error_and_a_batch_without_padding_proves_nothing(tmp_path):
    """Results at other places than their tokens' are found by a trainer's own loss."""
    trainer = trainer_of("SFTTrainer", tmp_path)
    unpad(trainer.model, check=False)

    def shift(_, __, output):  # of calls without padding
        if len(output["last_hidden_state"]) == 1:
            output["last_hidden_state"] = output["last_hidden_state"].roll(1, 1)

    trainer.model.base_model.register_forward_hook(shift, prepend=True)

    with pytest.raises(MismatchError, check=lambda error: "unlike_padded" == error.kind):
        assert_unpadded_equal(trainer)
    batch = dict.fromkeys(["input_ids", "attention_mask", "labels"], torch.ones(2, 3).long())
    trainer.get_train_dataloader = lambda: [batch]
    with pytest.raises(ArgumentError, match="no padding"):
        assert_unpadded_equal(trainer)


def test_a_plan_in_trl_trains_images(tmp_path):
    """Its own collator makes tokens and pixels: a step is that of its samples alone."""
    image = pytest.importorskip("PIL.Image")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tests.made.vision_models import write_vision_model

    write_vision_model(tmp_path, "qwen2_5_vl", ["a red circle, a blue bar"] * 4, seed=0)
    token, picture = "<|vision_start|><|image_pad|><|vision_end|>", image.new("RGB", (84, 56), (40, 100, 50))
    rows = [
        {"images": [picture], "prompt": token + word, "completion": "red circle " * (1 + place)}
        for place, word in enumerate(_WORDS)
    ]
    args = arguments(trl.SFTConfig, tmp_path / "out", max_length=None, gradient_accumulation_steps=2)
    model, processor = AutoModelForImageTextToText.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    trainer = trl.SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=processor)
    lengths = row_lengths(trainer)
    plan = pp.plan(lengths, sum(lengths) - 1)

    schedule = use_plan(trainer, plan)
    found = assert_step_loss(trainer)
    trainer.train()

    assert found.tokens > len(rows)
    assert schedule.total_steps == trainer.state.global_step
    assert 0 < trainer.unpadding.counts.real < trainer.unpadding.counts.padded


@pytest.mark.parametrize("host", ["nothing is padded", "trainer", "hooked"])
def test_a_plan_goes_with_what_else_leaves_padding_out(host, tmp_path):
    """TRL's own joined rows, transformers' collator of them, and a model that is hooked already."""
    rows = rows_of("qwen2")[:9]
    plan, data = pp.plan([len(row["input_ids"]) for row in rows], 64), Dataset.from_list(rows)
    if host == "nothing is padded":
        prepared = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}, "padding_free": True}
        args = arguments(trl.SFTConfig, tmp_path, **prepared)
        trainer = trl.SFTTrainer(build(), args, train_dataset=data, processing_class=tokenizer(*_WORDS))
    else:
        collator = DataCollatorWithFlattening() if host == "trainer" else None
        trainer = Trainer(build(), arguments(TrainingArguments, tmp_path), collator, train_dataset=data)
    if host == "hooked":
        unpad(trainer.model)

    use_plan(trainer, plan)

    assert_step_loss(trainer)


def test_metrics_see_a_pack_as_one_row(tmp_path):
    """Its real tokens alone, as ranks have packs of other numbers of rows."""
    rows, seen = rows_of("qwen2")[:9], []
    plan = pp.plan([len(row["input_ids"]) for row in rows], 64)
    args = arguments(TrainingArguments, tmp_path, batch_eval_metrics=True)

    def compute_metrics(found, compute_result):  # the trainer passes it
        seen.append((found.predictions.shape, found.label_ids.shape))
        return {}

    trainer = Trainer(build(), args, train_dataset=rows, eval_dataset=rows, compute_metrics=compute_metrics)
    use_plan(trainer, plan, eval_plan=plan)

    trainer.evaluate()

    tokens = [int(plan.lengths[pack].sum()) for pack in plan.packs]
    assert [((1, one, CONFIGS["qwen2"]["vocab_size"]), (1, one)) for one in tokens] == seen


@pytest.mark.skipif(is_old_trl(), reason="asks for logits")
@pytest.mark.parametrize("first", [False, True])
def test_scores_of_labels_are_put_back(first):
    """All that TRL's head gives, of real tokens alone; labels after padding are left out."""
    model = build()
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    hooks = unpad(model)
    columns = torch.arange(24)
    mask = torch.stack([columns < 24, columns < 3, columns >= 20, columns < 0]).long()
    ids = torch.randint(2, 300, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    learned = mask.clone() if first else mask * mask.roll(1, 1)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(learned == 0, -100)}

    model(**batch, fused_lm_head=True)  # compared with its padded pass
    with FlopCounterMode(display=False) as packed:
        found = model(**batch, fused_lm_head=True)
    with hooks.paused(), FlopCounterMode(display=False) as padded:
        due = model(**batch, fused_lm_head=True)

    assert packed.get_total_flops() < 0.5 * padded.get_total_flops()
    own = (mask * mask.roll(1, 1))[:, 1:].bool() | ~learned[:, 1:].bool()
    for name in ("log_probs", "entropy", "is_top1", "label_mask"):
        torch.testing.assert_close(found[name][own], due[name][own], msg=name)


def test_the_benchmark_counts_the_positions_of_the_steps_that_it_times(capsys):
    """Three steps run: the first warms up, and the tensors of the last are counted."""
    words = "--hosts trainer --steps 1 --rows 8 --width 32 --max-tokens 64 --longest 40 --layers 1 --json"

    assert 0 == main(["unpad", *words.split()])

    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < row["real"] < row["padded"] <= 8 * (40 + 1)
    assert all(row[name] > 0 for name in ("padded_s", "packed_s", "row_s", "peak"))
