"""The page by error message has every kind of error, with the text that a command prints."""

import ast
import pickle
import re
from pathlib import Path

import attrs
import pytest

from packplan.adapters.loaders.batches import PackBatches
from packplan.adapters.loaders.rows import PACK, refuse_other_packs
from packplan.core import errors
from packplan.core.align import align_plan
from packplan.core.batch import resolve_accumulation
from packplan.core.config.faults import with_remedy
from packplan.core.errors import Difference, Fault, ModelError, PackplanError, RankDifference, RunError, StaleError
from packplan.core.lengths import checked_works
from packplan.core.packers import pack
from packplan.core.plan import build_raw_plan, refuse_dropped, refuse_longer, refuse_unsupervised
from packplan.core.policy import PlanPolicy
from packplan.core.shard import shard_packed
from packplan.core.surface import plan

pytestmark = pytest.mark.covers

ROOT = Path(__file__).parents[2]

STATING = {"ArgumentError", "MismatchError", "ModelError", "RunError", "StaleError"}
"""Classes that state one of several facts, each by its kind."""

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

OTHER = (Difference("template.system", "Be brief.", "Be exact."),)
PLANS = (Difference("plan", "ad441f64dbd8", "8bc83601250a"),)
LENGTH = (Difference("length", 214, 230),)
MIXED = [580] * 33 + [590] + [400] * 12
DROPPING = PlanPolicy(packing_length=1000, min_fill_ratio="0.65")
FOLDER = "runs/first/static_packing/train"


def raised(call, *arguments, **options) -> PackplanError:
    """Return the error that a call raises."""
    with pytest.raises(PackplanError) as caught:
        call(*arguments, **options)
    return caught.value


RUNS = (
    RankDifference("training.learning_rate", ("0.0001",) * 4 + ("1e-05",)),
    RankDifference("version of numpy", ('"2.4.6"',) * 4 + ('"2.3.0"',)),
)
FAULTS = (
    Fault("template.max_length", "is 4096.5, but has to be a whole number"),
    Fault("training.packing_bufer", "is no known key: did you mean packing_buffer?"),
    Fault("learning_rate", "is no key of the top level: write training.learning_rate"),
    Fault("training.seed", "is 'x', but has to be a whole number"),
)

EXAMPLES = (
    errors.ConfigError("run.yaml", FAULTS),
    errors.RecordError("data/train.jsonl, line 17", "has 2 images, but 1 <image> tag: write one tag for each image"),
    errors.DataSetError("data/train.jsonl holds no record"),
    raised(pack, [9, 7, 3, -1], capacity=16),
    raised(checked_works, [1.0] * 3 + [float("nan")] * 2 + [1.0] * 35, 40),
    raised(pack, [8] * 5, capacity=8, bin_count_multiple=8),
    raised(
        shard_packed,
        [100] * 7 + [530, 600, 640],
        shards=1,
        batch_size=10,
        max_tokens_per_microbatch=512,
        sequence_length_pad_multiple=64,
    ),
    raised(shard_packed, [], shards=8, batch_size=30, max_tokens_per_microbatch=8),
    raised(
        resolve_accumulation,
        effective_batch_size=30,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        world_size=8,
    ),
    raised(PackBatches, plan([8] * 9, 16).schedule(world_size=8), 0, 2),
    errors.ArgumentError(
        "host",
        "the trainer would not follow the plan: accelerator_config.split_batches is set, which hands the batches of "
        "one rank out to all",
    ),
    errors.ArgumentError(
        "packed_batch",
        "the packed batch begins sample 1 at token 12 by starts, but at token 10 by position_ids: the model would take "
        "other samples",
    ),
    errors.ArgumentError(
        "whole_batch_loss",
        "the loss dpo_loss compares sequences with each other, so it needs the whole batch at once, which packing and "
        "dynamic batching compute part by part",
    ),
    raised(build_raw_plan, [], packing_length=1024),
    raised(build_raw_plan, [1024, 1024, 1100], packing_length=1024, allow_single_long=False),
    raised(build_raw_plan, [300, 400], packing_length=2048, min_fill_ratio="0.65"),
    raised(refuse_dropped, build_raw_plan(MIXED, DROPPING), MIXED, DROPPING),
    raised(refuse_longer, [100, 5120, 7168], PlanPolicy(packing_length=4096, refuse_longer=True)),
    raised(refuse_unsupervised, build_raw_plan([8] * 400, packing_length=64), [0] * 400),
    errors.ArgumentError(
        "too_many_epochs", "epochs 0 to 9,999 end at optimizer step 20,000, and no more epochs can be planned"
    ),
    raised(align_plan, build_raw_plan([8] * 3, packing_length=8), world_size=4, dataloader_drop_last=True),
    ModelError.isolation("bloom", "auto", "gradients pass between samples of a row: 0.24 of a sample's own"),
    ModelError(
        "attention",
        "attn_impl varlen cannot be taken: packed samples differ from themselves alone by 0.07, where 2e-05 is allowed",
    ),
    ModelError("probe", "its small copy has 31,000,000 weights, more than 20,000,000"),
    ModelError(
        "trace",
        "the model cannot be traced in forward of modeling_x.py (DataDependentOutputException: "
        "aten._local_scalar_dense.default)",
    ),
    ModelError("work", "the work of model_type 'falcon' is not known"),
    StaleError.lengths(FOLDER, OTHER),
    StaleError("borrowed_lengths", str(StaleError.lengths("runs/other/static_packing/train", OTHER))),
    StaleError("table_lengths", str(StaleError.lengths("lengths.parquet", OTHER))),
    StaleError.plan("runs/first/checkpoint-40", PLANS),
    StaleError.plan("runs/first/checkpoint-40", (Difference("order_version", 2, 3),)),
    StaleError(
        "changed_image",
        "image 0 of sample 12 is not the one that was measured: num_bytes: stored 40213, now 51877",
    ),
    StaleError.sample(12, "data/train.jsonl, line 13", LENGTH),
    StaleError.sample(12, "data/train.jsonl.gz, line 13", LENGTH, copy="runs/first/records/b5bb9d80"),
    errors.NotBuiltError(FOLDER, "holds no plan"),
    errors.OutputError("runs/first", "No space left on device"),
    errors.OutputError(FOLDER, "process 4711 on node3 writes it, and this run has waited for 7,200 s", "locked"),
    RunError("rank_zero", "rank 0 failed: data/train.jsonl, line 17: is not UTF-8 text"),
    RunError("rank_gone", "rank 1 waited 1,800 s for the other ranks; last heard: nothing"),
    RunError("different_runs", errors.in_lines("ranks were given different runs", RUNS)),
    RunError(
        "lost_process",
        "loading data failed: DataLoader worker (pid 4711) is killed by signal: Killed. Most often the machine, or its "
        "shared memory (/dev/shm), is full: lower training.dataloader_num_workers (now 4; 0 loads in the training "
        "process) or training.dataloader_prefetch_factor, or give the machine more memory",
    ),
    RunError("not_finite", "loss is nan, so the policy was not updated and not saved"),
    RunError.worker(2, "train", "its process ended"),
    raised(refuse_other_packs, [{PACK: 5}], [(4,)]),
    errors.MismatchError("unequal", "packed training is not the same training: logits, isolation differ"),
    errors.MismatchError("unsound", "3 findings: what is stored is not what training would use"),
    errors.MismatchError(
        "ranks_disagree", "ranks disagree on the train plan's checksum: rank 0: ad441f64dbd8; rank 1: 8bc83601250a"
    ),
    errors.MismatchError(
        "too_large",
        "a step of the plan takes up to 98.20 GiB on each rank, of 80.00 GiB; the longest template.max_length that "
        "fits is 11,200",
    ),
    errors.MismatchError(
        "leak",
        "samples of the row are not apart: sample 1 depends on sample 0, by a gradient of 0.32 of its own, where 0 is "
        "due; first in model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)",
    ),
    errors.MismatchError(
        "unlike_alone",
        "the logits of sample 1 differ from those of the sample alone by 0.0029, where 3e-05 is allowed; first in "
        "model.layers.3.self_attn (Llama4TextAttention)",
    ),
    errors.MismatchError(
        "unlike_step",
        "the step's loss is 1.9555, 0.5 times the 3.911 that is due; the gradients are 0.5 times those that are due, "
        "and differ by 0.19: as the token mean divided by the ranks (2) once too often",
    ),
    errors.MismatchError(
        "unlike_padded",
        "without padding the loss is 3.2 where 3.1 is due, and gradients differ by 0.2 of their norm, where 5e-04 is "
        "allowed",
    ),
    errors.CorruptArtefactError(f"{FOLDER}/lengths.bin", "its content does not match the manifest's digest"),
)


def raised_kinds() -> set[str]:
    """Return the kinds that the product raises: arguments of errors, or of `attrs.evolve`."""
    found = set()
    for path in (path for room in ("core", "adapters", "app") for path in (ROOT / room).rglob("*.py")):
        stating = STATING | ({"cls"} if path.name == "errors.py" else set())
        for call in (one for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(one, ast.Call)):
            kinds = [one.value for one in call.keywords if one.arg == "kind" and "evolve" in ast.unparse(call.func)]
            kinds += call.args[:1] if getattr(call.func, "id", "") in stating else ()
            found |= {one.value for kind in kinds for one in ast.walk(kind) if isinstance(one, ast.Constant)}
    return found - {""}


def classes(cls: type) -> list[type]:
    """Return the classes below one that are raised."""
    below = [each for one in cls.__subclasses__() for each in classes(one)]
    is_raised = cls not in {PackplanError, errors.UserError, errors.VerificationError} and cls.__name__[0] != "_"
    return [cls, *below] if is_raised and cls.__module__ == errors.__name__ else below


def entries() -> dict[str, str]:
    """Return the text below each class's heading."""
    parts = re.split(r"^### `(\w+)`$|^## .*$", PAGE, flags=re.MULTILINE)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name}


def test_every_class_and_every_kind_has_its_entry():
    """And no entry is of an error that is gone."""
    names = {cls.__name__ for cls in classes(PackplanError)}  # attrs makes each class twice, and the first may linger
    assert names == set(entries())
    assert names == {type(error).__name__ for error in EXAMPLES}
    assert all(name in errors.__doc__ for name in names)
    stating = {error.kind for error in EXAMPLES if type(error).__name__ in {*STATING, "OutputError"}}
    assert stating == raised_kinds() | {"refused", "locked"}, "give it an entry on the page, and one in EXAMPLES"


each = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: f"{type(error).__name__} {error.kind}")


@each
def test_an_entry_shows_the_message_as_it_is(error):
    """So that a search for its words finds the page; it has its kind, and says what to do."""
    shown = re.escape(f"```text\nerror: {with_remedy(error)}\n```\n")
    named = f"`{error.kind}`: " if type(error).__name__ in {*STATING, "OutputError"} else ""

    found = re.search(rf"\n{shown}\n{named}[\w`][^\n]+", entries()[type(error).__name__])
    assert found is not None, f"docs/troubleshooting.md lacks this message, or what to do, for {error.kind}"


@each
def test_errors_survive_pickling(error):
    """With all fields and the same text; those about arguments are ValueErrors."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes

    assert (type(error), str(error), repr(error)) == (type(again), str(again), repr(again))
    assert isinstance(error, errors.ArgumentError) == isinstance(error, ValueError)


@each
def test_no_error_prints_at_length_what_it_quotes(error):
    """A path, a value or a list as long as data can make it; the ends of the text stay."""
    long = "x" * 20_000
    texts = {field.name: long for field in attrs.fields(type(error)) if isinstance(getattr(error, field.name), str)}
    if isinstance(error, errors.ConfigError):
        texts["faults"] = (Fault("a.b", long),) * 200

    lines = str(attrs.evolve(error, **texts)).split("\n")

    assert len(lines) <= errors.MAX_LINES
    assert all(len(line) <= errors.MAX_LINE for line in lines)
