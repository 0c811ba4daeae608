"""
A checkpoint's files are digested by all ranks together, each file once; what differs later is named
by whoever reads it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.trainer import checkpoints
from packplan.adapters.trainer.checkpoints import (
    find_checkpoint,
    read_rank_state,
    read_resume_state,
    read_visits,
    remove_digests,
    to_state,
    write_digests,
    write_rank_state,
    write_visits,
)
from packplan.core.errors import ConfigError, CorruptArtefactError
from packplan.core.fingerprint import Fingerprint
from packplan.core.schedule import EpochSegment, Progress, ResumeState, Visits
from packplan.core.stream import (
    CarryOptions,
    Item,
    RankState,
    ShardState,
    StreamCounts,
    StreamProgress,
    StreamSegment,
    StreamState,
    admit_first,
    read_items,
)

names = st.sampled_from(
    ["model.safetensors", "optimizer.pt", "rng_state_0.pth", "global_step7/zero_0.pt", "config.json"]
)


@given(st.dictionaries(names, st.binary(max_size=99), min_size=1), st.integers(1, 4))
def test_every_file_is_digested_by_one_rank(tmp_path_factory, contents, world_size):
    """
    Those in folders too; those of an earlier checkpoint of the same name and more ranks are gone.
    """
    folder = tmp_path_factory.mktemp("checkpoint")
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "packplan_digests_7.json").write_text('{"model.safetensors": "old"}')

    remove_digests(folder)
    read = [write_digests(folder, share=rank, num_shares=world_size) for rank in range(world_size)]

    kept = [json.loads(file.read_text()) for file in folder.glob("packplan_digests_*.json")]
    assert sum(map(len, contents.values())) == sum(read)
    assert len(contents) == sum(map(len, kept))
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert expected == {name: digest for one in kept for name, digest in one.items()}


class TwoRanks:
    """One of two ranks, and what the other one's flag is."""

    world_size = 2

    def __init__(self, rank: int, *, other: bool) -> None:
        self.rank, self.other = rank, other

    def any(self, flag):
        return flag or self.other


@pytest.mark.parametrize(
    ("rank", "says"), [(0, "its model.safetensors is damaged"), (1, "another rank cannot read it")]
)
def test_ranks_take_the_same_checkpoint(tmp_path: Path, monkeypatch, rank, says):
    """Each reads its share alone, and neither takes what the other one found damaged."""
    monkeypatch.setattr(checkpoints, "_why_not", lambda *_: None)
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 9)
    (tmp_path / "optimizer.pt").write_bytes(b"moments")
    write_digests(tmp_path, share=0, num_shares=1)
    for each in range(2):
        assert tmp_path == find_checkpoint(str(tmp_path), "", group=TwoRanks(each, other=False))

    (tmp_path / "model.safetensors").write_bytes(b"Weights" * 9)

    with pytest.raises(ConfigError, match=says):
        find_checkpoint(str(tmp_path), "", group=TwoRanks(rank, other=rank == 1))


def test_a_resume_state_comes_back(tmp_path: Path):
    """Equal in every field."""
    segment = EpochSegment(world_size=2, dataloader_drop_last=False, pack_offset=4)
    progress = Progress(step=3, epoch=1, epoch_step=2, segments=(segment,))
    resume_state = ResumeState("a1", "d", 1, True, "full", 2, progress)  # noqa: FBT003
    state = {"stateful_callbacks": to_state(resume_state, attn_impl="varlen")}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))

    assert resume_state == read_resume_state(tmp_path, ResumeState)


def test_the_progress_of_a_stream_comes_back(tmp_path: Path):
    """Equal in every field, of each rank and over all; a plan does not go on from it."""
    options = CarryOptions(packing_length=10, packing_buffer=3, drop_last=False)
    shard = read_items(ShardState(), [Item(place, text="no") for place in range(6)], places=9)
    for length in (7, 5, 6, 4):
        shard = admit_first(shard, length, options=options)
    assert all((shard.ahead, shard.buffer, shard.packs, shard.counts.samples))
    rank = RankState((ShardState(), shard), 1, StreamCounts(tokens=3), trained=4)
    progress = StreamProgress(2, 2, step=3, epoch=1, epoch_step=1, segments=(StreamSegment(reads=(3, 4)),))
    state = StreamState(Fingerprint({"training.seed": 1, "data": "a", "reward": None}), progress)

    write_rank_state(tmp_path / "checkpoint", 1, rank)
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"stateful_callbacks": to_state(state, attn_impl="varlen")})
    )

    assert rank == read_rank_state(tmp_path / "checkpoint", 1)
    assert state == read_resume_state(tmp_path, StreamState)
    with pytest.raises(KeyError):
        read_resume_state(tmp_path, ResumeState)


def test_visits_come_back_and_their_damage_is_named(tmp_path):
    """With the records; a checkpoint of an earlier version has none."""
    visits = Visits(np.array([4, 0, 2], dtype=np.int32), np.array([1, 0, 2], dtype=np.int32))
    ids = np.array([2**63, 5, 6], dtype="<u8")
    assert read_visits(tmp_path) is None

    write_visits(tmp_path, visits, ids)
    write_digests(tmp_path, share=0, num_shares=1)

    found, records = read_visits(tmp_path)
    assert [4, 0, 2] == found.total.tolist()
    assert [1, 0, 2] == found.epoch.tolist()
    assert ids.tolist() == records.tolist()
    write_visits(tmp_path, visits.in_next_epoch(), ids)
    with pytest.raises(CorruptArtefactError, match=r"packplan_visits.npy"):
        read_visits(tmp_path)
