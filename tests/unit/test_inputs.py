"""What a run needs and this machine lacks is named at once, before libraries are imported."""

import sys

import pytest
import yaml

from packplan.adapters.config.trainer_keys import device_faults, surely_without_gpu
from packplan.app.wiring.runs import read_config, require_inputs
from packplan.core.errors import ConfigError

GONE = "cannot be read (No such file or directory): name an existing data file"


@pytest.fixture
def run_of(tmp_path):
    """Return a function that writes a run whose inputs are all missing, with changed sections."""

    def write(**sections):
        run = {
            "model": {"model": "gone"},
            "template": {"max_length": 80},
            "custom": {"train_jsonl": ["a.jsonl", "b.jsonl"], "val_jsonl": f"{tmp_path}/*.csv"},
            "training": {"output_dir": str(tmp_path / "run")},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | sections))
        return read_config(tmp_path / "run.yaml")

    return write


def test_all_that_is_missing_is_named_at_once(run_of, tmp_path):
    """The model, every data file of both splits, and what the trainer needs, each with its key."""
    config = run_of(training={"output_dir": str(tmp_path / "run"), "accelerator_config": "ds.json"})

    with pytest.raises(ConfigError) as raised:
        require_inputs(config, trains=True)

    model, *data, file = map(str, raised.value.faults)
    assert "model.model: gone is no folder with a config.json that names a model_type: name such a folder" == model
    assert [
        f"custom.train_jsonl: a.jsonl {GONE}",
        f"custom.train_jsonl: b.jsonl {GONE}",
        f"custom.val_jsonl: {tmp_path}/*.csv matches no file: name existing data files",
    ] == data
    assert file.startswith("training.accelerator_config: is ds.json, which is no file")
    assert not (tmp_path / "run").exists()


def test_what_only_training_needs_does_not_keep_from_planning(run_of, tmp_path):
    """A plan may be built where the trainer could not start."""
    config = run_of(training={"output_dir": str(tmp_path / "run"), "fp16": True, "use_cpu": True})

    with pytest.raises(ConfigError) as raised:
        require_inputs(config)
    assert {"model.model", "custom.train_jsonl", "custom.val_jsonl"} == {fault.path for fault in raised.value.faults}
    with pytest.raises(ConfigError, match=r"training\.fp16: computes in float32 on a CPU, silently: use bf16"):
        require_inputs(config, trains=True)


def test_a_download_is_ms_swift_s_and_its_failure_is_a_fault(run_of, monkeypatch, tmp_path):
    """`model.download: true` asks ms-swift; what it cannot fetch is the user's to see."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr("swift.utils.safe_snapshot_download", {"org/name": str(tmp_path)}.__getitem__)

    assert str(tmp_path) == run_of(model={"model": "org/name", "download": True}).model.model
    with pytest.raises(ConfigError, match=r"model\.model: org/gone cannot be downloaded: 'org/gone'"):
        run_of(model={"model": "org/gone", "download": True})


@pytest.mark.parametrize("driver", ["/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvmap"])
def test_a_gpu_is_missing_only_where_that_is_sure(monkeypatch, driver):
    """A driver's file leaves it to torch; hidden devices and a torch without them do not."""
    monkeypatch.setattr("packplan.adapters.config.trainer_keys.installed_version", lambda _: "2.13.0")
    monkeypatch.setattr(sys, "platform", "linux")

    assert not surely_without_gpu({}, driver.__eq__)
    assert not surely_without_gpu({"CUDA_VISIBLE_DEVICES": "0"}, driver.__eq__)
    assert surely_without_gpu({}, lambda _: False)
    assert surely_without_gpu({"CUDA_VISIBLE_DEVICES": ""}, driver.__eq__)
    assert surely_without_gpu({"CUDA_VISIBLE_DEVICES": "-1"}, driver.__eq__)
    monkeypatch.setattr("packplan.adapters.config.trainer_keys.installed_version", lambda _: "2.13.0+cpu")
    assert surely_without_gpu({}, driver.__eq__)


def test_half_precision_is_refused_on_a_cpu_alone():
    """And so are shards that would be dropped there."""
    settings = {"fp16": True, "fsdp": "full_shard"}

    assert ["training.fp16", "training.fsdp"] == [fault.path for fault in device_faults(settings, on_cpu=True)]
    assert not list(device_faults(settings, on_cpu=False))
