"""Losses beside the cross entropy, and ways to compute experts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from packplan.adapters.trainer.trainer import logit_inputs
from packplan.app import check
from packplan.app.opening.runs import read_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def experts(demo, tmp_path_factory) -> Path:
    """Return the folder of a tiny mixture of experts, with the tokenizer of the demo's Qwen3."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(demo / "models" / "qwen3", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{key: sizes[key] for key in kept}, **experts)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_experts_cost_what_their_coefficient_says_however_they_are_computed(experts, write_run, ready):
    """Once in a step, however many packs it accumulates; samples stay equal to themselves."""

    def train(name: str, *, model: dict | None = None, **training):
        sections = {"model": str(experts), "model_type": "qwen3_moe", **(model or {})}
        settings = {"max_steps": 1, "packing_drop_last": False, "gradient_accumulation_steps": 2, **training}
        path = write_run("qwen3", name=name, model=sections, template={"template": "qwen3"}, training=settings)
        its = ready(path)
        if training:
            report = check.compare_packs(read_config(path), its.trainer, its.planned["train"], num_packs=1)
            assert report.passed, [verdict for verdict in report.verdicts if not verdict.passed]
        its.trainer.train()
        ways.append(its.trainer.model.config._experts_implementation)
        return next(entry for entry in its.trainer.state.log_history if "loss" in entry)

    ways = []
    plain, batched = train("plain"), train("batched", model={"experts_impl": "batched_mm"})
    assert ways[0] != ways[1] == "batched_mm"
    assert batched["loss"] == pytest.approx(plain["loss"], abs=1e-5)

    balanced = train("balanced", router_aux_loss_coef=0.5)
    assert "aux_loss" not in plain
    assert balanced["aux_loss"] > 1
    assert balanced["loss"] - plain["loss"] == pytest.approx(0.5 * balanced["aux_loss"], abs=2e-3)
    assert balanced["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)


def test_dft_weighs_each_token_by_its_probability(write_run, ready):
    """As a mean over all tokens of a step."""
    path = write_run("qwen2", training={"max_steps": 1, "enable_dft_loss": True, "packing_drop_last": False})
    trainer = ready(path).trainer
    with torch.no_grad():
        batch = next(iter(trainer.get_train_dataloader()))
        inputs = trainer._prepare_inputs(dict(batch))
        logits, labels = trainer.model.eval()(**logit_inputs(inputs)).logits, inputs["labels"]
        kept = labels[0, 1:] != -100
        chosen = torch.log_softmax(logits[0, :-1].float(), -1)[kept].gather(1, labels[0, 1:][kept, None])
        expected = float((-chosen * chosen.exp()).mean())

    trainer.train()

    found = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert expected == pytest.approx(found, rel=1e-4)
