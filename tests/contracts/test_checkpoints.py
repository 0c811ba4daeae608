"""Ranks digest a checkpoint's files together, each once; who reads it names what differs."""

import dataclasses
import hashlib
import json
import shutil
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packplan as pp
from packplan.adapters.hf.saving import find_damage, remove_digests, write_digests
from packplan.adapters.loaders.batches import PackBatches, read_saved_progress, read_saved_trainer
from packplan.adapters.trainer.checkpoints import attention_entry, find_checkpoint, progress_entry
from packplan.adapters.trainer_state import STATE, add_digest_on_save
from packplan.core.errors import ConfigError, StaleError
from packplan.core.fingerprint import (
    SEAL,
    STATE_FORMAT,
    Fingerprint,
    RunIdentity,
    from_plain,
    json_digest,
    seal,
    to_plain,
    unseal,
)
from packplan.core.schedule import EpochSegment, Progress, ResumeState
from packplan.core.stream import (
    RankState,
    ReaderState,
    StreamCounts,
    StreamItem,
    StreamProgress,
    StreamSegment,
    StreamState,
)
from tests.references import changed

pytestmark = pytest.mark.covers

names = st.sampled_from(
    ["model.safetensors", "optimizer.pt", "rng_state_0.pth", "global_step7/zero_0.pt", "config.json"]
)


@given(st.dictionaries(names, st.binary(max_size=99), min_size=1), st.integers(1, 4))
def test_every_file_is_digested_by_one_rank(tmp_path_factory, contents, world_size):
    """Those in folders too; those of an earlier checkpoint of the same name are gone."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "packplan_digests_7.json").write_text('{"model.safetensors": "old"}')

    remove_digests(folder)
    for rank in range(world_size):
        write_digests(folder, share=rank, num_shares=world_size)

    kept = [json.loads(file.read_text()) for file in folder.glob("packplan_digests_*.json")]
    assert [world_size] * world_size == [one["files"] for one in kept]
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert sorted(expected.items()) == sorted(pair for one in kept for pair in one["digests"].items())


def find(wanted: object, folder: object = "", *, rank=0, world_size=1, other="", **options):
    """Find a checkpoint as the first or second one of some ranks, of which the first says this."""
    group = SimpleNamespace(rank=rank, world_size=world_size, gather=lambda reason: (other, reason))
    return find_checkpoint(str(wanted), str(folder), group=group, **options)


@pytest.mark.parametrize(
    ("rank", "says"), [(0, "its model.safetensors is damaged"), (1, "but on rank 0, its optimizer.pt is gone")]
)
def test_ranks_take_the_same_checkpoint(tmp_path: Path, rank, says):
    """Each reads its share alone, and neither takes what the other one found damaged."""
    save(tmp_path, PLANNED, moments=b"moments")
    for each in range(2):
        assert str(tmp_path) == find(tmp_path, rank=each, world_size=2).folder

    (tmp_path / "model.safetensors").write_bytes(b"Weights" * 9)

    with pytest.raises(ConfigError, match=says):
        find(tmp_path, rank=rank, world_size=2, other="but its optimizer.pt is gone" * rank)


def test_a_checkpoint_without_digests_is_warned_of(tmp_path: Path, caplog):
    """As of an earlier release; one whose state says that it had some is damaged."""
    save(tmp_path, PLANNED)
    (tmp_path / "packplan_digests_0.json").unlink()
    assert find_damage(tmp_path, share=0, num_shares=1) is None
    assert f"{tmp_path} has no digests" in caplog.text

    save(tmp_path, PLANNED, packplan_digests={})
    (tmp_path / "packplan_digests_0.json").unlink()
    assert "its files of digests, packplan_digests_*.json, are missing: copy" in find_damage(
        tmp_path, share=0, num_shares=1
    )


@dataclasses.dataclass
class TrainerState:
    """State of a trainer, as far as it is saved with a digest."""

    global_step: int
    stateful_callbacks: dict


def save(folder: Path, state: ResumeState | StreamState, *, moments: bytes = b"", **more: object) -> None:
    """Write a checkpoint of one rank, in the order of the trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 9)
    (folder / "optimizer.pt").write_bytes(moments)
    write_digests(folder, share=0, num_shares=1)
    kept = progress_entry(state) | attention_entry("varlen")
    held = TrainerState(3, {**kept, "Control": {"should_epoch_stop": False}, **more})
    add_digest_on_save(held)
    held.save_to_json(folder / "trainer_state.json")


SEGMENT = EpochSegment(world_size=2, dataloader_drop_last=False, pack_offset=4)

IDENTITY = RunIdentity(Fingerprint({"training.optim": '"sgd"'}), Fingerprint({"training.max_steps": "2"}))

PLANNED = ResumeState(
    "a1", "d", 1, True, "full", 2,  # noqa: FBT003  # as it is stored
    Progress(step=3, epoch=1, epoch_step=2, segments=(SEGMENT,)), identity=IDENTITY,
)  # fmt: skip

ITEMS = (StreamItem(4), StreamItem(5, length=7))

READER = ReaderState(9, ITEMS, ITEMS, (ITEMS, ITEMS[:1]), StreamCounts(samples=3, tokens=12))

RANK = RankState((ReaderState(), READER), 1, StreamCounts(tokens=3), trained=4)

STREAMED = StreamState(
    Fingerprint({"training.seed": 1, "data": "a", "reward": None}),
    StreamProgress(2, 2, step=3, epoch=1, epoch_step=1, segments=(StreamSegment(reads=(3, 4)),)),
    IDENTITY,
    (RANK, RANK),
)


@pytest.mark.parametrize("state", [PLANNED, STREAMED], ids=["plan", "stream"])
def test_a_resume_state_comes_back_and_none_that_was_changed(tmp_path: Path, state):
    """Whatever number, text or key: named, it is refused, and `last` takes the one before."""
    whole, torn, kind = tmp_path / "checkpoint-3", tmp_path / "checkpoint-4", type(state)
    for folder in (whole, torn):
        save(folder, state)
        assert state == find(folder, state_class=kind).resume_state
    with pytest.raises(ConfigError, match=r"another custom.trainer_variant"):
        find(whole, state_class=StreamState if state is PLANNED else ResumeState)

    for other in changed(json.loads((torn / "trainer_state.json").read_text())):
        (torn / "trainer_state.json").write_text(json.dumps(other))
        with pytest.raises(ConfigError, match=r"trainer_state\.json is damaged|Packplan did not write it"):
            find(torn, state_class=kind)
    assert str(whole) == find("last", tmp_path, state_class=kind).folder


GOLDEN = json.loads(Path(__file__).with_name("states.json").read_text())
"""Format -> the states `PLANNED` and `STREAMED`, as releases with that format saved them."""


@pytest.mark.parametrize("number", GOLDEN)
@pytest.mark.parametrize("state", [PLANNED, STREAMED], ids=["plan", "stream"])
def test_a_state_of_each_format_is_read(number, state):
    """Fields that its format lacks have their defaults; the newest format is written today."""
    stored = GOLDEN[number][type(state).__name__]

    assert state == from_plain(type(state), unseal(stored))
    if number == max(GOLDEN, key=int):
        assert stored == json.loads(json.dumps(seal(to_plain(state)))), "a field changed: raise STATE_FORMAT"
        assert int(number) == STATE_FORMAT


OF_PLUGIN = json.loads(Path(__file__).with_name("plugin_states.json").read_text())
"""Format -> trainer's state in a checkpoint of the plugin, within the second epoch of 11 packs."""


@pytest.mark.parametrize("number", OF_PLUGIN)
def test_the_plugin_goes_on_from_a_checkpoint_of_each_format(number, tmp_path):
    """Early ones name no trainer, and so are taken by any."""
    (tmp_path / STATE).write_text(json.dumps(OF_PLUGIN[number]))
    steps, held = OF_PLUGIN[number]["global_step"], from_plain(ResumeState, unseal(read_saved_progress(tmp_path)))
    plan = pp.plan([1] * 11, 1)
    batches = PackBatches(
        plan.schedule(packs_per_step=2, epochs=2, seed=42), state=attrs.evolve(held, progress=Progress())
    )

    batches.load_state_dict(read_saved_progress(tmp_path))

    assert (None if len(number) == 1 else "Seq2SeqTrainer") == read_saved_trainer(tmp_path)
    assert (held.plan, steps - 6) == (batches.state.plan, held.progress.epoch_step)
    assert 11 - 2 * (steps - 6) == len(list(chain(*batches)))


def test_a_state_of_a_newer_release_is_refused_as_such():
    later = {**to_plain(PLANNED), "format": STATE_FORMAT + 1, "mood": "good"}
    with pytest.raises(ValueError, match=rf"newer Packplan wrote it .format {STATE_FORMAT + 1}; .*: update Packplan"):
        unseal({**later, SEAL: json_digest(later)})


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def inverted(content: bytes) -> bytes:
    return bytes(255 - byte for byte in content)


def foreign(content: bytes) -> bytes:
    """Leave out of a trainer's state what this project adds."""
    return json.dumps({**json.loads(content), "stateful_callbacks": {}}).encode()


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("trainer_state.json", cut, "is damaged"),
        ("trainer_state.json", foreign, "Packplan did not write it"),
        ("optimizer.pt", None, "its optimizer.pt is missing: copy it again, or name another checkpoint"),
        ("model.safetensors", cut, "its model.safetensors is damaged"),
        ("model.safetensors", inverted, "its model.safetensors is damaged, .*: copy it again, or name another checkp"),
        ("packplan_digests_0.json", inverted, "its .* damaged"),
        ("packplan_digests_0.json", None, "it holds only weights"),
    ],
)
def test_a_torn_or_foreign_checkpoint_is_no_checkpoint(tmp_path: Path, caplog, name, damage, reason):
    """`last` passes over it; named, it is refused with the reason."""
    whole, torn = tmp_path / "checkpoint-3", tmp_path / "checkpoint-4"
    for folder in (whole, torn):
        save(folder, PLANNED, moments=b"moments")
    content = (torn / name).read_bytes()
    (torn / name).unlink()
    if damage:
        (torn / name).write_bytes(damage(content))

    with pytest.raises(ConfigError, match=reason):
        find(torn)
    assert str(whole) == find("last", tmp_path).folder
    shutil.rmtree(whole)
    with pytest.raises(ConfigError, match="passed over, or remove the key; the run then starts at step 0, and overwri"):
        find("last", tmp_path)
    assert "another checkpoint" not in caplog.text, "last does not advise to set last"


def test_what_holds_a_checkpoint_or_is_a_file_in_it_is_none(tmp_path: Path):
    """The refusal names the newest checkpoint, or `last`."""
    save(tmp_path / "checkpoint-3", PLANNED)

    with pytest.raises(ConfigError, match=r"no checkpoint: name \S*checkpoint-3, the newest in it, or set last"):
        find(tmp_path)
    with pytest.raises(ConfigError, match="but that is a file: name the folder of a checkpoint, or set last"):
        find(tmp_path / "checkpoint-3" / "trainer_state.json")


def test_last_is_the_newest_whole_checkpoint_of_the_run(tmp_path: Path, caplog):
    """
    By any difference. One warning names those that are passed over; where all are of other runs,
    the newest says what differs.
    """
    mine = attrs.evolve(PLANNED, identity=RunIdentity(Fingerprint({"training.optim": '"adamw"'})))
    save(tmp_path / "checkpoint-3", mine)
    for newer in (4, 5):
        save(tmp_path / f"checkpoint-{newer}", PLANNED)

    def found(now: ResumeState, wanted: object = "last") -> str:
        return find(wanted, tmp_path, differences=partial(ResumeState.differences, now=now)).folder

    assert str(tmp_path / "checkpoint-3") == found(mine)
    (said,) = caplog.messages
    assert "checkpoint-5 and 1 older are passed over: of another run: training.optim" in said
    assert str(tmp_path / "checkpoint-5") == found(attrs.evolve(PLANNED, identity=RunIdentity(IDENTITY.fixed)))
    with pytest.raises(StaleError, match=r"cannot resume from \S*checkpoint-4, since these have changed:\n  train"):
        found(mine, tmp_path / "checkpoint-4")
    with pytest.raises(StaleError, match="checksum of the packs was 'a1', now 'b2'") as raised:
        found(attrs.evolve(PLANNED, plan="b2"))
    assert "checkpoint-5" in str(raised.value)
    assert 2 == len(caplog.messages)
