"""A full disk at a checkpoint is named with its folder and a remedy, without a traceback."""

import errno
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from packplan.adapters.files import wrap_load_errors, wrap_save_errors, wrap_write_errors
from packplan.app import sft

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("of", "size"), [("weights", 400_000), ("optimizer", 1_300_000)])
def test_a_checkpoint_that_does_not_fit_ends_the_run_with_its_folder(small_disk, write_run, capfd, of, size):
    """Weights, which safetensors writes, or the optimizer's state; the plan stays."""
    disk = small_disk(size)
    keys = {"output_dir": str(disk / "run"), "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    path = write_run("qwen2", training=keys)

    assert 2 == sft.main([str(path)])
    said = capfd.readouterr().err
    assert re.search(rf"error: {disk / 'run'} cannot be written: .*free disk space, or choose another folder", said)
    assert ("(os error 28)" in said) == (of == "weights")
    assert "Traceback" not in said
    assert (disk / "run" / "static_packing" / "train" / "raw_plan.json").exists()
    assert not list((disk / "run").glob("checkpoint-*/trainer_state.json"))


FORK = Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))


@pytest.mark.parametrize(
    ("use", "kind"),
    [(lambda: torch.empty(2**58), RuntimeError), (lambda: bytearray(2**60), MemoryError), (FORK, OSError)],
)
def test_memory_that_runs_out_is_no_fault_of_a_file(use, kind):
    """The error stays as it was raised, so that no message names a folder or a key."""
    for guard in (
        wrap_write_errors(Path("run")), wrap_save_errors(Path("run")), wrap_load_errors("model.model", "is damaged")
    ):  # fmt: skip
        with pytest.raises(kind), guard:
            use()
