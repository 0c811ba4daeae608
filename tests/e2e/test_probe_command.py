"""`packplan probe`: what it prints, its exit status, and what it reads."""

import json

import pytest

from packplan.app import probe
from tools.families import default_config

pytestmark = pytest.mark.slow


@pytest.fixture
def config_of(tmp_path):
    """Return a function that writes the config.json of a family, and no weights."""

    def write(family):
        default_config(family).save_pretrained(tmp_path / family)
        return tmp_path / family

    return write


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_model_that_keeps_samples_apart_is_proven(config_of, capsys):
    """By folder and by config.json: every attention that runs here, and why others do not."""
    assert 0 == probe.main([str(config_of("llama"))])
    head, *rows = lines_of(capsys)
    assert 0 == probe.main([str(config_of("llama") / "config.json")])

    assert ["backend", "packs", "isolation", "equality", "seconds", "how"] == head.split()
    assert ["auto", "varlen", "sdpa", "eager"] == [row.split()[0] for row in rows[:4]]
    assert all(row.split()[1:3] == ["yes", "0"] for row in rows[:4])
    assert rows[0].endswith("varlen, by itself")
    assert "flex_attention: not run, since flex attention has no backward pass on a CPU" in rows
    assert not any("mixed" in row for row in rows)


def test_a_layer_that_mixes_is_named_where_packplan_splits_it_too(config_of, capsys):
    """Somebody who trains elsewhere has no Packplan in between."""
    assert 0 == probe.main([str(config_of("qwen3_next")), "--json"])
    found = json.loads(capsys.readouterr().out)

    assert found["passed"]
    mixing = {one["backend"]: (one["packs"], one["by_itself"], one["mixes_in"]) for one in found["backends"]}
    for name in ("auto", "varlen", "sdpa", "eager"):
        assert (True, False, "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)") == mixing[name]
    assert found["backends"][0]["verdict"]["split"] == ["Qwen3NextGatedDeltaNet"]


@pytest.mark.parametrize(
    ("family", "where"),
    {
        "bloom": "transformer.h.0.self_attention (BloomAttention)",
        "llama4_text": "self_attn (Llama4TextAttention)",
    }.items(),
)
def test_a_model_that_leaks_ends_with_3_and_names_the_layer(config_of, capsys, family, where):
    """By gradients; or, where no gradient passes, by what differs from the sample alone."""
    assert 3 == probe.main([str(config_of(family))])

    printed = capsys.readouterr()
    assert "auto     no" in printed.out
    assert printed.err.splitlines()[-1].endswith(where)
    assert "set training" not in printed.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_compute_in_the_type_that_is_asked_for(config_of, capsys, dtype):
    """Their differences are of that type's size, and the isolation stays exactly 0."""
    assert 0 == probe.main([str(config_of("llama")), "--dtype", dtype, "--device", "cpu", "--json"])
    auto = json.loads(capsys.readouterr().out)["backends"][0]["verdict"]["measured"]

    assert 0 == auto.pop("isolation")
    assert 1e-4 < max(auto.values()) < 1e-1


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "nowhere": "nowhere, which is no folder with a config.json",
        "some/model": "in a local cache: download it",
    }.items(),
)
def test_a_model_that_is_not_here_is_named_before_anything_is_loaded(capsys, monkeypatch, name, said):
    """With what downloads it, if it is an id."""
    monkeypatch.setattr(probe, "loading_libraries", None)

    assert 2 == probe.main([name])
    assert said in capsys.readouterr().err


def test_a_configuration_that_transformers_refuses_is_an_error(tmp_path, capsys):
    """A fault of the input, and no leak."""
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')

    assert 2 == probe.main([str(tmp_path)])
    assert "transformers refuses" in capsys.readouterr().err


def test_a_gpu_that_is_not_here_is_a_fault_of_the_command(config_of, monkeypatch, capsys):
    """Torch's own error names neither the option nor a way out."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert 2 == probe.main([str(config_of("llama")), "--device", "cuda"])

    assert "--device: is cuda, but torch finds no such GPU here" in capsys.readouterr().err
