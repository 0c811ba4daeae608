"""`packplan probe`: what it prints, its exit status, and what it reads."""

import json

import pytest
import torch
from transformers import LlamaConfig

from packplan.app import probe
from tools.families import default_config

pytestmark = pytest.mark.slow


@pytest.fixture
def probed(tmp_path, capsys):
    """Return a function that probes the config.json of a family, without weights."""

    def run(config, *options, file=""):
        (default_config(config) if isinstance(config, str) else config).save_pretrained(tmp_path)
        return probe.main([str(tmp_path / file), *options]), capsys.readouterr()

    return run


@pytest.mark.parametrize("file", ["", "config.json"])
def test_a_model_that_keeps_samples_apart_is_proven(probed, file):
    """By folder and by config.json: every attention that runs here, and why others do not."""
    status, printed = probed("llama", file=file)

    head, *rows = printed.out.splitlines()
    assert 0 == status
    assert ["backend", "packs", "isolation", "equality", "seconds", "how"] == head.split()
    assert [[name, "yes", "0"] for name in ("auto", "varlen", "sdpa", "eager")] == [row.split()[:3] for row in rows[:4]]
    assert rows[0].endswith("varlen, by itself")
    assert "flex_attention: not run, since flex attention has no backward pass on a CPU" in rows
    assert not any("mixed" in row for row in rows)


def test_a_layer_that_mixes_is_named_where_packplan_splits_it_too(probed):
    """Somebody who trains elsewhere has no Packplan in between."""
    status, printed = probed("lfm2", "--json")

    found = json.loads(printed.out)
    assert (0, True) == (status, found["passed"])
    mixing = {one["backend"]: (one["packs"], one["by_itself"], one["mixes_in"]) for one in found["backends"]}
    for name in ("auto", "varlen", "sdpa", "eager"):
        assert (True, False, "model.layers.0.conv (Lfm2ShortConv)") == mixing[name]
    assert found["backends"][0]["verdict"]["split"] == ["Lfm2ShortConv"]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ("bloom", "transformer.h.0.self_attention (BloomAttention)"),
        (LlamaConfig(rope_parameters=DYNAMIC), "model.rotary_emb (LlamaRotaryEmbedding)"),
    ],
)
def test_a_model_that_leaks_ends_with_3_and_names_the_layer(probed, config, where):
    """By gradients; or, where no gradient passes, by what differs from the sample alone."""
    status, printed = probed(config)

    assert 3 == status
    assert "auto     no" in printed.out
    assert printed.err.splitlines()[-1].endswith(where)
    assert "set training" not in printed.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_compute_in_the_type_that_is_asked_for(probed, dtype):
    """Their differences are of that type's size, and the isolation stays exactly 0."""
    status, printed = probed("llama", "--dtype", dtype, "--device", "cpu", "--json")

    auto = json.loads(printed.out)["backends"][0]["verdict"]["measured"]
    assert (0, 0) == (status, auto.pop("isolation"))
    assert 1e-4 < max(auto.values()) < 1e-1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere, which is not a folder with a config.json"),
        (["some/model"], "in a local cache: download it"), (["{folder}"], "transformers refuses"),
        pytest.param(
            ["{folder}", "--device", "cuda"], "--device is cuda, but torch finds no such GPU on this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_probed_is_a_fault_of_the_command(tmp_path, capsys, arguments, said):
    """A model or GPU that is not here, and a configuration that transformers refuses: no leak."""
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')

    assert 2 == probe.main([one.format(folder=tmp_path) for one in arguments])
    assert said in capsys.readouterr().err
