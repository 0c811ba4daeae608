"""Models that nobody knows: own keys, layers, states and code, and what does not fit."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from packplan.adapters.probe import small_model
from packplan.adapters.probe.probe import probe_config
from packplan.adapters.probe.small_model import open_model_config
from packplan.app.wiring.runs import read_config
from packplan.app.wiring.verdicts import require_packing_model
from packplan.core.config.run import ModelConfig
from packplan.core.errors import ConfigError

pytestmark = pytest.mark.slow

SPAN = 4096
"""Tokens that a mechanism reaches, under a key that no rule knows."""


def remembering(plain):
    """Let each token know of the one that is as far before it as the configuration says."""

    def forward(self, *arguments, **options):
        found = plain(self, *arguments, **options)
        span = getattr(self.config, "memory_span", None) or self.config.spans[0]
        seen = found.last_hidden_state
        found.last_hidden_state = torch.cat([seen[:, :span], seen[:, span:] + 1e-3 * seen[:, :-span]], 1)
        return found

    return forward


def stiff(plain, *, with_table=False):
    """Let a model be built with no span below 1,024, perhaps the rows of a table."""

    def init(self, config):
        if config.memory_span < 1024:
            message = "no memory is so short"
            raise ValueError(message)
        plain(self, config)
        if with_table:
            self.slots = torch.nn.Parameter(torch.zeros(config.memory_span, 2))

    return init


@pytest.mark.parametrize("keys", [{"memory_span": SPAN}, {"spans": [SPAN, SPAN]}], ids=["number", "list"])
def test_a_mechanism_under_a_key_that_nobody_knows_is_put_to_work(monkeypatch, keys):
    """It leaks beyond 4,096 tokens, and the samples of the probe have 70 at most."""
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", remembering(modeling_llama.LlamaModel.forward))

    verdict = probe_config(LlamaConfig(num_hidden_layers=2, **keys))

    assert not verdict.passes
    assert verdict.measured.isolation > 0


@pytest.mark.parametrize("with_table", [False, True])
def test_a_length_that_cannot_be_shrunk_is_named_and_refused(monkeypatch, with_table):
    """But where it is a size of weights, which say that it is no length."""
    model = modeling_llama.LlamaForCausalLM
    monkeypatch.setattr(model, "__init__", stiff(model.__init__, with_table=with_table))

    verdict = probe_config(LlamaConfig(memory_span=SPAN, other_span=SPAN))

    assert with_table == verdict.passes
    assert with_table == ("memory_span (4,096)" not in verdict.reason)
    assert "other_span" not in verdict.reason


def test_numbers_that_say_nothing_change_nothing():
    """Keys that other programs leave behind: no model is refused for them, by whatever name."""
    plain = probe_config(LlamaConfig())

    assert plain == probe_config(LlamaConfig(pretraining_tp=4096, release={"steps": 120_000, "batches": [512, 1024]}))


@pytest.mark.parametrize("carries", [0.0, 0.1])
def test_a_layer_that_remembers_from_call_to_call_is_refused(monkeypatch, carries):
    """No gradient passes, and each sample would depend on what was computed before it."""
    plain = modeling_llama.LlamaMLP.forward

    def forward(self, seen):
        last = getattr(self, "last", None)
        self.last = seen[:, -1:].detach()
        return plain(self, seen if last is None else seen + 0.1 * last) + carries * seen.cumsum(1)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)

    verdict = probe_config(LlamaConfig())

    assert not verdict.passes
    assert 0 == verdict.measured.isolation
    assert verdict.measured.equality > 1e-3


def test_a_layer_that_carries_a_state_and_cannot_be_split_is_named(monkeypatch):
    """With the numbers of the leak."""
    plain = modeling_llama.LlamaMLP.forward

    def forward(self, seen):
        calls = self.__dict__.setdefault("calls", [])
        calls.append(seen.shape[1])
        if len(calls) > 3 and calls[-4:] == [33, 3, 70, 51]:
            message = "sample by sample"
            raise RuntimeError(message)
        return plain(self, seen) + 0.1 * seen.cumsum(1)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)

    verdict = probe_config(LlamaConfig())

    assert not verdict.passes
    assert verdict.measured.isolation > 0
    assert "LlamaMLP carries it along the row, and does not run sample by sample" in verdict.reason


def test_a_copy_that_is_too_large_is_refused_before_it_is_built(monkeypatch):
    """With its size."""
    monkeypatch.setattr(small_model, "_MAX_WEIGHTS", 1000)

    verdict = probe_config(LlamaConfig())

    assert not verdict.passes
    assert "more than 1,000" in verdict.reason
    assert verdict.measured is None


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
    (tmp_path / "own.py").write_text(CODE.replace("{leak}", leak).replace("{takes}", takes))
    content = {
        **LlamaConfig(num_hidden_layers=2).to_dict(), "model_type": "own", "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = open_model_config(ModelConfig(model=str(tmp_path), trust_remote_code=True))

    verdict = probe_config(config, trust_remote_code=True)

    assert verdict.passes == ((leak, takes) == ("0.0", ""))
    if takes:
        assert re.search(r"its small copy does not run \(TypeError.*'pixel_values'", verdict.reason)
    else:
        assert (verdict.measured.isolation > 0) == (leak == "0.1")


def test_a_configuration_of_more_layers_than_the_weights_have_is_refused(demo, write_run, tmp_path):
    """Before it is asked: what trains would be random numbers, in part."""
    shutil.copytree(demo / "models" / "qwen2", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}))
    config = read_config(write_run("qwen2", model={"model": str(tmp_path / "model")}))

    with pytest.raises(ConfigError, match=r"config\.json of 4 layers \(num_hidden_layers\) beside weights of 2"):
        require_packing_model(config)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file({name.replace("layers.0", "layers.3"): one for name, one in weights.items()}
              | weights | {name.replace("layers.1", "layers.2"): one.clone() for name, one in weights.items()},
              tmp_path / "model" / "model.safetensors")  # fmt: skip
    assert require_packing_model(config).passes
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\xff" * 64)
    path.write_text(json.dumps({**content, "rms_norm_eps": 1e-5}))
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off or no file of weights"):
        require_packing_model(config)
