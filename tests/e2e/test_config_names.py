"""Configurations are not written out for lines of a log that nobody reads."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from packplan.adapters.config_names import configs_by_name
from packplan.adapters.probe import open_model_config, probe_config
from packplan.adapters.samples.template import open_template
from packplan.adapters.trainer.model import open_model
from packplan.core.config import ModelConfig, TemplateConfig, TrainingConfig
from packplan.core.equality import AttentionChoice


def test_a_configuration_is_its_name_inside_alone():
    """Outside it is written out as ever: before, after, and where the body fails."""
    config, message = LlamaConfig(num_hidden_layers=7), "planted"
    whole = repr(config)
    assert '"num_hidden_layers": 7' in whole

    with pytest.raises(ValueError, match=message), configs_by_name():
        assert "LlamaConfig" == f"{config}"
        raise ValueError(message)

    assert whole == repr(config)


def test_where_transformers_logs_what_it_opens_it_is_written_out():
    """Whoever asks for those lines has them."""
    config, before = LlamaConfig(), transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    try:
        with configs_by_name():
            assert "{" in repr(config)
    finally:
        transformers_logging.set_verbosity(before)


@pytest.mark.parametrize("first", [0, 1])
def test_threads_that_are_inside_at_a_time_leave_it_as_it_was(first):
    """Whichever leaves last: in either order, as threads may."""
    config, entered = LlamaConfig(), [configs_by_name(), configs_by_name()]
    for context in entered:
        context.__enter__()
    assert "LlamaConfig" == repr(config)
    for context in (entered[first], entered[1 - first]):
        context.__exit__(None, None, None)

    assert "{" in repr(config)


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
