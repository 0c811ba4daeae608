"""The trainer's settings are checked by the installed table; no traceback."""

import math

import pytest

from packplan.adapters.config.trainer_keys import SFT_KEYS_FILE, read_key_table
from packplan.adapters.samples.arguments import run_arguments
from packplan.adapters.trainer.arguments import installed_keys
from packplan.app import sft
from packplan.app.opening.runs import trainer_keys
from packplan.app.opening.trainers import open_arguments
from packplan.core.config.tuners import UNSET
from packplan.core.errors import ConfigError
from tests.documents import faults_of, parsed
from tools.configuration import trainer_table

KEYS = installed_keys()

pytestmark = pytest.mark.covers


@pytest.fixture
def arguments_of(demo):
    """Return a function that opens the trainer's arguments of a run with some settings."""
    model = {"model.model": str(demo / "models" / "qwen2")}
    return lambda **training: open_arguments(parsed(model, **{"report_to": [], **training}), world_size=1)


def test_the_table_is_that_of_the_installed_library(tmp_path):
    """`make reference` writes it; other versions are asked themselves."""
    text = SFT_KEYS_FILE.read_text(encoding="utf-8")
    assert text == trainer_table()
    assert len(KEYS) > 150
    other = tmp_path / "keys.json"
    other.write_text(text.replace('"ms-swift": "', '"ms-swift": "0.').replace('"bf16": {', '"bf17": {'))
    assert KEYS == read_key_table() == trainer_keys(other)


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("value", [math.nan, -1, "zigzag", ["zigzag"], {"a": 1}, True])
def test_no_value_of_any_setting_ends_in_a_traceback(arguments_of, value):
    """A setting is refused by its key, or taken by the trainer's arguments."""
    faults = faults_of(**dict.fromkeys(KEYS, value))
    for key in KEYS.keys() - {path.removeprefix("training.") for path in faults}:
        try:
            arguments_of(**{key: value})
        except ConfigError as error:
            faults |= {fault.path: fault.reason for fault in error.faults}
    assert all(path.startswith("training") and reason for path, reason in faults.items())


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"optim": "adamw_torch_npu_fused"},
         r"training.optim cannot be used: .*torch_npu.*; change or remove training.optim or training.optim_args"),
        ({"optim_args": "zigzag"}, r"change or remove training.optim or training.optim_args"),
        ({"lr_scheduler_type": "cosine_with_min_lr"},
         "training.lr_scheduler_type cannot be used: .*min_lr.*training.lr_scheduler_kwargs"),
        ({"lr_scheduler_kwargs": {"zigzag": 1}},
         "training.lr_scheduler_type cannot be used: .*unexpected keyword argument 'zigzag'"),
        ({"torch_compile_backend": "zigzag"},
         "training.torch_compile cannot be used: 'ZIGZAG' is not a valid DynamoBackend"),
        ({"max_shard_size": "zigzag"}, "training.max_shard_size cannot be used: 'zigzag' is not a size such as 5GB"),
        ({"report_to": ["kubeflow"]}, "training.report_to cannot be used: Kubeflow"),
        ({"accelerator_config": "gone.json"}, "accelerator_config is gone.json, but there is no such file"),
    ],
)  # fmt: skip
def test_what_the_trainer_uses_late_is_tried_before_measuring(arguments_of, training, says):
    """Optimizer, schedule, compilation, services, sizes: by the keys that change it."""
    with pytest.raises(ConfigError, match=says):
        arguments_of(**training)


@pytest.mark.slow
def test_what_the_trainer_refuses_is_no_traceback(write_run, text_jsonl, capfd):
    """Where it is built."""
    data = {"train_jsonl": str(text_jsonl), "val_jsonl": str(text_jsonl)}
    assert 2 == sft.main([str(write_run("qwen2", custom=data, training={"max_steps": 1, "save_strategy": "best"}))])

    assert "training is refused by the trainer: `args.metric_for_best_model` must be provided" in capfd.readouterr().err


def test_defaults_of_tuners_that_are_compared_are_those_that_train(demo):
    """Ranks and checkpoints compare them where a run sets none; an empty list is none."""
    config = parsed({"model.model": str(demo / "models" / "qwen2")}, tuner_type="lora")
    opened = run_arguments(config.model, config.training)

    assert {**UNSET} == {name: [] if (value := getattr(opened, name)) is None else value for name in UNSET}
