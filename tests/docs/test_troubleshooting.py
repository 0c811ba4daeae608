"""The page by error message has every error of ours, with the text that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packplan.core import errors
from packplan.core.errors import Difference, Fault, RankDifference

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

OTHER = Difference("template.system", "Be brief.", "Be exact.")

EXAMPLES = (
    errors.ConfigError(
        "run.yaml",
        (
            Fault("template.max_length", "is 4096.5, but has to be a whole number"),
            Fault("training.packing_bufer", "is no known key: did you mean packing_buffer?"),
            Fault("learning_rate", "is no key of the top level: write training.learning_rate"),
            Fault("training.seed", "is 'x', but has to be a whole number", "training.seed=x"),
        ),
    ),
    errors.RecordError("data/train.jsonl, line 17", "has 2 images, but 1 <image> tag: write one tag for each image"),
    errors.DataSetError("data/train.jsonl holds no record"),
    errors.InvalidLengthError(3, -1, "a length is at least 1 token"),
    errors.WorkError("packs", 40, 40, 3, float("nan"), 2),
    errors.TooFewSamplesError(5, 8, 1, 8),
    errors.OverBudgetError(7, 530, 576, 512, 3, 640),
    errors.UnevenShardsError(30, 8),
    errors.BatchError("the batch has no sequence, so there is nothing to cut: give at least one"),
    errors.EmptyPlanError(4, 3, 1024, 1, (300, 400), 400, "0.65"),
    errors.DroppedTokensError(34, 34, 46, 580, 590, 19924, 24600, "0.01", "0.65"),
    errors.SampleTooLongError(18342, 5120, 4096, 37, 52000, 7168),
    errors.PlanTooShortError(3, 4),
    errors.BatchSizeError(30, 8, 1),
    errors.IsolationError(
        "bloom", "auto", "gradients pass between samples of a row: 0.24 of a sample's own, where 0 is due"
    ),
    errors.ProbeError("llama", "its small copy has 31,000,000 weights, more than 20,000,000"),
    errors.AttentionError(
        "varlen",
        "packed samples differ from themselves alone by 0.07, where 2e-05 is allowed, though no gradient passes "
        "between them",
        "auto",
    ),
    errors.WholeBatchLossError("dpo_loss"),
    errors.StaleLengthsError("runs/first/static_packing/train", (OTHER,)),
    errors.PlanChangedError("runs/first/checkpoint-40", (Difference("plan", "ad441f64dbd8", "8bc83601250a"),)),
    errors.ChangedImageError(12, 0, (Difference("num_bytes", 40213, 51877),)),
    errors.ContractError(12, "data/train.jsonl, line 13", (Difference("length", 214, 230),)),
    errors.NotBuiltError("runs/first/static_packing/train", "holds no plan"),
    errors.OutputError("runs/first", "No space left on device"),
    errors.LockedError("runs/first/static_packing/train", "process 4711 on node3", 7200.0),
    errors.RankZeroError("rank 0 failed: data/train.jsonl, line 17: is not UTF-8 text"),
    errors.RankGoneError("waited more than 1,800 s for the other ranks"),
    errors.DifferentRunsError(
        (
            RankDifference("training.learning_rate", ("0.0001",) * 4 + ("1e-05",)),
            RankDifference("version of numpy", ('"2.4.6"',) * 4 + ('"2.3.0"',)),
        )
    ),
    errors.LostProcessError(
        "loading data",
        "DataLoader worker (pid 4711) is killed by signal: Killed",
        "Most often the machine, or its shared memory (/dev/shm), is full: lower "
        "training.dataloader_num_workers (now 4; 0 loads in the training process) or "
        "training.dataloader_prefetch_factor, or give the machine more memory",
    ),
    errors.NotFiniteError("loss", float("nan")),
    errors.WorkerError(2, "train", "its process ended"),
    errors.CorruptArtefactError(
        "runs/first/static_packing/train/lengths.bin", "its content does not match the manifest's digest"
    ),
    errors.CoverageError("the epoch on rank 1", (17,), (3,)),
    errors.UnsoundError(3),
    errors.UnequalError(("logits", "isolation")),
    errors.RanksDisagreeError("the train plan's checksum", ("ad441f64dbd8", "8bc83601250a")),
)


def leaves(kind: type) -> list[type]:
    below = kind.__subclasses__()
    return [leaf for one in below for leaf in leaves(one)] if below else [kind]


def entries() -> dict[str, str]:
    """Return what stands below each error's heading."""
    parts = re.split(r"^### `(\w+)`$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_error_has_its_entry():
    """And no entry is of an error that is gone."""
    ours = {leaf.__name__ for leaf in leaves(errors.PackplanError) if leaf.__module__.startswith(f"{errors.__name__}.")}

    assert ours == set(entries())
    assert ours == {type(error).__name__ for error in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_entry_shows_the_message_as_it_is(error):
    """So that a search for its words finds the page; and says what to do."""
    entry = entries()[type(error).__name__]
    shown, said = re.fullmatch(r"\n+```text\nerror: (.*?)\n```\n(.+?)", entry, re.DOTALL).groups()

    assert str(error) == shown
    assert said.strip()
