"""Configurations are not written out for lines of a log that nobody reads."""

import torch
from transformers import PreTrainedConfig

from packplan.adapters.probe import open_model_config, probe_config
from packplan.adapters.samples.template import open_template
from packplan.adapters.trainer.model import open_model
from packplan.core.config import ModelConfig, TemplateConfig, TrainingConfig
from packplan.core.equality import AttentionChoice


def test_no_configuration_is_written_out_while_a_model_is_asked_and_opened(demo, monkeypatch):
    """Neither the whole one nor its parts: by the probe, the template, and with the weights."""
    plain, written = PreTrainedConfig.to_json_string, []
    monkeypatch.setattr(PreTrainedConfig, "to_json_string", lambda *a, **o: written.append(a) or plain(*a, **o))
    model = ModelConfig(model=str(demo / "models" / "qwen2_5_vl"))
    cpu = torch.device("cpu")

    assert probe_config(open_model_config(model), attn_impl="varlen").passes
    open_template(model, TemplateConfig(max_length=64), packing_length=64)
    open_model(model, TrainingConfig(output_dir="none"), attention=AttentionChoice("sdpa"), device=cpu)

    assert [] == written
    assert "{" in repr(open_model_config(model))
    assert written
