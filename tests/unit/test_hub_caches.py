"""Models are found in hubs' local caches, in each layout, without their libraries."""

from pathlib import Path

import pytest

from packplan.adapters.model_folder import config_model_type, download_command, find_cached_model, is_hub_id
from packplan.app.opening.runs import _resolve_model
from packplan.core.config.run import ModelConfig
from packplan.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _empty_caches(tmp_path, monkeypatch):
    """Let both hubs' caches be in a folder of the test."""
    for name in ("HF_HUB_CACHE", "USE_HF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))


def hold(folder: Path) -> Path:
    """Make a folder with a file in it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


LAYOUTS = [
    "hf/hub/models--org--na.me/snapshots/abc", "ms/models/org--na.me/snapshots/master",
    "ms/models/org--na.me/snapshots/abc", "ms/models/org/na___me", "ms/hub/models/org/na___me", "ms/hub/org/na___me",
    "ms/models/org/na.me",
]  # fmt: skip
"""Of both hubs, and of earlier versions of their libraries."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_found_in_each_layout(tmp_path, layout):
    assert find_cached_model("org/na.me") is None
    assert hold(tmp_path / layout) == find_cached_model("org/na.me")


def test_the_revision_of_main_and_the_preferred_hub_come_first(tmp_path, monkeypatch):
    """As Hugging Face's library reads `refs/main`, and ms-swift `USE_HF`."""
    hold(tmp_path / "hf/hub/models--org--name/snapshots/new")
    named = hold(tmp_path / "hf/hub/models--org--name/snapshots/old")
    (tmp_path / "hf/hub/models--org--name/refs").mkdir()
    (tmp_path / "hf/hub/models--org--name/refs/main").write_text("old\n")
    other = hold(tmp_path / "ms/models/org/name")

    assert other == find_cached_model("org/name")
    monkeypatch.setenv("USE_HF", "1")
    assert named == find_cached_model("org/name")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "else"))
    assert other == find_cached_model("org/name")


def test_what_is_missing_comes_with_the_command_that_downloads_it(tmp_path, monkeypatch):
    """Of the hub that comes first, and never for a path."""
    monkeypatch.chdir(tmp_path)
    assert [True, False, False, False] == [is_hub_id(name) for name in ("org/name", "/org/name", "./org", "org/a/b")]
    hold(tmp_path / "org" / "name")
    assert not is_hub_id("org/name")
    with pytest.raises(ConfigError, match=r"`modelscope download --model org/other`, or set model.download: true"):
        config_model_type(_resolve_model(ModelConfig(model="org/other")))
    monkeypatch.setenv("USE_HF", "true")
    assert "hf download org/name" == download_command("org/name")
