"""A number that stopped being one, or ruined weights, end all ranks before a save."""

import math
import re

import pytest
import torch

from packplan.core.errors import RunError
from tests.e2e import rank_main
from tests.processes import finished
from tests.stored import asked

pytestmark = pytest.mark.slow

KEYS = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 1.0}


@pytest.fixture
def prepared(write_run, ready, text_jsonl):
    """Return a function that prepares a quick run on text."""

    def run(*, of="qwen2", **training):
        custom = {"val_jsonl": str(text_jsonl)} if "eval_steps" in training else {}
        return ready(write_run(of, custom=custom, template={"max_length": 128}, training={**KEYS, **training}))

    return run


BROKEN = r"the (loss|gradient norm) of optimizer step (\d) is (nan|inf), so the run ended"

RUINED = r"the root mean square of the trained weights after optimizer step 1 \(0\.\d+ before the first\) is .*"


@pytest.mark.parametrize(
    ("says", "keys"),
    [
        (BROKEN, {"learning_rate": 1e30, "save_strategy": "no"}),
        (BROKEN, {"learning_rate": 1e30, "save_strategy": "no", "logging_nan_inf_filter": True, "max_grad_norm": 0.0}),
        (rf"{RUINED}(nan|inf)", {"learning_rate": 1e39, "max_steps": 1, "packing_drop_last": False}),
        (rf"{RUINED}\d\d\d\.\d+", {"of": "qwen3", "learning_rate": 1e3, "max_steps": 1, "packing_drop_last": False}),
        (r"eval_loss is (nan|inf), so the run ended",
         {"learning_rate": 1e30, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}),
    ],
)  # fmt: skip
def test_numbers_that_are_none_and_ruined_weights_end_the_run_before_a_save(prepared, tmp_path, says, keys):
    """Though ms-swift skips updates of nan and logs another loss, or no later loss would tell."""
    run = prepared(**keys)

    with pytest.raises(RunError, match=says):
        run.trainer.train()

    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_hundred_times_too_high_a_learning_rate_is_the_users(prepared, tmp_path):
    """Its loss tells; the weights are saved, also those of adapters, which start at 0."""
    run = prepared(learning_rate=0.1, max_steps=3, save_steps=3, tuner_type="lora")

    run.trainer.train()

    assert (tmp_path / "run" / "checkpoint-3").is_dir()


# accelerate wraps the step that the scheduler has counted.
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
def test_steps_that_a_loss_scaler_skips_are_none(prepared):
    """An overflow lowers the scale, and training goes on."""
    run = prepared(max_steps=3, save_strategy="no")
    accelerator = run.trainer.accelerator
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True  # fp16 needs a GPU
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-30)
    try:
        run.trainer.train()
    finally:
        accelerator.state._mixed_precision = "no"  # shared by all trainers of this process

    norms = [entry["grad_norm"] for entry in run.trainer.state.log_history if "grad_norm" in entry]
    assert 3 == run.trainer.state.global_step
    assert not math.isfinite(norms[0])
    assert math.isfinite(norms[2])
    assert accelerator.scaler.get_scale() < 1e30
    with pytest.raises(RunError, match="the gradient norm of optimizer step 4 is inf"):
        run.trainer._get_grad_norm(run.trainer.model, math.inf)


@pytest.mark.parametrize(
    ("fault", "says"),
    [("infinite", [r"\d\): the loss of optimizer step 2 is inf, so the run ended"]),
     ("lost", [r"0\): rank 1 failed: data.jsonl, line 7: the image cannot be read: mount", r"1\): data.jsonl"])],
)  # fmt: skip
def test_all_ranks_end_together(server, write_run, tmp_path, fault, says):
    """Where one rank alone has a loss that is none, or loses a file; the reason is printed once."""
    keys = {**KEYS, "effective_batch_size": 2, "packing_drop_last": False}
    path = write_run("qwen2", template={"max_length": 128}, training=keys)
    ranks = server.ranks(2, rank_main.main, str(asked(path)), str(tmp_path), fault, folder=tmp_path)

    assert [2, 2] == finished(ranks)
    assert re.fullmatch(".*".join(["", *says, ""]), "".join(rank.said for rank in ranks), re.DOTALL)
    assert len(says) == sum(rank.said.count("error (rank") for rank in ranks)
    assert ["checkpoint-1"] == [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
