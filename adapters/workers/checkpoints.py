"""
Checkpoints of a policy and its optimizer, which any number of workers writes and loads.

Each worker writes its own parts by torch.distributed.checkpoint, as safetensors. They are written
under another name: the folder is renamed once all files and the manifest with their digests are on
disk, so a checkpoint is whole or does not exist. Only trained weights are stored; frozen ones are
those of the model that the run starts from.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from packplan.adapters.files import read_manifest, saving, sync_folder, write_manifest
from packplan.adapters.policy_folder import CHECKPOINT_SCHEMA, MANIFEST
from packplan.core.ports import RankGroup

_STATES = ("exp_avg", "exp_avg_sq", "step")
"""States of AdamW for each weight."""


def write_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    group: RankGroup,
    *,
    facts: Mapping[str, Any],
) -> None:
    """
    Write a checkpoint; every worker calls this.

    Args:
        folder: The checkpoint, which all workers reach.
        model: The policy.
        optimizer: AdamW over its trained weights.
        group: The workers.
        facts: Entries of the manifest about the run.

    Raises:
        OutputError: It cannot be written.
    """
    draft = folder.with_name(f".{folder.name}.tmp")
    with saving(folder.parent):
        if group.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        group.any(False)  # noqa: FBT003  # only its arrival counts
        with _one_process_is_enough():
            dcp.save(
                _state(model, optimizer), storage_writer=HuggingFaceStorageWriter(str(draft), save_distributed=True)
            )
        # A network's folder may look other to each rank for a while: all go by the first list.
        listed = group.gather(json.dumps(sorted(file.name for file in draft.iterdir())))[0]
        files = _share(json.loads(listed), group)
        own = json.dumps({name: _digest(draft / name) for name in files})
        group.any(False)  # noqa: FBT003  # unlike `gather`, it notices at once that a worker is gone
        digests = group.gather(own)
        if group.rank == 0:
            found = {name: digest for part in digests for name, digest in json.loads(part).items()}
            write_manifest(draft / MANIFEST, {"schema": CHECKPOINT_SCHEMA, **facts, "files": found})
            # An earlier run may have left one of that step.
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
            sync_folder(folder.parent)
        group.any(False)  # noqa: FBT003  # only its arrival counts


def is_whole(folder: Path, group: RankGroup) -> bool:
    """
    Return whether this worker's share of a checkpoint's files is what was written, and all workers
    see the same checkpoint; every worker calls this.
    """
    content = read_manifest(folder / MANIFEST, CHECKPOINT_SCHEMA)
    if len(set(group.gather(json.dumps(content)))) > 1 or content is None:
        return False
    stored: dict[str, str] = content["files"]
    return all(
        (folder / name).is_file() and _digest(folder / name) == stored[name] for name in _share(sorted(stored), group)
    )


def read_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Load a checkpoint into a policy and its optimizer; every worker calls this.

    Args:
        folder: A whole checkpoint.
        model: The policy, as it was when training started.
        optimizer: AdamW over its trained weights.
    """
    # Loaded in place, so each state needs its place first.
    for weight in _trained(model).values():
        optimizer.state[weight] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
        }
    with _one_process_is_enough():
        dcp.load(_state(model, optimizer), storage_reader=HuggingFaceStorageReader(str(folder)))


@contextmanager
def _one_process_is_enough() -> Iterator[None]:
    """Hide torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return trained weights and their states by name; the tensors are those that train."""
    weights = _trained(model)
    states = {
        f"optimizer.{kind}.{name}": optimizer.state[weight][kind]
        for name, weight in weights.items() if weight in optimizer.state
        for kind in _STATES
    }  # fmt: skip
    return {f"policy.{name}": weight.detach() for name, weight in weights.items()} | states


def _trained(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _share(names: list[str], group: RankGroup) -> list[str]:
    return names[group.rank :: group.world_size]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
