"""The trainer's settings are checked by the installed table; no traceback."""

import math
from pathlib import Path

import pytest

from packplan.adapters.config.trainer_keys import SFT_KEYS_FILE, read_key_table
from packplan.adapters.trainer.arguments import installed_keys
from packplan.app import sft
from packplan.app.wiring import runs
from packplan.app.wiring.runs import read_config
from packplan.app.wiring.trainers import open_arguments
from packplan.core.errors import ConfigError
from tests.documents import parsed
from tools.configuration import trainer_table

KEYS = installed_keys()

pytestmark = pytest.mark.covers


def configured(**training):
    """Return a run with these settings, as far as its YAML is good."""
    return parsed(**{"report_to": [], **training})


def arguments_of(config):
    """Return the trainer's arguments of a run."""
    return open_arguments(config, world_size=1)


def test_the_table_is_that_of_the_installed_library():
    """`make reference` writes it; other versions are asked themselves."""
    assert SFT_KEYS_FILE.read_text(encoding="utf-8") == trainer_table()
    assert KEYS == read_key_table()
    assert len(KEYS) > 150


def test_another_version_is_asked_itself(tmp_path: Path, monkeypatch):
    """Also for keys that the table does not have."""
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {model: m}\ntemplate: {max_length: 8}\ncustom: {train_jsonl: t}\ntraining: {output_dir: o, bf16: 3}\n"
    )
    monkeypatch.setattr(runs, "read_key_table", lambda: None)

    with pytest.raises(ConfigError, match=r"training.bf16: is 3, but has to be true or false"):
        read_config(run)


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("value", [math.nan, -1, "zigzag", ["zigzag"], {"a": 1}, True])
def test_no_value_of_any_setting_ends_in_a_traceback(value):
    """A setting is refused by its key, or taken by the trainer's arguments."""
    with pytest.raises(ConfigError) as raised:
        configured(**dict.fromkeys(KEYS, value))
    faults = [*raised.value.faults]
    for key in KEYS.keys() - {fault.path.removeprefix("training.") for fault in faults}:
        try:
            arguments_of(configured(**{key: value}))
        except ConfigError as error:
            faults += error.faults
    assert all(fault.path.startswith("training") and fault.reason for fault in faults)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"optim": "adamw_torch_npu_fused"},
         r"training.optim: cannot be used: .*torch_npu.*; change training.optim or training.optim_args, or"),
        ({"optim_args": "zigzag"}, r"change training.optim or training.optim_args"),
        ({"lr_scheduler_type": "cosine_with_min_lr"},
         "training.lr_scheduler_type: cannot be used: .*min_lr.*training.lr_scheduler_kwargs"),
        ({"lr_scheduler_kwargs": {"zigzag": 1}},
         "training.lr_scheduler_type: cannot be used: .*unexpected keyword argument 'zigzag'"),
        ({"torch_compile_backend": "zigzag"},
         "training.torch_compile: cannot be used: 'ZIGZAG' is not a valid DynamoBackend"),
        ({"max_shard_size": "zigzag"}, "training.max_shard_size: cannot be used: 'zigzag' is no size, as 5GB is"),
        ({"report_to": ["kubeflow"]}, "training.report_to: cannot be used: Kubeflow"),
        ({"accelerator_config": "gone.json"}, "No such file or directory: 'gone.json'"),
    ],
)  # fmt: skip
def test_what_the_trainer_uses_late_is_tried_before_measuring(training, says):
    """Optimizer, schedule, compilation, services, sizes: by the keys that change it."""
    with pytest.raises(ConfigError, match=says):
        arguments_of(configured(**training))


@pytest.mark.slow
def test_what_the_trainer_refuses_is_no_traceback(write_run, text_jsonl, capfd):
    """Where it is built."""
    data = {"train_jsonl": str(text_jsonl), "val_jsonl": str(text_jsonl)}
    assert 2 == sft.main([str(write_run("qwen2", custom=data, training={"max_steps": 1, "save_strategy": "best"}))])

    assert (
        "training: is refused by the trainer: `args.metric_for_best_model` must be provided" in capfd.readouterr().err
    )
