"""
A checkpoint's files are digested by all ranks together, each file once; what differs later is named
by whoever reads it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.trainer import checkpoints
from packplan.adapters.trainer.checkpoints import (
    find_checkpoint,
    read_resume_state,
    remove_digests,
    to_state,
    write_digests,
)
from packplan.core.errors import ConfigError
from packplan.core.schedule import EpochSegment, Progress, ResumeState

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
    monkeypatch.setattr(checkpoints, "_why_not", lambda _: None)
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

    assert resume_state == read_resume_state(tmp_path)
