"""A number that stopped being one ends the run, on every rank, before anything is saved over what was good."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import NotFiniteError
from tests.e2e import rank_main
from tests.processes import finished

pytestmark = pytest.mark.slow

KEYS = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 1.0}


@pytest.fixture
def prepared(write_run, text_jsonl):
    """Return a function that prepares a quick run on text."""
    from adapters.torch_group import OneRank
    from app import wiring
    from app.preparing import prepare

    def prepare_run(*, of_validation: bool = False, **training: Any) -> Any:
        custom = {"train_jsonl": str(text_jsonl)} | ({"val_jsonl": str(text_jsonl)} if of_validation else {})
        path = write_run("qwen2", custom=custom, template={"max_length": 128}, training={**KEYS, **training})
        return prepare(wiring.read_config(path), OneRank())

    return prepare_run


@pytest.mark.parametrize("filtered", [False, True])
def test_a_learning_rate_that_breaks_the_weights_ends_the_run(prepared, tmp_path, filtered):
    """Although ms-swift skips an update of nan, and transformers may log another loss in its place; nothing more is saved."""
    run = prepared(learning_rate=1e30, logging_nan_inf_filter=filtered, max_grad_norm=0.0 if filtered else 1.0)

    with pytest.raises(
        NotFiniteError, match=r"the (loss|gradient norm) of optimizer step (\d) is (nan|inf), so the run ended"
    ) as it:
        run.trainer.train()

    step = int(it.value.what.split()[-1])
    saved = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert [f"checkpoint-{number}" for number in range(1, step)] == saved
    for name in saved:
        held = load_file(tmp_path / "run" / name / "model.safetensors")
        assert all(torch.isfinite(weight).all() for weight in held.values())


def test_a_loss_is_found_although_its_gradient_is_finite(prepared, tmp_path, monkeypatch):
    """As that of a target whose logit is minus infinity."""
    run = prepared()
    loss = run.trainer.compute_loss
    monkeypatch.setattr(run.trainer, "compute_loss", lambda *args, **kwargs: loss(*args, **kwargs) + math.inf)

    with pytest.raises(NotFiniteError, match="the loss of optimizer step 1 is inf"):
        run.trainer.train()

    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_weights_that_the_last_step_broke_are_not_saved(prepared, tmp_path):
    """No later loss would show it."""
    run = prepared(learning_rate=1e39, max_steps=1)

    with pytest.raises(NotFiniteError, match=r"a weight after optimizer step 1 is (nan|-?inf)"):
        run.trainer.train()

    assert not list((tmp_path / "run").glob("checkpoint-*"))


# accelerate wraps the step that the scheduler has counted.
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
def test_steps_that_a_loss_scaler_skips_are_none(prepared):
    """A gradient that overflows under the scale lowers it, and training goes on; a loss that is none ends it all the same."""
    run = prepared(max_steps=3, save_strategy="no")
    accelerator = run.trainer.accelerator
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True  # fp16 needs a GPU
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-30)
    norms = []
    log = run.trainer.log
    run.trainer.log = lambda logs, *rest: norms.append(logs.get("grad_norm")) or log(logs, *rest)
    try:
        run.trainer.train()
    finally:
        accelerator.state._mixed_precision = "no"  # shared by all trainers of this process

    assert 3 == run.trainer.state.global_step
    assert not math.isfinite(norms[0])
    assert math.isfinite(norms[2])
    assert accelerator.scaler.get_scale() < 1e30


def test_an_evaluation_that_is_none_ends_the_run(prepared, tmp_path):
    """Before the save that would follow it."""
    run = prepared(learning_rate=1e30, max_steps=1, eval_strategy="steps", eval_steps=1, of_validation=True)

    with pytest.raises(NotFiniteError, match=r"eval_loss is (nan|inf), so the run ended"):
        run.trainer.train()

    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_all_ranks_end_together(server, write_run, text_jsonl, tmp_path):
    """Where the loss of one rank alone is none, and the gradients of all are finite: the same reason everywhere."""
    path = write_run(
        "qwen2", custom={"train_jsonl": str(text_jsonl)}, template={"max_length": 128},
        training={**KEYS, "effective_batch_size": 2, "packing_drop_last": False},
    )  # fmt: skip
    ranks = server.ranks(2, rank_main.main, str(path), str(tmp_path), "infinite", folder=tmp_path)

    assert [2, 2] == finished(ranks)
    for number, rank in enumerate(ranks):
        assert f"error (rank {number}): the loss of optimizer step 2 is inf, so the run ended" in rank.said
    assert ["checkpoint-1"] == [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
