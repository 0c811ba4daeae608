"""Each tuner that is offered trains, saves, resumes bit for bit, and passes `packplan check`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from packplan.adapters.models import plain_model
from packplan.adapters.trainer.model import open_model
from packplan.app import check, sft
from packplan.app.opening.runs import read_config
from packplan.app.opening.verdicts import decide_attention
from packplan.core.errors import ConfigError
from tests.e2e.test_resume import assert_equal, weights
from tests.processes import finished

pytestmark = [
    pytest.mark.filterwarnings("ignore:PiSSA changes the base weights:UserWarning"),  # to save adapters without it
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor:UserWarning"),  # to its default
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension:UserWarning"),  # of BOFT, which needs none
]

LORA = {"tuner_type": "lora", "lora_rank": 2}

TUNERS = {
    "dora": ("qwen2", {**LORA, "use_dora": True}, "lora_magnitude_vector"),
    "rslora and lora+": ("qwen3", {**LORA, "use_rslora": True, "lorap_lr_ratio": 16}, "lora_B"),
    "modules_to_save": (
        "qwen2", {**LORA, "target_regex": r".*\.[qv]_proj", "modules_to_save": ["lm_head", "all-norm"]},
        "modules_to_save",
    ),
    "target_parameters": (
        "qwen3", {**LORA, "target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"], "lora_dropout": 0},
        "q_proj",
    ),
    "ratio": ("qwen2", {"freeze_parameters_ratio": 0.5, "trainable_parameters_regex": "embed"}, "embed"),
    "a start from the weights": ("qwen3", {**LORA, "init_weights": "pissa"}, "lora_A"),
    "boft": ("qwen2", {"tuner_type": "boft", "boft_block_size": 8}, "boft_R"),
    "adapter": ("qwen3", {"tuner_type": "adapter", "adapter_length": 8}, "linear1"),
    "llamapro": ("qwen3", {"tuner_type": "llamapro", "llamapro_num_new_blocks": 1}, "layers.2"),
    "rates": ("qwen2_5_vl", {"vit_lr": "1e-3", "aligner_lr": "1e-4"}, "visual"),
}  # fmt: skip
"""Name -> model, keys of `training.`, and what some trained weight is called."""


OTHERS = {
    "vera": ("qwen3", {"tuner_type": "vera", "vera_rank": 8}, "vera_lambda"),
    "fourierft": ("qwen3", {"tuner_type": "fourierft", "fourier_n_frequency": 50}, "fourierft_spectrum"),
    "ia3": ("qwen2_5_vl", {"tuner_type": "ia3"}, "ia3_l"), "dummy": ("qwen2", {"tuner_type": "dummy"}, "embed"),
    "biases": ("qwen2", {**LORA, "lora_bias": "all"}, "q_proj.base_layer.bias"),
    "prefixes": (
        "qwen3", {"freeze_parameters": ["model.layers.0"], "freeze_parameters_regex": "norm",
                  "trainable_parameters": ["model.norm"]}, "model.norm",
    ),
    "rates of adapters": ("qwen2_5_vl", {**LORA, "vit_lr": "1e-3", "freeze_aligner": True}, "visual"),
    "tower": ("qwen2_5_vl", {"freeze_vit": True}, "language_model"),
    "text": ("qwen2_5_vl", {"freeze_llm": True}, "visual"),
    "adapters everywhere": ("qwen2_5_vl", LORA, "visual"),
    "adapters of the text": ("qwen2_5_vl", {**LORA, "freeze_vit": True, "freeze_aligner": True}, "language_model"),
    **{
        f"a start as {name}": ("qwen3", {**LORA, "init_weights": name}, "lora_B")
        for name in ("gaussian", "false", "pissa_niter_2", "olora")
    },
    "more tokens": ("qwen2", {"new_special_tokens": [f"<{number}>" for number in range(200)]}, "embed"),
    "longer texts": ("qwen3", {"rope_scaling": '{"rope_type": "yarn", "factor": 2.0}'}, "embed"),
    "texts of a length": ("qwen2", {"rope_scaling": '{"rope_type": "yarn"}', "max_model_len": 70_000}, "embed"),
}  # fmt: skip
"""The same of tuners that add weights as others do or none, and of freezes."""


@pytest.fixture(autouse=True)
def _builds_here(monkeypatch, tmp_path):
    """Let peft try to build BOFT's extension in a folder of the test."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def opened(path):
    """Return the model of a run, with its tuner."""
    config = read_config(path)
    attention = decide_attention(config, isolated=False)
    return open_model(config.model, config.training, attention=attention, device=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNERS)
def test_a_tuner_trains_saves_resumes_and_passes_the_check(write_run, execute, few_scenes, tmp_path, name):
    """The resumed run ends with the same weights; packed samples equal themselves alone."""
    model, keys, _ = TUNERS[name]
    several = {**keys, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": "1e-2",
               "packing_drop_last": False}  # fmt: skip
    small = {"template": {"max_length": 128}}
    if model.endswith("vl"):
        small = {"template": {"max_length": 400}, "custom": {"train_jsonl": str(few_scenes)}}
    execute(whole := write_run(model, name="whole", training=several, **small))
    again = {**several, "resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-1"), "save_steps": 2}
    resumed = execute(write_run(model, name="resumed", training=again, **small))

    assert_equal(*(tmp_path / run / "checkpoint-2" for run in ("resumed", "whole")))
    before, after = (weights(tmp_path / "whole" / f"checkpoint-{step}") for step in (1, 2))
    assert any(not torch.equal(after[key], before[key]) for key in after)
    report = check.compare_packs(read_config(whole), resumed.trainer, resumed.planned["train"], num_packs=1)
    assert report.passed, [verdict for verdict in report.verdicts if not verdict.passed]


def described(model):
    """Return each weight's name, shape and training -> whether it is not 0; norms of all others."""
    return {f"{name} of positions": float(held.float().norm()) for name, held in model.named_buffers()} | {
        f"{name} {tuple(weight.shape)} {weight.requires_grad}": float(
            weight.any() if weight.requires_grad else weight.norm()
        )
        for name, weight in model.named_parameters()
    }


def ask_ms_swift(runs, out):
    """Write how ms-swift describes the weights of each model with its keys of tuners."""
    from swift.pipelines import SwiftSft

    found = []
    for folder, name, keys in runs:
        kind = name if name.endswith("vl") else "qwen2_5" if name == "qwen2" else name
        words = ["--model", folder, "--model_type", name, "--template", kind, "--dataset", "none.jsonl",
                 "--output_dir", f"{out}.runs", "--report_to", "none"]  # fmt: skip
        for key, value in keys.items():
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
        pipeline = SwiftSft(words)
        found.append(described(pipeline.prepare_model(pipeline.args, pipeline.model)))
    Path(out).write_text(json.dumps(found))


def test_weights_that_ms_swift_would_train_are_those_that_train(server, write_run, tmp_path):
    """By name, shape and how they start, beside frozen ones that change; asked of ms-swift."""
    asked, mine = [], []
    for number, (model, keys, trained) in enumerate([*TUNERS.values(), *OTHERS.values()]):
        section = "model" if keys.keys() & {"new_special_tokens", "rope_scaling"} else "training"
        path = write_run(model, name=f"run{number}", **{section: keys})
        tuned = opened(path)
        assert type(plain_model(tuned)).__name__.startswith("Qwen")
        mine.append(described(tuned))
        assert any(trained in name for name in mine[-1] if name.endswith("True"))
        unfrozen = {"tuner_type": "full", "freeze_vit": False, "freeze_aligner": False}
        asked.append((read_config(path).model.model, model, unfrozen | keys))
    out = tmp_path / "trained.json"
    assert [0] == finished([server.start(ask_ms_swift, asked, str(out), log=tmp_path / "swift.log")])

    assert mine == [pytest.approx(one, rel=1e-2) for one in json.loads(out.read_text())]


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("freeze_parameters", {"freeze_parameters": ["zigzag"]}),
        ("freeze_parameters", {"freeze_parameters": ["model", "lm_head"]}),
        ("freeze_parameters_regex", {"freeze_parameters_regex": "zigzag"}),
        ("freeze_vit", {"freeze_vit": True}),
        ("modules_to_save", {**LORA, "modules_to_save": ["zigzag"]}),
        ("target_modules", {**LORA, "target_modules": ["gone"]}),
        ("target_modules", {"tuner_type": "vera", "target_modules": ["gone"]}),
        ("target_regex", {**LORA, "target_regex": "zigzag"}),
        ("tuner_type", {"tuner_type": "llamapro", "llamapro_num_new_blocks": 5}),
    ],
)
def test_tuners_that_name_nothing_are_refused(write_run, key, keys):
    """By the key that names what the model does not have."""
    with pytest.raises(ConfigError, check=lambda error: [f"training.{key}"] == [one.path for one in error.faults]):
        opened(write_run("qwen2", training=keys))


def test_quantised_weights_are_refused_on_a_cpu(write_run, capfd):
    """By their key, with exit status 2."""
    path = write_run("qwen2", training=LORA, model={"quant_method": "bnb", "quant_bits": 4})

    assert 2 == sft.main([str(path)])

    assert "model.quant_method works only on a GPU" in capfd.readouterr().err


def export(words):
    """Run `swift export` on the words of a command."""
    from swift.pipelines import export_main

    export_main(words)


@pytest.mark.slow
def test_ms_swift_merges_the_adapters_of_a_checkpoint(server, write_run, execute, tmp_path):
    """`swift export --merge_lora true` gives the model's weights plus what the adapters add."""
    keys = {**LORA, "max_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": "1e-2",
            "target_modules": ["q_proj"], "packing_drop_last": False, "lr_scheduler_type": "constant"}  # fmt: skip
    path = write_run("qwen2", name="run", training=keys)
    execute(path)
    checkpoint, model = tmp_path / "run" / "checkpoint-1", read_config(path).model.model
    words = ["--adapters", str(checkpoint), "--model", model, "--model_type", "qwen2", "--template", "qwen2_5",
             "--merge_lora", "true", "--output_dir", str(tmp_path / "merged"), "--torch_dtype", "float32"]  # fmt: skip

    assert [0] == finished([server.start(export, words, log=tmp_path / "swift.log")])

    added, before, merged = weights(checkpoint), load_file(f"{model}/model.safetensors"), weights(tmp_path / "merged")
    name = "model.layers.0.self_attn.q_proj"
    low, high = (added[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    scale = 32 / 2
    torch.testing.assert_close(merged[f"{name}.weight"], before[f"{name}.weight"] + scale * high @ low)
    assert not torch.equal(merged[f"{name}.weight"], before[f"{name}.weight"])
