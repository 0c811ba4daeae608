"""Losses, gradients and evaluations are those of the samples alone, on any ranks."""

import json
import math
from itertools import chain, islice

import attrs
import pytest
import torch
from safetensors.torch import load_file

from packplan.adapters.loaders.packs import PackLoader
from packplan.core.batch import pack_degrees
from packplan.core.errors import MismatchError
from tests.e2e import rank_main
from tests.e2e.alone import Gradients, silence, step_alone, token_losses, token_weights
from tests.e2e.ready import IN_CI, logged_losses
from tests.nearness import FLOAT32, apart
from tests.processes import finished
from tests.records import asked, to_messages, write_lines

pytestmark = pytest.mark.slow

QUIET = {"learning_rate": 0.0, "max_grad_norm": 0, "lora_dropout": 0.0, "packing_drop_last": False}
"""Constant weights and plain gradients, so that every step is held against the first."""


@pytest.fixture
def data(demo, tmp_path, monkeypatch):
    """Return a function that writes records; those that say `silent` teach nothing."""
    silence(monkeypatch.setattr)

    def write(of: str, name: str = "train.jsonl", *, weighed: bool = False) -> str:
        records = [json.loads(line) for line in (demo / "data" / name).read_text().splitlines()[-12:]]
        for record in records:
            record["images"] = [str(demo / "data" / i) for i in record.get("images", ())] if of.endswith("vl") else []
        silent = [{"role": "user", "content": "silent"}, {"role": "assistant", "content": "nothing to learn from"}]
        records.insert(2, {"messages": silent})
        if weighed:
            records = [weigh(record, number) for number, record in enumerate(records)]
        return str(write_lines(tmp_path / f"{of}-{name}", records))

    return write


def weigh(record, number):
    """Return a record whose answer weighs so little, or so much, that no mean hides it."""
    if number % 4 == 3:
        return record
    *asked, said = to_messages(record)["messages"]
    weighed = {**said, "loss_scale": (0.125, 3, 1)[number % 4]}
    return {"images": record.get("images", []), "messages": [*asked, weighed]}


@pytest.fixture
def prepared(write_run, data, ready, tmp_path):
    """Return a function that builds a run without training it."""

    def build(of: str, *, val: bool = False, weighed: bool = False, **overlay):
        custom = {"train_jsonl": data(of, weighed=weighed)}
        if val:
            custom["val_jsonl"] = data(of, "val.jsonl", weighed=weighed)
        overlay = {"custom": custom, "template": {"max_length": 400}, **overlay}
        return ready(write_run(of, name=f"{of}-{len(list(tmp_path.iterdir()))}", **overlay))

    return build


def step_samples(schedule, step: int, encode, packs) -> list[dict]:
    """Return the encoded samples of a step of the first epoch, those of all ranks."""
    batches = []
    for rank in range(schedule.world_size):
        own = next(islice(schedule.steps(rank=rank), step, None))
        sharing = own.ranks or [range(rank, rank + 1)] * len(own.batches)
        batches += [batch for batch, ranks in zip(own.batches, sharing, strict=True) if rank == ranks[0]]
    return [encode(index) for batch in batches for pack in batch for index in packs[pack]]


def check_steps(run, schedule, losses, gradients, reduction) -> None:
    """Hold each step's logged loss and gradients against its samples alone."""
    model = run.trainer.model.eval()
    packs, encode = run.planned["train"].raw.packs, run.samples["train"].encode
    assert "varlen" == run.trainer.attention.name
    assert schedule.steps_per_epoch == len(losses) == len(gradients)
    for step, (loss, found) in enumerate(zip(losses, gradients, strict=True)):
        expected = step_alone(model, step_samples(schedule, step, encode, packs), reduction)
        assert expected.loss == pytest.approx(loss, rel=FLOAT32)
        if expected.scale:
            assert apart(found, expected.gradients, scale=expected.scale) < FLOAT32
        else:
            assert all(not gradient.any() for gradient in found.values())


@pytest.mark.parametrize(
    ("model", "weighed", "training"),
    [
        ("qwen2_5_vl", False, {"effective_batch_size": 4, "loss_reduction": "token"}),
        ("qwen3", False, {"effective_batch_size": 4, "loss_reduction": "sample", "tuner_type": "lora"}),
        ("qwen2_5_vl", True, {"effective_batch_size": 4, "loss_reduction": "sample"}),
        ("qwen2", True, {"effective_batch_size": 1, "loss_reduction": "token"}),
        ("qwen3_vl", True, {"packing": False, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2,
                            "loss_reduction": "sqrt"}),
    ],
)  # fmt: skip
def test_steps_are_the_means_over_their_samples(prepared, model, weighed, training):
    """Loss and gradients, in a ragged window, with a silent sample, weights, and padded batches."""
    template = {"max_length": (500 if weighed else 400 if model.endswith("vl") else 300)}
    if not training.get("packing", True):
        template["loss_scale"] = "all"
    run = prepared(model, weighed=weighed, training={**training, **QUIET}, template=template)
    encode, table = run.samples["train"].encode, run.planned["train"].table
    packs = run.planned["train"].raw.packs.tolist()
    kinds = [{"loss_scale" in encode(index) for index in pack} for pack in packs]
    assert weighed == any(True in kind for kind in kinds)
    if model == "qwen2_5_vl" and weighed:
        assert {True, False} in kinds, "no pack of both kinds of samples"
    if not weighed:
        assert run.schedule.batches_per_epoch % 4, "no ragged window to try"
        assert any(len(pack) > 1 and 0 in table[pack, 1] for pack in packs), "no masked sample"
    gradients = Gradients()
    run.trainer.add_callback(gradients)
    assert (1 if training.get("packing", True) else 3) == len(next(iter(run.trainer.get_train_dataloader()))["labels"])

    run.trainer.train()

    losses = logged_losses(run.trainer.state.log_history)
    check_steps(run, run.schedule, losses, gradients.steps, training["loss_reduction"])


def test_a_step_without_a_supervised_token_changes_nothing(write_run, execute, tmp_path):
    """Its loss is 0, not 0 / 0, which would make every weight not a number."""
    path = write_lines(tmp_path / "cut.jsonl", map(asked, ["a small red circle " * 30] * 3 + ["say"]))
    keys = {"train_dataloader_shuffle": False, "packing_drop_last": False, "save_strategy": "epoch"}
    limit = {"max_length": 64, "truncation_strategy": "right"}

    result = execute(write_run("qwen2", custom={"train_jsonl": str(path)}, training=keys, template=limit))

    losses = logged_losses(result.history)
    assert [0, 0, 0] == losses[:3]
    assert losses[3] > 1
    weights = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize(
    ("of", "world_size", "accumulation", "balance", "reduction", "weighed", "length"),
    [
        ("qwen2_5_vl", 2, 4, "auto", "token", False, None), ("qwen2", 3, 2, "microbatch", "sqrt", True, None),
        ("qwen2_5_vl", 2, 2, "auto", "sample", True, 250),
        pytest.param("qwen2_5_vl", 2, 2, "auto", "token", False, 250, marks=IN_CI),
        pytest.param("qwen2", 4, 1, "microbatch", "sample", True, 64, marks=IN_CI),
    ],
)  # fmt: skip
def test_a_step_over_several_ranks_is_the_mean_over_all_of_them(  # noqa: PLR0917  # fixtures
    start_ranks, write_run, data, prepared, tmp_path, of, world_size, accumulation, balance, reduction, weighed, length
):
    """
    Equal to one process that sees each sample alone, with repeated packs, by work; evaluated. The
    same where packs of more than *length* tokens are shared by as many ranks as they need, and
    where samples are evaluated alone, which no ranks share.
    """
    keys = {"effective_batch_size": world_size * accumulation, "loss_reduction": reduction, **QUIET}
    names, out = {"train_jsonl": "train.jsonl", "val_jsonl": "val.jsonl"}, tmp_path / "out"
    custom = {key: data(of, name, weighed=weighed) for key, name in names.items()}
    template = {"max_length": length or 400}
    path = write_run(of, name="ranks", custom=custom, template=template,
                     training={**keys, "packing_balance": balance, "eval_strategy": "epoch",
                               "sequence_parallel_size": "auto" if length else 1,
                               "eval_packing": not weighed})  # fmt: skip
    assert [0] * world_size == finished(start_ranks(world_size, path, out, "gradients"))
    first = rank_main.seen(out, 1)[0]
    gradients = torch.load(out / "gradients0.pt", weights_only=True)

    run = prepared(
        of, val=True, weighed=weighed, training={**keys, "effective_batch_size": accumulation}, template=template
    )
    plain = attrs.evolve(run.schedule, world_size=world_size, works=None)
    if length:
        tokens = run.planned["train"].raw.packs.loads(run.planned["train"].lengths)
        plain = attrs.evolve(plain, degrees=pack_degrees(tokens, length), tokens=tokens)
        assert {1, 2, *([4] if world_size > 2 else [])} == {*plain.pack_degrees(0).tolist()}
    assert plain.batches_per_epoch % accumulation or plain.num_packs % world_size, "nothing is ragged"
    assert length or sorted(first["fetched"]) != sorted(chain(*plain.batches(0, rank=0))), "nothing is assigned"
    check_steps(run, plain, logged_losses(first["history"]), gradients, reduction)
    assert len(run.planned["eval"].raw.packs) % world_size, "no pack is repeated"
    (evaluated,), alone = [entry for entry in first["history"] if "eval_loss" in entry], run.trainer.evaluate()
    for key in ("eval_loss", "eval_token_acc")[: 1 if length else 2]:
        assert evaluated[key] == pytest.approx(alone[key], rel=FLOAT32)


@pytest.mark.parametrize(("model", "weighed"), [("qwen2_5_vl", False), ("qwen2", True)])
def test_an_evaluation_is_the_token_mean_once(prepared, model, weighed):
    """Packed, padded, in a batch of three, and without packing; weighted, and by the plain loss."""
    ways = ({"enable_dft_loss": True}, {"eval_packing": False, "per_device_eval_batch_size": 3}, {"packing": False})
    packed, padded, unpacked = (prepared(model, val=True, weighed=weighed, training=keys) for keys in ways)
    encode, table = packed.samples["eval"].encode, packed.planned["eval"].table
    with torch.no_grad():
        losses = torch.cat([token_losses(packed.trainer.model, encode(index)) for index in range(len(table))])
    weights = torch.cat([token_weights(encode(index)) for index in range(len(table))])
    assert weighed == (len(set(weights.tolist())) > 1)
    mean = float((losses * weights).sum() / weights.sum())

    num_packs, accuracies = len(packed.planned["eval"].raw.packs), []
    for run, batches in ((packed, num_packs), (padded, math.ceil(len(table) / 3)), (unpacked, len(table))):
        metrics = run.trainer.evaluate()
        assert batches == pytest.approx(metrics["eval_steps_per_second"] * metrics["eval_runtime"], rel=0.02)
        assert mean == pytest.approx(metrics["eval_loss"], rel=FLOAT32)
        accuracies.append(metrics["eval_token_acc"])
    assert accuracies == pytest.approx([accuracies[0]] * 3)


def test_a_share_of_the_records_is_evaluated_as_a_file_of_them(write_run, ready, text_jsonl, tmp_path, shortcuts):
    """The others are trained, under their indices in the data; each record is measured once."""
    keep = {"packing_drop_last": False, **QUIET}
    share = ready(write_run("qwen2", name="share", custom={"val_share": 0.2}, training=keep))
    assert [*range(30)] == sorted(shortcuts)
    trained, held_out = (sorted(share.planned[split].raw.packs.indices.tolist()) for split in ("train", "eval"))
    lines, apart = text_jsonl.read_text().splitlines(), tmp_path / "held_out.jsonl"
    apart.write_text("".join(f"{lines[index]}\n" for index in held_out))
    file = ready(write_run("qwen2", name="file", custom={"val_jsonl": str(apart)}, training=keep))

    assert [*range(30)] == sorted(trained + held_out)
    assert 6 == len(held_out)
    first, second = share.trainer.evaluate(), file.trainer.evaluate()
    for key in ("eval_loss", "eval_token_acc"):
        assert first[key] == pytest.approx(second[key], rel=FLOAT32)


@pytest.mark.parametrize("served", [slice(1, None), slice(None, -1)])
def test_a_pack_that_evaluation_leaves_out_is_found(prepared, monkeypatch, served):
    """Each batch is compared with that of the plan, and none may be left."""
    run, plain = prepared("qwen2", val=True), PackLoader.__iter__
    monkeypatch.setattr(PackLoader, "__iter__", lambda loader: iter(list(plain(loader))[served]))

    with pytest.raises(MismatchError, match="the loader served"):
        run.trainer.evaluate()
