"""
Models that nothing in the code names train from packs: one that only attends, and one whose layers
carry a state along the row.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from packplan.adapters.ranks.torch_group import OneRank
from packplan.app import check
from packplan.core.errors import ConfigError

pytestmark = pytest.mark.slow

SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip

FAMILIES = {
    "llama": ("qwen2", SHAPE, {"model_type": "llama", "template": "qwen2_5"}),
    "qwen3_next": (
        "qwen2",
        {
            **SHAPE, "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        {"template": "qwen2_5"},
    ),
    "qwen3_5": (
        "qwen3_vl",
        {
            "text_config": {
                **SHAPE, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
                "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
                                    "mrope_interleaved": True, "partial_rotary_factor": 0.25},
            },
            "vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64,
                              "out_hidden_size": 64, "patch_size": 16, "num_position_embeddings": 256},
        },
        {"model_type": "qwen3_5", "template": "qwen3_5"},
    ),
}  # fmt: skip
"""
Family -> a model of the demo whose tokenizer it has, its configuration, and what has to be said of
it, since ms-swift knows several.
"""

KEYS = {"max_steps": 4, "effective_batch_size": 2, "save_strategy": "steps", "save_steps": 2,
        "packing_drop_last": False, "gradient_checkpointing": True}  # fmt: skip


@pytest.fixture(scope="module")
def folders(demo, tmp_path_factory):
    """Tiny models with the demo's tokenizer."""
    made = {}
    for family, (like, shape, _) in FAMILIES.items():
        folder, base = tmp_path_factory.mktemp(family), demo / "models" / like
        for file in base.iterdir():
            if file.name not in {"config.json", "model.safetensors", "generation_config.json"}:
                shutil.copy(file, folder)
        plain = AutoConfig.from_pretrained(base)
        ids = {key: value for key, value in plain.to_dict().items() if key.endswith("_token_id")}
        size = {"vocab_size": plain.get_text_config().vocab_size}
        keys = {**shape, "text_config": shape["text_config"] | size} if "text_config" in shape else {**shape, **size}
        auto = AutoModelForImageTextToText if "text_config" in keys else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            auto.from_config(AutoConfig.for_model(family, **keys, **ids)).save_pretrained(folder)
        made[family] = folder
    return made


@pytest.fixture
def sections(folders, text_jsonl):
    """Return a function that gives the sections of a run of a family."""

    def of(family: str) -> dict[str, dict]:
        like, _, said = FAMILIES[family]
        data = {} if like.endswith("vl") else {"train_jsonl": str(text_jsonl), "val_jsonl": str(text_jsonl)}
        return {
            "model": {"model": str(folders[family])} | {key: said[key] for key in said if key == "model_type"},
            "template": {"max_length": 512 if like.endswith("vl") else 128, "template": said["template"]},
            "custom": data,
        }

    return of


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_another_family_trains_resumes_and_evaluates_packed_as_padded(write_run, execute, sections, tmp_path, family):
    """Bit for bit after a resume; the loss falls, with layers that are computed again."""
    from packplan.app.sft.prepare import prepare
    from packplan.app.wiring import training

    rest = sections(family)
    whole = execute(write_run("qwen2", name="whole", training=KEYS, **rest))
    losses = [entry["loss"] for entry in whole.history if "loss" in entry]
    assert losses[-1] < losses[0]
    verdict = json.loads((tmp_path / "whole" / "static_packing" / "verdict.json").read_text())["verdict"]
    assert (["Qwen3NextGatedDeltaNet"] if family == "qwen3_next" else []) == verdict["split"]
    assert "varlen" == verdict["strategy"]

    measured = {"packing_lengths_from": str(tmp_path / "whole")}
    again = {**KEYS, **measured, "resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    resumed = execute(write_run("qwen2", name="resumed", training=again, **rest))
    assert losses == [entry["loss"] for entry in resumed.history if "loss" in entry]
    last = f"checkpoint-{whole.num_steps}"
    left, right = (load_file(tmp_path / run / last / "model.safetensors") for run in ("whole", "resumed"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)

    evaluated = []
    for name, keys in (("packed", {}), ("padded", {"packing": False, "per_device_eval_batch_size": 3})):
        path = write_run("qwen2", name=name, training=keys | measured, **rest)
        evaluated.append(prepare(training.read_config(path), OneRank()).trainer.evaluate())
    assert evaluated[0]["eval_tokens"] == evaluated[1]["eval_tokens"]
    assert evaluated[0]["eval_loss"] == pytest.approx(evaluated[1]["eval_loss"], rel=1e-6)


def test_a_family_with_states_and_images_passes_the_check(write_run, sections, few_scenes, capsys):
    """
    Positions, labels, logits, losses, gradients and isolation, the whole way of training, which
    ms-swift refuses without kernels for a GPU.
    """
    rest = sections("qwen3_5")
    rest["custom"] = {"train_jsonl": str(few_scenes)}
    path = write_run(FAMILIES["qwen3_5"][0], training={"num_train_epochs": 1}, **rest)

    assert 0 == check.main([str(path), "--json", "--packs", "1"])
    report = json.loads(capsys.readouterr().out)
    assert "mixed" in {pack["kind"] for pack in report["packs"]}
    checks = {one["check"]: one for one in report["checks"]}
    assert all(one["passed"] for one in checks.values())
    assert checks["isolation"]["worst"] == checks["positions"]["worst"] == 0


def test_a_model_of_several_kinds_asks_for_both_by_key(write_run, execute, sections):
    """ms-swift knows several model types and templates of it; the choices are named."""
    rest = sections("llama")
    del rest["model"]["model_type"], rest["template"]["template"]

    with pytest.raises(ConfigError) as refused:
        execute(write_run("qwen2", **rest))

    faults = {fault.path: fault.reason for fault in refused.value.faults}
    assert {"model.model_type", "template.template"} == set(faults)
    assert "yi" in faults["model.model_type"]
    assert "llama3_2" in faults["template.template"]


def test_a_template_that_does_not_declare_packing_trains_padded_alone(write_run, execute, monkeypatch):
    """It is refused with that reason, before anything is measured."""
    from swift.template import TEMPLATE_MAPPING

    monkeypatch.setattr(TEMPLATE_MAPPING["qwen3"].template_cls, "support_padding_free", False, raising=False)

    with pytest.raises(ConfigError, match=r"template\.template: is qwen3, which ms-swift does not declare"):
        execute(write_run("qwen3"))
    assert execute(write_run("qwen3", training={"packing": False, "max_steps": 1})).num_steps == 1
