"""Forecast of the memory of a step: traced peaks are measured ones, and nothing is guessed."""

import json

import pytest
from transformers.models.qwen2 import modeling_qwen2

from benchmarks.memory import allocator_peak
from packplan.adapters.ranks.torch_group import OneRank
from packplan.app.plan.__main__ import main
from packplan.app.plan.fit import forecast
from packplan.app.wiring.forecasts import open_step_tracer, traced_run
from packplan.app.wiring.runs import read_config
from packplan.app.wiring.splits import open_splits
from packplan.app.wiring.verdicts import decide_attention
from packplan.core.errors import ModelError
from tests.e2e.ready import prepare
from tests.stored import asked

pytestmark = pytest.mark.slow


def forecast_of(path, *changed, ranks=1):
    """Return the memory of a run's YAML."""
    return forecast(read_config(asked(path), changed), memory=None, ranks=ranks)


TRAINING = {"use_cpu": True, "effective_batch_size": 1, "num_train_epochs": 2}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"tuner_type": "lora", "gradient_checkpointing": True}),
        ("qwen2_5_vl", {"bf16": True}),
    ],
)
def test_the_forecast_is_the_peak_of_training(family, settings, write_run, few_scenes):
    """The peak of the heaviest pack is that of the allocator over two epochs, within 2 %."""
    data = {"custom": {"train_jsonl": str(few_scenes)}} if family.endswith("vl") else {}
    path = write_run(family, training=TRAINING | settings, **data)
    found = forecast_of(path)
    trainer = prepare(read_config(path), OneRank()).trainer

    measured = allocator_peak((*trainer.model.parameters(), *trainer.model.buffers()), trainer.train)

    assert found.packs[0].peak.total == pytest.approx(measured, rel=0.02)


def test_each_rank_of_fsdp_holds_its_part(write_run):
    """Ranks of FSDP 2 hold their parts of weights and optimizer; ZeRO is refused."""
    path = write_run("qwen2", training=TRAINING | {"effective_batch_size": 4})

    alone = forecast_of(write_run("qwen2", "alone", training=TRAINING)).packs[0].peak
    shared, copied = (forecast_of(path, *fsdp, ranks=4) for fsdp in (["training.fsdp=full_shard"], []))

    # Weights that ranks do not divide are filled up.
    part = shared.packs[0].peak
    assert part.weights == pytest.approx(alone.weights / 4, rel=0.1)
    assert part.optimizer == pytest.approx(alone.optimizer / 4, rel=0.1)
    # Gathered weights of a layer are freed before the next layer's.
    whole = alone.temporaries + alone.activations
    assert whole < part.temporaries + part.activations < whole + alone.weights / 2
    # Ranks that each hold the whole model sum their gradients in buckets.
    assert alone.total + alone.weights == pytest.approx(copied.packs[0].peak.total, rel=0.01)
    zero = write_run("qwen2", "zero", training=TRAINING | {"deepspeed": {"zero_optimization": {"stage": 3}}})
    assert 2 == main(["fit", str(zero), "--world-size", "2"])


def test_accumulated_gradients_are_there_throughout(write_run):
    """With several microbatches in a step, the passes hold the gradients of earlier ones."""
    once = forecast_of(write_run("qwen2", "once", training=TRAINING)).packs[0].peak
    twice = forecast_of(write_run("qwen2", "twice", training=TRAINING | {"effective_batch_size": 2})).packs[0].peak

    assert once.gradients < twice.gradients <= twice.weights < twice.gradients * 1.01


@pytest.mark.parametrize("on_gpu", [True, False])
def test_attention_of_a_gpu_is_one_kernel_for_all_samples(on_gpu, write_run):
    """On a GPU many samples take the tensors and the memory of few; on a CPU, more tensors."""
    path = asked(write_run("qwen2", training={"bf16": True, "use_cpu": not on_gpu}))
    config = read_config(path)
    attention, samples = decide_attention(traced_run(config), isolated=True), open_splits(config)["train"].encoder
    sample, options = samples.encode(0), {"sharding": "ddp", "world_size": 1, "accumulates": False}

    def blocks(*lengths):
        token, trained = sample["labels"][-1], 72 // len(lengths)
        labels = [[-100] * (n - trained) + [token] * trained for n in lengths]
        given = zip(lengths, labels, strict=True)
        return tracer.step([sample | {"input_ids": [token] * n, "labels": one, "length": n} for n, one in given])

    with open_step_tracer(config, samples, attention=attention, **options) as tracer:
        few, many = blocks(60, 76), blocks(*range(10, 25, 2))

    assert many.peak().total == pytest.approx(few.peak().total, rel=0.001 if on_gpu else 0.1)
    assert (len(many.sizes) == len(few.sizes)) == on_gpu


def test_a_model_that_reads_numbers_is_refused_with_the_place(write_run, monkeypatch):
    """Control flow by numbers cannot be traced, and nothing is guessed instead."""
    plain = modeling_qwen2.Qwen2MLP.forward
    path = asked(write_run("qwen2", training=TRAINING))  # its small copy computes numbers
    monkeypatch.setattr(
        modeling_qwen2.Qwen2MLP, "forward", lambda layer, x: plain(layer, x if x.sum().item() > 0 else -x)
    )

    with pytest.raises(ModelError, match=r"cannot be traced in forward of modeling_qwen2\.py"):
        forecast_of(path)


def test_the_command_prints_one_document_whose_lengths_fit(write_run, capsys):
    """The longest length fits with the margin, and a run of it forecasts the same peak."""
    path = write_run("qwen2", training=TRAINING)

    assert 0 == main(["fit", str(path), "--memory", "200MB", "--json", "--quiet"])

    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert "GPU" not in "".join(found["notes"]), "the run is on a CPU"
    assert found["longest"]["tokens"] > 256
    assert found["longest"]["peak"] * (1 + found["margin"]) <= 200e6
    assert {"weights", "gradients", "optimizer", "activations", "temporaries"} == set(found["packs"][0]["peak"])
    highest = max(pack["total"] for pack in found["packs"])
    assert highest * (1 + found["margin"]) <= 200e6
    longest = forecast_of(
        path, f"template.max_length={found['longest']['tokens']}", "training.packing_drop_last=false"
    ).packs[1]
    assert longest.peak.total == pytest.approx(found["longest"]["peak"], rel=0.03)
    assert 3 == main(["fit", str(path), "--memory", "1MiB", "--quiet"])
    assert "of 1.00 MiB; no packing length fits" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [{"packing": False}, {"sequence_parallel_size": 2}])
def test_a_run_without_packs_of_its_own_is_refused(write_run, keys):
    """What is forecast is the memory of packs that a rank computes whole."""
    assert 2 == main(["fit", str(write_run("qwen2", training=keys))])
