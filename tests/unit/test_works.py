"""Work of a run's samples, and the point where its ranks meet, as its YAML and its model say."""

import json
import logging

import attrs
import numpy as np
import pytest

from packplan.app.opening.policies import policy_of_split, work_of_run
from packplan.app.planning.epochs import works_of_records
from packplan.app.planning.schedule import balanced_sync_point, partial_window_line, zero_stage
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.work.model import WorkModel
from tests.strategies import plain_schedule

TEXT = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100}  # fmt: skip

TOWER = {"embed_dim": 32, "spatial_merge_size": 2, "hidden_size": 64, "depth": 2, "mlp_ratio": 4, "patch_size": 14}

SEEING = {"model_type": "qwen2_vl", "text_config": TEXT, "vision_config": TOWER}

TABLE = np.array([[8, 4, 0, 0, 0, 0, 0, 0], [3, 1, 1, 16, 0, 0, 0, 0]], dtype=np.int32)
"""Length, supervised, images, patches, cut, and nothing of videos."""


def run(model: str = "none", **training) -> RunConfig:
    return RunConfig(
        model=ModelConfig(model=model),
        template=TemplateConfig(max_length=80),
        custom=CustomConfig(train_jsonl=("data.jsonl",)),
        training=TrainingConfig(output_dir="out", **training),
    )


@pytest.mark.parametrize(
    ("training", "meeting"),
    [
        ({}, "step"),
        ({"packing_balance": "none"}, None),
        ({"packing": False}, None),
        ({"packing_balance": "microbatch"}, "microbatch"),
        ({"packing_balance": "step", "trainer": {"fsdp": "full_shard"}}, "step"),
        ({"trainer": {"fsdp": "full_shard"}}, "microbatch"),
        ({"trainer": {"deepspeed": {"zero_optimization": {"stage": 1}}}}, "step"),
        ({"trainer": {"deepspeed": {"zero_optimization": {"stage": 2}}}}, "microbatch"),
        ({"trainer": {"deepspeed": {"train_batch_size": "auto"}}}, "step"),
        ({"trainer": {"deepspeed": "no such file.json"}}, "step"),
        ({"trainer": {"deepspeed": "zero.json"}}, "microbatch"),
    ],
)
def test_the_trainers_strategy_says_where_ranks_meet(tmp_path, training, meeting):
    """FSDP, and DeepSpeed from stage 2 on, meet in each microbatch; a value that is set counts."""
    if training.get("trainer") == {"deepspeed": "zero.json"}:
        path = tmp_path / "zero.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
        training = {"trainer": {"deepspeed": str(path)}}

    assert meeting == balanced_sync_point(run(**training))


def test_settings_of_deepspeed_that_name_no_stage_are_of_stage_zero(tmp_path):
    """Nor are those of a file of more than some MiB, which is not read."""
    (tmp_path / "large.json").write_text(" " * 2**22 + json.dumps({"zero_optimization": {"stage": 3}}))
    files = "no such file.json", str(tmp_path / "large.json")
    settings = None, *files, {"train_batch_size": 8}, {"zero_optimization": {}}

    assert [0] * len(settings) == list(map(zero_stage, settings))
    assert 1 == zero_stage({"zero_optimization": {"stage": 1}})


@pytest.mark.parametrize(
    ("training", "passes"),
    [({}, {}), ({"freeze_llm": True}, {"text": False}),
     ({"freeze_vit": True}, {"vision": False, "vision_gradients": False}),
     ({"tuner_type": "lora"}, {"text": False, "vision": False})],
)  # fmt: skip
def test_work_is_that_of_the_models_sizes(tmp_path, training, passes):
    """Forward and backward; what is frozen needs no gradients of its own."""
    (tmp_path / "config.json").write_text(json.dumps(SEEING))
    model = WorkModel.from_config(SEEING).trained(**passes)

    work, estimated = work_of_run(run(str(tmp_path), **training))

    assert (model, None) == (work, estimated)
    assert model.sample_flops([8]).tolist() == works_of_records(work, TABLE[:1]).flops.tolist()


def test_a_model_that_is_not_known_counts_tokens_and_squares(tmp_path):
    """And says why: no folder, or a key whose work is not known; the width is still taken."""
    assert "is not a folder with a config.json" in work_of_run(run())[1]
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, "num_memory_layers": 4}))

    work, estimated = work_of_run(run(str(tmp_path)))

    assert "the effect of num_memory_layers in its config.json on the work is not known" in estimated
    per_layer = 2 * 12 * 64**2
    assert WorkModel(2 * per_layer, 4 * 2 * 64) == WorkModel.estimated(TEXT)
    assert WorkModel.estimated(TEXT).trained() == work
    assert WorkModel.estimated({}) == WorkModel.estimated({"hidden_size": [64], "num_hidden_layers": {"text": 2}})


def test_only_packs_that_weigh_work_are_planned_by_it(tmp_path):
    """So that another model plans nothing again elsewhere."""
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    balanced = policy_of_split(run(str(tmp_path), packing_algorithm="balanced"), "train")

    assert policy_of_split(run(str(tmp_path)), "train").work is None
    assert WorkModel.from_config(TEXT).trained() == balanced.work
    for keys, uses in (({}, True), ({"algorithm": "certified"}, False), ({"packing": False}, False)):
        assert uses == attrs.evolve(balanced, **keys).uses_works


@pytest.mark.parametrize(
    ("packs", "steps", "level", "says"),
    [((4, 3, 5), 2, "INFO", "2 of 3 epochs"), ((3,), 2, "INFO", "1 of 1 epoch "), ((4, 2), 2, None, ""),
     (11, 4, "INFO", "trains 3 batches instead of 4"),
     (12, 5, "WARNING", "; training.gradient_accumulation_steps: 4 gives even steps")],
)  # fmt: skip
def test_epochs_whose_last_step_is_smaller_are_counted(packs, steps, level, says):
    """
    It is a warning where another batch gives even steps, by a key that decides the batch; where
    none does, it is a note.
    """
    epochs = 1 if isinstance(packs, int) else len(packs)
    schedule = plain_schedule(packs, gradient_accumulation_steps=steps, num_train_epochs=epochs)

    found, line = partial_window_line(run(), schedule) or (None, "")

    assert level == (found and logging.getLevelName(found))
    assert says in line
    for keys in ({"effective_batch_size": 5}, {"per_device_train_batch_size": 2}):
        _, other = partial_window_line(run(**keys), schedule) or (None, "")
        assert ("even steps" in says) == ("; training.effective_batch_size: 4 gives even steps" in other)
