"""The page by error message has every kind of error, with its text."""

import ast
import pickle
import re

import attrs
import pytest

from packplan.adapters.finite import not_finite_error
from packplan.adapters.loaders.batches import PackBatches
from packplan.adapters.loaders.packs import PACK, refuse_other_packs
from packplan.adapters.loaders.rows import refuse_other_lengths
from packplan.core import errors
from packplan.core.align import align_plan
from packplan.core.batch import largest_degree, resolve_accumulation
from packplan.core.config.remedies import REMEDIES
from packplan.core.equality import ProbeResult
from packplan.core.errors import Difference, Fault, ModelError, PackplanError, RunError, StaleError
from packplan.core.lengths import as_works
from packplan.core.packers import pack
from packplan.core.plan import build_raw_plan, refuse_dropped, refuse_longer, require_supervised
from packplan.core.policy import PlanPolicy
from packplan.core.shard import shard_packed
from packplan.core.surface import plan
from tests.processes import ROOT

pytestmark = pytest.mark.covers

STATING = {"ArgumentError", "MismatchError", "ModelError", "RunError", "StaleError"}
"""Classes that state one of several facts, each by its kind."""

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

LENGTH = (Difference("length", 214, 230),)
MIXED = [580] * 33 + [590] + [400] * 12
DROPPING = PlanPolicy(packing_length=1000, min_fill_ratio="0.65")
FOLDER = "runs/first/static_packing/train"


def raised(call, *arguments, **options) -> PackplanError:
    """Return the error that a call raises."""
    with pytest.raises(PackplanError) as caught:
        call(*arguments, **options)
    return caught.value


FAULTS = (
    Fault("template.max_length", "is 4096.5, but has to be a whole number"),
    Fault("training.packing_bufer", "is unknown: did you mean packing_buffer?"),
    Fault("learning_rate", "is not a key of the top level: write training.learning_rate"),
    Fault("training.seed", "is 'x', but has to be a whole number"),
)

WIDE = {"shards": 1, "batch_size": 10, "max_tokens_per_microbatch": 512, "sequence_length_pad_multiple": 64}
BATCH = {
    "effective_batch_size": 30, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "world_size": 8
}  # fmt: skip

MADE = (
    errors.ConfigError("run.yaml", FAULTS),
    errors.RecordError(
        "data/train.jsonl, line 17", "the record has 2 images, but 1 <image> tag: write one tag for each image"
    ),
    errors.DataSetError("data/train.jsonl holds no record"),
    raised(pack, [9, 7, 3, -1], capacity=16),
    raised(plan, [8], 0),
    raised(as_works, [1.0] * 3 + [float("nan")] * 2 + [1.0] * 35, 40),
    raised(pack, [8] * 5, capacity=8, bin_count_multiple=8),
    raised(shard_packed, [100] * 7 + [530, 600, 640], **WIDE),
    raised(shard_packed, [], shards=8, batch_size=30, max_tokens_per_microbatch=8),
    raised(resolve_accumulation, **BATCH),
    raised(PackBatches, plan([8] * 9, 16).schedule(world_size=8), 0, 2),
    raised(build_raw_plan, [], packing_length=1024),
    raised(build_raw_plan, [1024, 1024, 1100], packing_length=1024, allow_single_long=False),
    raised(build_raw_plan, [300, 400], packing_length=2048, min_fill_ratio="0.65"),
    raised(refuse_dropped, build_raw_plan(MIXED, DROPPING), MIXED, DROPPING),
    raised(refuse_longer, [100, 5120, 7168], PlanPolicy(packing_length=4096, refuse_longer=True)),
    raised(require_supervised, build_raw_plan([8] * 400, packing_length=64), [0] * 400),
    raised(align_plan, build_raw_plan([8] * 3, packing_length=8), world_size=4, dataloader_drop_last=True),
    raised(largest_degree, 6, 8),
    ModelError.for_leak("bloom", "auto", ProbeResult(0.24, 0).reason_against_packing(limit=1)),
    StaleError.for_lengths(FOLDER, (Difference("template.system", "Be brief.", "Be exact."),)),
    StaleError.for_plan("runs/first/checkpoint-40", (Difference("plan", "ad441f64dbd8", "8bc83601250a"),)),
    StaleError.for_plan("runs/first/checkpoint-40", (Difference("order_version", 2, 3),)),
    StaleError.for_plan("runs/first/checkpoint-40", (Difference(errors.SHARED_BY, 8, 4),)),
    StaleError.for_sample(12, "data/train.jsonl, line 13", LENGTH),
    raised(refuse_other_lengths, {12: 214}, [230]),
    StaleError.for_sample(12, "data/train.jsonl.gz, line 13", LENGTH, copy="runs/first/records/b5bb9d80"),
    errors.NotBuiltError(FOLDER, "holds no plan"),
    errors.OutputError("runs/first", "No space left on device"),
    RunError.for_worker(2, "train", "its process ended"),
    not_finite_error("the loss of optimizer step 12", float("nan")),
    raised(refuse_other_packs, [{PACK: 5}], [(4,)]),
    errors.CorruptArtefactError(f"{FOLDER}/lengths.bin", "its content does not match the manifest's digest"),
)
"""Errors as the product makes them; at least one of each class."""


def raised_kinds() -> set[str]:
    """Return the kinds that the product raises: arguments of errors, or of `attrs.evolve`."""
    found = set()
    for path in (path for room in ("core", "adapters", "app") for path in (ROOT / room).rglob("*.py")):
        text, stating = path.read_text(encoding="utf-8"), STATING | ({"cls"} if path.name == "errors.py" else set())
        if path.name != "errors.py" and not any(name in text for name in (*STATING, "evolve")):
            continue
        for call in (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call)):
            kinds = [one.value for one in call.keywords if one.arg == "kind" and "evolve" in ast.unparse(call.func)]
            kinds += call.args[:1] if getattr(call.func, "id", "") in stating else ()
            found |= {one.value for kind in kinds for one in ast.walk(kind) if isinstance(one, ast.Constant)}
    return found - {""}


def entries() -> dict[str, str]:
    """Return the text below each class's heading."""
    parts = re.split(r"^### `(\w+)`$|^## .*$", PAGE, flags=re.MULTILINE)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name}


def test_every_class_and_every_kind_has_its_entry():
    """A message, and below it the kind and what to do. No entry is of an error that is gone."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PackplanError)]
    public = {one.__name__ for one in kinds if one.__name__[0] != "_"}
    names = public - {"PackplanError", "UserError", "VerificationError"}
    assert names == set(entries()) == {type(error).__name__ for error in MADE}
    assert all(name in errors.__doc__ for name in names)
    stated = {
        kind
        for name, text in entries().items()
        for kind in re.findall(r"\n```text\nerror: (?:[^\n]+\n)+```\n\n`(\w+)`: [\w`][^\n]+", text)
        if name in {*STATING, "OutputError"}
    }
    assert stated == raised_kinds() | {"refused", "locked"}, "give it an entry on the page"
    assert [] == [text for text in REMEDIES.values() if "{" not in text and text not in PAGE]


each = pytest.mark.parametrize("error", MADE, ids=lambda error: f"{type(error).__name__} {error.kind}")


@each
def test_an_entry_shows_the_message_as_it_is(error):
    """So that a search for its words finds the page."""
    assert f"```text\nerror: {error}\n```\n" in entries()[type(error).__name__], error.kind


@each
def test_errors_survive_pickling(error):
    """With all fields and the same text; those about arguments are ValueErrors."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes

    assert (type(error), str(error), repr(error)) == (type(again), str(again), repr(again))
    # torch makes the error of a worker process from its text alone
    assert type(error).__name__ not in STATING or str(error) == str(type(error)(str(error)))
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
