"""The heaviest packs, trained before the first step: nothing changes, or the run ends at once."""

import contextlib
import random
import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from packplan.adapters.trainer import rehearsal
from tests.e2e import rank_main
from tests.processes import finished

pytestmark = pytest.mark.slow

KEYS = {
    "effective_batch_size": 4, "max_steps": 3, "packing_max_dropped_share": 1, "tuner_type": "lora",
    "lora_dropout": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("of", ["qwen2", "qwen2_5_vl"])
def test_training_is_bit_for_bit_that_without_a_rehearsal(of, start_ranks, write_run, few_scenes, tmp_path):
    """On two ranks: gradients of every step, drawn dropout and logged losses."""
    custom = {"custom": {"train_jsonl": str(few_scenes)}} if of != "qwen2" else {}
    seen = {}
    for name, rehearses in (("plain", False), ("rehearsed", True)):
        path = write_run(of, name=name, training={**KEYS, "packing_rehearse": rehearses}, **custom)
        assert [0, 0] == finished(start_ranks(2, path, tmp_path / f"{name}_out", "gradients"))
        seen[name] = rank_main.seen(tmp_path / f"{name}_out", 2)

    for rank in range(2):
        plain, rehearsed = (
            torch.load(tmp_path / f"{name}_out" / f"gradients{rank}.pt", weights_only=True) for name in seen
        )
        assert 3 == len(plain) == len(rehearsed)
        for before, after in zip(plain, rehearsed, strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
        assert len(seen["plain"][rank]["fetched"]) < len(seen["rehearsed"][rank]["fetched"]), "nothing was rehearsed"
        timed = re.compile("second|runtime|memory|elapsed|remaining|speed")
        told = [
            [
                {key: value for key, value in entry.items() if not timed.search(key)}
                for entry in seen[name][rank]["history"]
            ]
            for name in seen
        ]
        assert told[0] == told[1]


def test_one_rank_s_lack_of_memory_ends_all_before_the_first_step(start_ranks, write_run, tmp_path):
    """The text has the length that does not fit, and what helps."""
    path = write_run("qwen2", training={**KEYS, "packing_rehearse": True})
    ranks = start_ranks(2, path, tmp_path / "out", "memory")

    assert [2, 2] == [rank.wait() for rank in ranks]
    for rank in ranks:
        found = re.search(r"a pack of (\d+) tokens does not fit", rank.said)
        assert rank_main.ROOM < int(found[1])
        assert "'loss'" not in rank.said
        assert "lower template.max_length" in rank.said


def test_buffers_metrics_and_random_numbers_are_left_as_they_were():
    """Where a rehearsal changes all of them, also where it fails."""
    model, device = torch.nn.BatchNorm1d(3), torch.device("cpu")
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device=device), custom_metrics=metrics)

    def drawn():
        return random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002, S311

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    with contextlib.suppress(KeyError), rehearsal.nothing_kept(trainer, model):
        drawn()
        model(torch.rand(4, 3))
        trainer.custom_metrics["train"]["token_acc"].append(1)
        raise KeyError

    assert expected == drawn()
    assert torch.equal(torch.zeros(3), model.running_mean)
    assert 0 == model.num_batches_tracked
    assert trainer.custom_metrics is metrics
    assert not metrics["train"]
