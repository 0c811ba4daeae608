"""Packages and files that a run needs and this machine lacks are named at once."""

import pytest
import yaml

from packplan.adapters.config.trainer_keys import machine_faults
from packplan.app.opening.runs import read_config, require_inputs
from packplan.core.errors import ConfigError
from tests.documents import document

GONE = "cannot be read (No such file or directory): name an existing data file"


@pytest.fixture
def run_of(tmp_path):
    """Return a function that writes a run whose inputs are all missing, with another model."""

    def write(**model):
        keys = {"custom.train_jsonl": ["a.jsonl", "b.jsonl"], "custom.val_jsonl": f"{tmp_path}/*.csv"}
        run = document({f"model.{key}": value for key, value in model.items()} | keys, output_dir=str(tmp_path / "run"))
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        return read_config(tmp_path / "run.yaml")

    return write


def test_all_that_is_missing_is_named_at_once(run_of, tmp_path):
    """The model, and every data file of both splits, each with its key."""
    with pytest.raises(ConfigError) as raised:
        require_inputs(run_of(model="gone"))

    assert [
        "model.model is gone, which is not a folder with a config.json that has a model_type: name such a folder",
        f"custom.train_jsonl cannot be used, since a.jsonl {GONE}",
        f"custom.train_jsonl cannot be used, since b.jsonl {GONE}",
        f"custom.val_jsonl cannot be used, since {tmp_path}/*.csv matches no file: name existing data files",
    ] == [*map(str, raised.value.faults)]
    assert not (tmp_path / "run").exists()


def test_a_download_is_ms_swift_s_and_its_failure_is_a_fault(run_of, monkeypatch, tmp_path):
    """`model.download: true` asks ms-swift; what it cannot fetch is the user's to see."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr("swift.utils.safe_snapshot_download", {"org/name": str(tmp_path)}.__getitem__)

    assert str(tmp_path) == run_of(model="org/name", download=True).model.model
    with pytest.raises(ConfigError, match=r"model\.model is org/gone, which cannot be downloaded: 'org/gone'"):
        run_of(model="org/gone", download=True)


def test_what_this_machine_lacks_or_ignores_is_refused():
    """Packages by the keys that need them; half precision and shards on a CPU alone."""
    settings = {"fp16": True, "fsdp": "full_shard", "use_flash_ckpt": True, "use_liger_kernel": False}

    refused = ["training.use_flash_ckpt", "training.fp16", "training.fsdp"]
    assert refused == [fault.path for fault in machine_faults(settings, on_cpu=True)]
    assert refused[:1] == [fault.path for fault in machine_faults(settings, on_cpu=False)]
