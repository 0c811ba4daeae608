"""Packed samples give the logits, and evaluation gives the loss, that they give alone."""

from __future__ import annotations

import json

import pytest
import torch

from adapters.torch_group import OneRank

pytestmark = pytest.mark.slow

MODELS = ["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3"]

# Logits are of scale 5 and float32; leaks were measured at 5 and above, float error at 5e-6.
CLOSE = 1e-4


@pytest.fixture
def built(write_run, demo, tmp_path):
    """Return a function that builds a trainer without training it."""
    from app import sft, wiring
    from app.planning import Knobs, plan_split

    def build(of: str, **overlay):
        custom = {"train_jsonl": _data(of, demo, tmp_path), "val_jsonl": _data(of, demo, tmp_path, val=True)}
        overlay["custom"] = custom | overlay.get("custom", {})
        config = wiring.read_config(write_run(of, name=f"{of}-{len(list(tmp_path.iterdir()))}", **overlay))
        group, planned, samples = OneRank(), {}, wiring.open_samples(config)
        for split, source in samples.items():
            planned[split] = plan_split(
                split, Knobs.of(config, split), source=source, stores=wiring.open_stores(config, split), group=group,
                flush_every=None, timeout_s=0,
            )  # fmt: skip
        batch = sft.batch_of(config, world_size=1)
        arguments = wiring.open_arguments(config, samples["train"], batch.size, batch.accumulation)
        trainer = wiring.build_trainer(config, arguments, group=group, samples=samples, planned=planned)
        torch.manual_seed(1)
        with torch.no_grad():  # an untrained model is too flat to show a leak
            for parameter in trainer.model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6)
        return trainer, samples["train"], planned

    return build


def _data(model: str, demo, tmp_path, *, val: bool = False) -> str:
    """Return the demo's records: all for a model that sees, those without images for one that does not."""
    source = demo / "data" / ("val.jsonl" if val else "train.jsonl")
    if model.endswith("vl"):
        return str(source)
    records = [json.loads(line) for line in source.read_text().splitlines()]
    path = tmp_path / f"text-{source.name}"
    path.write_text("".join(json.dumps({**r, "images": []}) + "\n" for r in records))
    return str(path)


def logits(trainer, batch) -> torch.Tensor:
    """Return the model's logits for every position of a collated batch."""
    with torch.no_grad(), trainer._media_hook():
        prepared = trainer._prepare_inputs(batch)
        for key in ("compute_loss_func", "text_position_ids", "labels", "logits_to_keep", "channel"):
            prepared.pop(key, None)
        return trainer.model.eval()(**prepared).logits[0]


def packed_and_alone(trainer, samples, pack):
    """Return packed logits and the unpacked ones, sample after sample, of one pack."""
    packed = logits(trainer, trainer.data_collator([[samples.encode(index) for index in pack]]))
    alone = torch.cat([logits(trainer, trainer.data_collator([[samples.encode(index)]])) for index in pack])
    return packed, alone


def mixed_pack(planned, samples):
    """Return a pack of several samples, with images where there are any."""
    table = planned["train"].table
    return max(planned["train"].raw.packs, key=lambda pack: (len(pack) > 1, table[pack, 2].sum() > 0, len(pack)))


@pytest.mark.parametrize("attn_impl", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_packed_logits_are_the_unpacked_ones(built, model, attn_impl):
    """For each established pair of model and backend."""
    trainer, samples, planned = built(model, model={"attn_impl": attn_impl})
    pack = mixed_pack(planned, samples)
    assert len(pack) > 2

    packed, alone = packed_and_alone(trainer, samples, pack)

    assert alone.std() > 0.3
    assert (packed - alone).abs().max() < CLOSE * alone.abs().max()


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_without_the_fourth_row_samples_see_each_other(built, monkeypatch, model):
    """The fault that this project mends is there, and the check above would find it."""
    from swift.trainers import Seq2SeqTrainer

    from adapters.swift_trainer import PackTrainer

    trainer, samples, planned = built(model)
    monkeypatch.setattr(PackTrainer, "_prepare_inputs", Seq2SeqTrainer._prepare_inputs)

    packed, alone = packed_and_alone(trainer, samples, mixed_pack(planned, samples))

    assert (packed - alone).abs().max() > 0.05 * alone.abs().max()


def test_with_the_cache_on_samples_see_each_other(built):
    """Which is why the whole configuration has it off."""
    from swift.utils import HfConfigFactory

    trainer, samples, planned = built("qwen3")
    assert not trainer.model.config.use_cache
    HfConfigFactory.set_config_attr(trainer.model.config, "use_cache", True)  # noqa: FBT003

    packed, alone = packed_and_alone(trainer, samples, mixed_pack(planned, samples))

    assert (packed - alone).abs().max() > 0.05 * alone.abs().max()


@pytest.mark.parametrize("model", MODELS)
def test_evaluation_is_the_token_mean_over_all_samples_once(built, model):
    """Packed, padded, in a batch of three, and by hand: one number, before any training."""
    trainer, _, planned = built(model, training={"eval_packing": True})
    packed = trainer.evaluate()
    reference = _by_hand(trainer, planned["eval"])
    padded = built(model, training={"eval_packing": False, "per_device_eval_batch_size": 3})[0].evaluate()
    unpacked = built(model, training={"packing": False})[0].evaluate()

    assert planned["eval"].raw.num_samples == planned["eval"].raw.planned_samples
    for metrics in (packed, padded, unpacked):
        assert reference == pytest.approx(metrics["eval_loss"], rel=1e-5)
        assert packed["eval_tokens"] == metrics["eval_tokens"] == planned["eval"].table[:, 1].sum()


def _by_hand(trainer, evaluated) -> float:
    """Return the token mean in float64, each sample alone in a plain forward pass."""
    total, tokens = 0.0, 0
    for index in range(len(evaluated.table)):
        encoded = trainer.eval_dataset.samples.encode(index)
        labels = torch.tensor(encoded["labels"])[1:]
        rows = logits(trainer, trainer.data_collator([[encoded]]))[:-1].double()
        picked = torch.log_softmax(rows, -1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        total -= picked[labels != -100].sum().item()
        tokens += int((labels != -100).sum())
    return total / tokens


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3"])
def test_a_training_step_is_the_token_mean_over_its_packs(built, model):
    """The first logged loss, with accumulation, equals the unpacked samples' token mean at the same weights."""
    trainer, samples, planned = built(
        model, training={"effective_batch_size": 4, "max_steps": 1, "train_dataloader_shuffle": False}
    )
    indices = [index for pack in planned["train"].aligned.packs[:4] for index in pack]
    total, tokens = 0.0, 0
    for index in indices:
        encoded = samples.encode(index)
        labels = torch.tensor(encoded["labels"])[1:]
        rows = logits(trainer, trainer.data_collator([[encoded]]))[:-1].double()
        picked = torch.log_softmax(rows, -1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        total -= picked[labels != -100].sum().item()
        tokens += int((labels != -100).sum())

    trainer.train()

    assert total / tokens == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5)
