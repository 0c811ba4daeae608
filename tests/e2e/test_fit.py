"""Forecast of the memory of a step: traced peaks are measured ones, and nothing is guessed."""

import json

import attrs
import pytest
from transformers.models.qwen2 import modeling_qwen2

from benchmarks.memory import allocator_peak
from packplan.app.opening.forecasts import config_to_trace, open_step_tracer
from packplan.app.opening.runs import read_config
from packplan.app.opening.splits import open_splits
from packplan.app.opening.verdicts import decide_attention
from packplan.app.plan.__main__ import main
from packplan.app.plan.fit import forecast_memory
from packplan.core.errors import ModelError
from packplan.core.forecast import bytes_text
from tests.stored import asked

pytestmark = pytest.mark.slow


def forecast_of(path, *changed, ranks=1):
    """Return the memory of a run's YAML."""
    return forecast_memory(read_config(asked(path), changed), memory=None, ranks=ranks)


@pytest.fixture
def write_small(write_run, text_jsonl, few_scenes):
    """Return a function that writes a run of one pack."""

    def write(family="qwen2", name="run", **training):
        data, count = (few_scenes, 3) if family.endswith("vl") else (text_jsonl, 6)
        few = data.with_name(f"{count}.jsonl")
        few.write_text("".join(data.read_text().splitlines(keepends=True)[:count]))
        keys = {"use_cpu": True, "effective_batch_size": 1, "num_train_epochs": 2, "packing_drop_last": False}
        return write_run(family, name, training=keys | training, custom={"train_jsonl": str(few)})

    return write


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen2", {"tuner_type": "lora", "gradient_checkpointing": True}), ("qwen2_5_vl", {"bf16": True})],
)
def test_the_forecast_is_the_peak_of_training(family, settings, write_small, ready):
    """The peak of the heaviest pack is that of the allocator over two epochs, within 2 %."""
    path = write_small(family, **settings)
    found = forecast_of(path)
    trainer = ready(path).trainer

    measured = allocator_peak((*trainer.model.parameters(), *trainer.model.buffers()), trainer.train)

    assert found.packs[0].peak.total == pytest.approx(measured, rel=0.02)
    assert [None, True, False] == [
        attrs.evolve(found, memory=one).fits for one in (None, found.needed_bytes, found.needed_bytes - 1)
    ]


def test_each_rank_of_fsdp_holds_its_part(write_small):
    """Ranks of FSDP 2 hold their parts of weights and optimizer; accumulated gradients stay."""
    alone = forecast_of(write_small()).packs[0].peak
    twice = forecast_of(write_small(name="twice", effective_batch_size=2)).packs[0].peak
    path = write_small(name="ranks", effective_batch_size=4)
    part, copied = (forecast_of(path, *fsdp, ranks=4).packs[0].peak for fsdp in (["training.fsdp=full_shard"], []))

    # With several microbatches in a step, the passes hold the gradients of earlier ones.
    assert alone.gradients < twice.gradients <= twice.weights < twice.gradients * 1.01
    # Weights that ranks do not divide are filled up.
    assert part.weights == pytest.approx(alone.weights / 4, rel=0.1)
    assert part.optimizer == pytest.approx(alone.optimizer / 4, rel=0.1)
    # Gathered weights of a layer are freed before the next layer's.
    whole = alone.temporaries + alone.activations
    assert whole < part.temporaries + part.activations < whole + alone.weights / 2
    # Ranks that each hold the whole model sum their gradients in buckets.
    assert alone.total + alone.weights == pytest.approx(copied.total, rel=0.01)


@pytest.mark.parametrize(("sharding", "num_passes"), [("ddp", 1), ("fsdp2", 2)])
def test_ranks_of_fsdp_run_the_tower_for_videos_too(write_small, sharding, num_passes):
    """As in training, where ranks that gather the tower's weights wait for each of its passes."""
    config = read_config(asked(write_small("qwen3_vl")))
    attention, samples = decide_attention(config_to_trace(config), isolated=True), open_splits(config)["train"].encoder
    passes, options = [], {"sharding": sharding, "world_size": 2, "accumulates": False}

    with open_step_tracer(config, samples, attention=attention, **options) as tracer:
        tracer.trainer.model.model.visual.register_forward_hook(lambda *_: passes.append(1))
        tracer.trace_step([samples.encode(0)])

    assert num_passes == len(passes)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_attention_of_a_gpu_is_one_kernel_for_all_samples(on_gpu, write_run):
    """On a GPU many samples take the tensors and the memory of few; on a CPU, more tensors."""
    path = asked(write_run("qwen2", training={"bf16": True, "use_cpu": not on_gpu}))
    config = read_config(path)
    attention, samples = decide_attention(config_to_trace(config), isolated=True), open_splits(config)["train"].encoder
    sample, options = samples.encode(0), {"sharding": "ddp", "world_size": 1, "accumulates": False}

    def blocks(*lengths):
        token, trained = sample["labels"][-1], 72 // len(lengths)
        labels = [[-100] * (n - trained) + [token] * trained for n in lengths]
        given = zip(lengths, labels, strict=True)
        return tracer.trace_step([sample | {"input_ids": [token] * n, "labels": one, "length": n} for n, one in given])

    with open_step_tracer(config, samples, attention=attention, **options) as tracer:
        few, many = blocks(60, 76), blocks(*range(10, 25, 2))

    assert many.peak().total == pytest.approx(few.peak().total, rel=0.001 if on_gpu else 0.1)
    assert (len(many.sizes) == len(few.sizes)) == on_gpu


def test_a_model_that_reads_numbers_is_refused_with_the_place(write_small, monkeypatch):
    """Control flow by numbers cannot be traced, and nothing is guessed instead."""
    plain = modeling_qwen2.Qwen2MLP.forward
    path = asked(write_small())  # its small copy computes numbers
    monkeypatch.setattr(
        modeling_qwen2.Qwen2MLP, "forward", lambda layer, x: plain(layer, x if x.sum().item() > 0 else -x)
    )

    with pytest.raises(ModelError, match=r"cannot be traced in forward of modeling_qwen2\.py"):
        forecast_of(path)


def test_the_command_says_the_longest_length_that_fits(write_small, capsys):
    """With the margin, as one document or a table; a run of it forecasts the same peak."""
    path = write_small()

    assert 3 == main(["fit", str(path), "--memory", "4MB", "--json", "--quiet"])

    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert not found["fits"]
    assert "GPU" not in "".join(found["notes"]), "the run is on a CPU"
    assert {"weights", "gradients", "optimizer", "activations", "temporaries"} == set(found["packs"][0]["peak"])
    assert max(pack["total"] for pack in found["packs"]) * (1 + found["margin"]) > 4e6
    longest = found["longest"]
    assert 64 <= longest["tokens"] < 256
    assert longest["peak"] * (1 + found["margin"]) <= 4e6
    assert printed.err.strip().endswith(f" {longest['tokens']}")
    assert 0 == main(["fit", str(path), f"template.max_length={longest['tokens']}", "--memory", "4MB", "--quiet"])
    lines = capsys.readouterr().out.splitlines()
    assert bytes_text(longest["peak"]) in next(line for line in lines if "full pack" in line)
    assert any("tokens" in line and "with margin" in line for line in lines)
    assert not list(path.parent.rglob("plan_ws*.json")), "show would take its number of ranks as the default"


def test_a_rank_of_a_shared_pack_holds_its_part(write_small):
    """Half of the longest pack on each of two ranks."""
    path = write_small()
    keys = ["template.max_length=40", "training.effective_batch_size=2"]

    alone, shared = (
        forecast_of(path, *keys, f"training.sequence_parallel_size={size}", ranks=2) for size in (1, "auto")
    )

    (pack, full), (part, _) = alone.packs, shared.packs
    assert -(-pack.tokens // 2) == part.tokens < full.tokens < pack.tokens
    assert part.peak.total < pack.peak.total
    assert any("a rank's share is traced" in note for note in shared.notes)


@pytest.mark.parametrize(
    "keys",
    [
        {"packing": False}, {"sequence_parallel_size": 2}, {"deepspeed": {"zero_optimization": {"stage": 3}}},
        {"effective_batch_size": 3},
    ],
)  # fmt: skip
def test_a_run_without_packs_of_its_own_is_refused(write_run, tmp_path, keys):
    """Nor ZeRO, nor uneven batches: refused before anything is stored."""
    assert 2 == main(["fit", str(write_run("qwen2", training=keys)), "--world-size", "2"])
    assert not list(tmp_path.rglob("lengths.json"))
