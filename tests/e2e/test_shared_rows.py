"""Ranks that share a packed row compute what each sequence gives alone."""

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from packplan.adapters.attention import set_attention
from packplan.adapters.attention.shared_rows import (
    RowGroups,
    attention_for_shared_rows,
    context_parallel,
    share_rows,
    sharing_by,
)
from packplan.adapters.probe.probe_row import probe_ready_model, probe_sharing_copy
from packplan.core.context_parallel import PackedLayout
from packplan.core.equality import VARLEN, AttentionChoice
from packplan.core.errors import MismatchError, ModelError
from tests.e2e import degrees_rank, rank_main
from tests.e2e.alone import step_alone
from tests.e2e.ready import IN_CI, IS_CI, logged_losses
from tests.e2e.unpad_rank import build
from tests.nearness import FLOAT32, apart
from tests.processes import finished
from tests.records import ANSWER, QUESTION, chat, write_lines

ZERO_3 = {"gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
"""Settings of DeepSpeed."""

OTHERS = ("grad_norm", "eval_loss")
"""Values of the log that are compared beside losses."""

LENGTHS = [13, 1, 30, 8, 2]
"""Ragged, one of a single token, one that two ranks share without padding."""


def sequences():
    """Return the tokens of each sequence."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]


@cache
def alone(folder, dtype):
    """Return logits, loss and gradients of each sequence by itself, and the gradients' scale."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    step = step_alone(model, [dict.fromkeys(("input_ids", "labels"), one.tolist()) for one in sequences()])
    logits = torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in sequences()])
    return logits.detach(), torch.tensor(step.loss), step.gradients, step.scale


def distances(found, expected):
    """Return how far logits, losses and gradients are apart, each on the scale of its terms."""
    values = [apart({"": one}, {"": other}) for one, other in zip(found[:2], expected[:2], strict=True)]
    return [*values, apart(found[2], expected[2], scale=expected[3])]


def mean_over_ranks(weight):
    """Return the gradient of a weight that each rank holds."""
    dist.all_reduce(mean := weight.grad / dist.get_world_size())
    return mean


SHARDINGS = {None: lambda model: (model, torch.Tensor.backward, mean_over_ranks), **degrees_rank.SHARDINGS}

WAYS = [*degrees_rank.WAYS, *["ZeRO 1"] * IS_CI]


def in_context(folder, *, dtype="float32", checkpointing=False, give_positions=True, sharding=None):
    """Run a model on this rank's part of a row, as a loop of one's own does."""
    model, expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train(), alone(folder, "float32")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain, size = model.config._attn_implementation, dist.get_world_size()
    layout = PackedLayout.from_lengths(LENGTHS, cp_size=size)
    assert 1 == len(set(layout.causal_work()))
    row = torch.full((layout.num_positions,), 7)
    row[layout.is_token] = torch.cat(sequences())
    positions = layout.positions(dist.get_rank())
    targets = torch.where(torch.as_tensor(layout.targets) < 0, -1, row[layout.targets])
    inputs = {"input_ids": row[None, positions]}
    if give_positions:
        inputs["position_ids"] = torch.as_tensor(layout.position_ids[positions])[None]
    wrapped, backward, gradient = SHARDINGS[sharding](model)
    with context_parallel(wrapped, layout=layout):
        logits = wrapped(**inputs).logits
        each = torch.nn.functional.cross_entropy(
            logits[0].float(), targets[positions], ignore_index=-1, reduction="sum"
        )
        loss = each * size / int((targets >= 0).sum())  # the mean over ranks is the row's
        backward(loss)
    assert plain == model.config._attn_implementation
    gradients = {name: gradient(weight) for name, weight in model.named_parameters()}
    dist.all_reduce(loss := loss.detach() / size)
    parts = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(parts, logits.detach())
    whole = torch.cat(parts, dim=1)[0, layout.restore][layout.is_token]
    limits = [FLOAT32] * 3
    if dtype != "float32":
        limits = [max(2 * rounding, 1e-3) for rounding in distances(alone(folder, dtype), expected)]
    found = distances((whole, loss, gradients), expected)
    return [distance / limit for distance, limit in zip(found, limits, strict=True)]


def world_groups():
    """Return the group of all ranks, which share every row."""
    return RowGroups({dist.get_world_size(): dist.group.WORLD})


def in_model(*, family, checkpointing=False, **sizes):
    """Run a model whose calls share rows, as a trainer does."""
    model = build(family, **sizes).train()
    set_attention(model, attention_for_shared_rows(AttentionChoice(VARLEN)))
    model.config.use_cache = False
    share_rows(model, world_groups())
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.cat(sequences())[None] + 5
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
    labels = ids.masked_fill((batch["position_ids"] == 0) | (ids % 3 == 0), -100)
    learned = (labels != -100)[0]
    keep = torch.nn.functional.pad(learned[1:], (0, 1), value=True)
    kept = {"logits_to_keep": keep, "labels": torch.nn.functional.pad(labels[:, learned], (1, 0), value=-100)}

    def taken(**more):
        model.zero_grad()
        loss = model(**batch, **more).loss
        loss.backward()
        return {"": loss.detach()[None]}, {name: weight.grad.clone() for name, weight in model.named_parameters()}

    def logits():
        return [{"": model(**given).logits.detach()} for given in ({"input_ids": ids.view(2, -1)}, batch)]

    with sharing_by(1):
        expected, gradients = taken(labels=labels)
        due = logits()
    found = [apart(*pair) for pair in zip(logits(), due, strict=True)]
    # The label of a row's first token is none, as nothing predicts it.
    for more in ({"labels": torch.cat([ids[:, :1], labels[:, 1:]], 1)}, kept):
        loss, own = taken(**more)
        for gradient in own.values():
            dist.all_reduce(gradient.div_(dist.get_world_size()))
        found += [apart(loss, expected), apart(own, gradients)]
    isolation = probe_ready_model(model, native="eager", named=VARLEN).isolation
    with pytest.raises(MismatchError, match="were given different rows"):
        model(**{**batch, "input_ids": ids + dist.get_rank()})
    return [math.inf if isolation else 0.0, *(distance / FLOAT32 for distance in found)]


def in_shards(folder, *, sharding):
    """Train a step of text and an image, on ranks that share the row and the weights."""
    model = AutoModelForImageTextToText.from_pretrained(folder).train()
    set_attention(model, attention_for_shared_rows(AttentionChoice(VARLEN)))
    share_rows(model, world_groups())
    ids, images = torch.cat(sequences())[None] + 5, torch.Generator().manual_seed(0)
    ids[0, 20:24] = model.config.image_token_id  # of the third sample
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    batch = {
        "input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions.expand(4, 1, -1),
        "pixel_values": torch.randn(16, 1176, generator=images), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "use_cache": False,
    }  # fmt: skip
    with sharing_by(1):
        due = model(**batch).loss
        due.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    wrapped, backward, gradient = SHARDINGS[sharding](model)
    backward(loss := wrapped(**batch).loss)
    found = {name: gradient(weight) for name, weight in model.named_parameters()}
    pairs = ({"": loss.detach()[None]}, {"": due.detach()[None]}), (found, expected)
    return [apart(*pair) / FLOAT32 for pair in pairs]


def in_copies():
    """Probe small copies of models whose weights ranks share: one passes, one cannot share rows."""
    choice = attention_for_shared_rows(AttentionChoice(VARLEN, native="eager"))
    options = {"named": VARLEN, "groups": world_groups(), "device": "cpu"}
    with pytest.raises(ModelError, match=r"rows \d ranks share, .*: it raises .*: set sequence_parallel_size to 1"):
        probe_sharing_copy(build("gpt_oss", num_key_value_heads=4), choice, **options)  # each head has a sink
    return [probe_sharing_copy(build("qwen2"), choice, **options).isolation]


def on_rank(out, models):
    """Be one rank; write the distances of each case, over their limits."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {}
    for name, case in SHARED.items():
        run = in_model if "family" in case else in_shards if case["folder"].endswith("vl") else in_context
        found[name] = run(**case | ({"folder": f"{models}/{case['folder']}"} if "folder" in case else {}))
    found["copies"] = in_copies()
    Path(out, f"found{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


WORLD_SIZES = [2, pytest.param(4, marks=IN_CI)]

SHARED = {
    "grouped heads": {"family": "qwen2"},
    "heads that ranks do not divide": {"family": "qwen2", "num_attention_heads": 10, "num_key_value_heads": 2},
    "fewer heads than ranks": {"family": "qwen2", "num_attention_heads": 1, "num_key_value_heads": 1},
    "windows": {"family": "gemma3_text"}, "attention of its own code": {"family": "gemma2", "num_key_value_heads": 4},
    "experts": {"family": "qwen3_moe"}, "layers computed again": {"family": "qwen2", "checkpointing": True},
    "a loop of one's own": {"folder": "qwen3", "checkpointing": True},
    "a loop that gives no positions": {"folder": "qwen2", "give_positions": False},
    "a loop in bfloat16": {"folder": "qwen2", "dtype": "bfloat16"},
    **{f"a loop, {way}": {"folder": "qwen2", "sharding": way} for way in WAYS},
    **{f"images, {way}": {"folder": "qwen2_5_vl", "sharding": way} for way in WAYS},
}  # fmt: skip
"""Models that share rows, or in loops that give them a part."""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("run", "cases"), [(on_rank, {*SHARED, "copies"}), (degrees_rank.main, {*degrees_rank.CASES})])
def test_ranks_that_share_rows_get_what_each_sample_gives_alone(server, demo, tmp_path, world_size, run, cases):  # noqa: PLR0917  # fixtures
    """
    The loss of labels, of those that ms-swift keeps, and logits; the gradients over the ranks;
    nothing passes between samples; a call that is no packed row is each rank's own. The same where
    FSDP 2 or DeepSpeed share weights or gradients. In a step of packs of several degrees, a pack
    counts once, however many ranks share it. So do tokens and samples as the loss weighs them.
    """
    ranks = server.ranks(world_size, run, str(tmp_path), str(demo / "models"), folder=tmp_path)
    assert [0] * world_size == finished(ranks)

    for rank in range(world_size):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert found.keys() == cases
        assert {} == {case: differ for case, differ in found.items() if not max(differ) < 1}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_rank_needs_more_than_a_full_pack_does(server, tmp_path, world_size):
    """
    A pack of as many packing lengths as ranks, and each smaller power of two, by the degrees of the
    packs: at most 1.05 times the peak of a full pack of one rank, where whole packs need multiples.
    """
    ranks = server.ranks(world_size, degrees_rank.measure, str(tmp_path), folder=tmp_path)
    assert [0] * world_size == finished(ranks)

    peaks = [json.loads((tmp_path / f"peaks{rank}.json").read_text()) for rank in range(world_size)]
    assert max(rank["whole"] for rank in peaks) > 0.9 * world_size
    assert max(rank["own"] for rank in peaks) <= 1.05


@pytest.fixture
def group_of_one():
    """Be the only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_row_that_nobody_shares_is_the_row(group_of_one):
    """Two sequences, without position ids being given; afterwards the model is as it was."""
    model, tokens = build("gpt2"), torch.arange(8)[None]  # it has absolute positions
    plain = model(tokens).logits
    expected = torch.cat([model(tokens[:, :3]).logits, model(tokens[:, 3:]).logits], dim=1)

    with context_parallel(model, layout=PackedLayout.from_lengths([3, 5])):
        found = model(tokens).logits

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(plain, model(tokens).logits)
    assert not torch.equal(plain, found)
    assert not model._forward_pre_hooks


def test_what_cannot_be_computed_is_refused(group_of_one):
    """Another number of ranks or positions, a mask, layers that carry a state."""
    model, tokens = build("gpt2"), torch.arange(8)[None]
    with (
        pytest.raises(ValueError, match="for 2 ranks, but the group has 1"),
        context_parallel(model, layout=PackedLayout.from_lengths([8], cp_size=2)),
    ):
        pass
    with context_parallel(model, layout=PackedLayout.from_lengths([9])):
        with pytest.raises(ValueError, match="9 positions, 9 of them on a rank, but 8 are given"):
            model(tokens, position_ids=torch.arange(8)[None])
        with pytest.raises(ValueError, match="takes no attention_mask"):
            model(tokens, attention_mask=torch.zeros_like(tokens))
    with pytest.raises(ModelError, match=r"layers that carry a state.*: set sequence_parallel_size to 1"):
        attention_for_shared_rows(AttentionChoice(VARLEN, split=("Mamba",)))


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks_to_a_row(write_run, execute, start_ranks, few_scenes, tmp_path):
    """
    With images and adapters: two ranks to a row take the steps of one, also after a resume, and, in
    CI, where ZeRO 3 shares the weights out; gradients are clipped at the same norm.
    """
    keys = {"effective_batch_size": 2, "tuner_type": "lora", "lora_dropout": 0, "max_steps": 3, "num_train_epochs": 2,
            "save_strategy": "steps", "save_steps": 2, "packing_drop_last": False, "loss_reduction": "sample",
            "use_cpu": True}  # fmt: skip
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(few_scenes)}
    overlay = {"custom": custom, "template": {"max_length": 500}}
    together = {**keys, "sequence_parallel_size": 2}
    histories = []
    for name, more in [("run", {}), ("zero", {"deepspeed": ZERO_3, "save_strategy": "no"})][: 1 + IS_CI]:
        path, out = write_run(name=name, training=together | more, **overlay), tmp_path / f"seen {name}"
        assert [0, 0] == finished(start_ranks(2, path, out))
        first, second = rank_main.seen(out, 2)
        assert first["samples"] == second["samples"]
        histories.append(first["history"])

    keys["resume_from_checkpoint"] = str(tmp_path / "run" / "checkpoint-2")
    resumed = execute(write_run(name="again", training=keys, **overlay))
    alone = execute(write_run(name="alone", training={**keys, "resume_from_checkpoint": None}, **overlay))

    left, expected, *found = (logged_losses(one, *OTHERS) for one in (resumed.history, alone.history, *histories))
    assert max(entry.get("grad_norm", 0) for entry in alone.history) > 1, (
        "above the norm at which gradients are clipped"
    )
    assert [pytest.approx(expected, rel=FLOAT32)] * len(histories) == found
    assert left[-2:] == pytest.approx(expected[-2:], rel=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "slots", "most", "sharding"),
    [
        (200, "6 on 2 ranks; 18 slots", 200, {}),
        pytest.param(300, "1 on 2 ranks; 12 slots", 296, {"deepspeed": ZERO_3, "packing_balance": "none",
                                                          "data_seed": 0}, marks=IN_CI),
    ],
)  # fmt: skip
def test_long_packs_take_two_ranks_and_short_ones_a_rank_each(  # noqa: PLR0917  # fixtures
    length, slots, most, sharding, write_run, execute, start_ranks, few_scenes, tmp_path
):
    """
    With images, text beside images, and all packs in one step: losses, clipped norm and evaluation
    are those of one rank with whole rows, and the log says what a rank computes. With adapters; and
    where all weights are trained and shared, which each rank needs in each pack.
    """
    world_size = 4 if sharding else 2
    tuner = {"tuner_type": "full"} if sharding else {"tuner_type": "lora", "lora_dropout": 0}
    keys = {"effective_batch_size": 64, "num_train_epochs": 1, "packing_drop_last": False, "loss_reduction": "sample",
            "use_cpu": True, **tuner}  # fmt: skip
    overlay = {
        "custom": {"train_jsonl": str(few_scenes), "val_jsonl": str(few_scenes)},
        "template": {"max_length": length},
    }
    shared = write_run(name="shared", training={**keys, **sharding, "sequence_parallel_size": "auto"}, **overlay)
    assert [0] * world_size == finished(start_ranks(world_size, shared, tmp_path))
    alone = execute(write_run(name="alone", training=keys, **overlay))

    ranks = rank_main.seen(tmp_path, world_size)
    history = ranks[0]["history"]
    found, expected = (logged_losses(one, *OTHERS) for one in (history, alone.history))
    assert found == pytest.approx(expected, rel=FLOAT32)
    assert not [key for entry in history for key in entry if "acc" in key], "of some packs alone"
    log = (tmp_path / "rank0.log").read_text()
    assert f"{slots} an epoch; no rank computes more than {most} tokens at once" in log
    records = [json.loads(line) for line in few_scenes.read_text().splitlines()]
    beside = [
        {(packs.count(pack), any(records[sample].get("images") for sample in pack)) for pack in packs}
        for packs in zip(*(rank["samples"] for rank in ranks), strict=True)
    ]
    text_beside_shared_image = {(2, True), (1, False)}
    assert not sharding or any(text_beside_shared_image <= found for found in beside)


@pytest.mark.slow
def test_a_run_with_shared_packs_goes_on_on_more_ranks(write_run, start_ranks, tmp_path):
    """
    In mid-epoch, where packs of two ranks each take four from then on: the rest of the epoch has
    the same packs, loss and norm, and so has the evaluation.
    """
    words = [*range(85, 115, 3), *range(8, 16)]
    records = [chat({**QUESTION, "content": f"say {n}"}, {**ANSWER, "content": "blue circle " * n}) for n in words]
    data = str(write_lines(tmp_path / "long.jsonl", records))
    keys = {"effective_batch_size": 16, "save_strategy": "steps", "save_steps": 1, "packing_drop_last": False,
            "sequence_parallel_size": "auto", "use_cpu": True}  # fmt: skip
    overlay = {"custom": {"train_jsonl": data, "val_jsonl": data}, "template": {"max_length": 100}}

    (rest := tmp_path / "rest").mkdir()
    assert [0] * 2 == finished(start_ranks(2, write_run("qwen2", training=keys, **overlay), tmp_path))
    keys["resume_from_checkpoint"] = str(tmp_path / "run" / "checkpoint-1")
    assert [0] * 4 == finished(start_ranks(4, write_run("qwen2", name="again", training=keys, **overlay), rest))

    before, after = rank_main.seen(tmp_path, 2), rank_main.seen(rest, 4)
    assert "8 on 1 rank, 10 on 2 ranks; 28 slots" in (tmp_path / "rank0.log").read_text()
    assert "8 on 1 rank, 10 on 4 ranks; 48 slots" in (rest / "rank0.log").read_text()
    left = Counter(tuple(pack) for rank in before for pack in rank["samples"][8:])
    goes_on = Counter(tuple(pack) for rank in after for pack in rank["samples"])
    assert {1, 2} == {*left.values()}, "the step has packs of both kinds"
    assert {pack: num**2 for pack, num in left.items()} == dict(goes_on)
    found, expected = (logged_losses(ranks[0]["history"], *OTHERS) for ranks in (after, before))
    assert found[-3:] == pytest.approx(expected[-3:], rel=FLOAT32)
