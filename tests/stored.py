"""Runs as they are stored once they are built, made without data, model or ms-swift."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from packplan.app.opening.runs import read_config
from packplan.app.opening.stores import artefacts_folder, open_stores
from packplan.app.planning.split import align_measured, align_options
from packplan.core.config.identity import config_length_inputs, plan_policy
from packplan.core.config.run import RunConfig
from packplan.core.equality import PackingVerdict
from packplan.core.fingerprint import Fingerprint
from packplan.core.plan import build_raw_plan
from packplan.core.ports import StoredRows
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, DataFile

LENGTHS = [60, 20, 50, 30, 40, 40, 80, 7, 33, 12, 51, 29] * 5


def store_run(
    folder: Path,
    name: str = "run",
    *,
    lengths: Sequence[int] = LENGTHS,
    eval_lengths: Sequence[int] | None = None,
    world_sizes: Sequence[int] = (2,),
    measured: int | None = None,
    repeatability: bool = True,
    files: Sequence[DataFile] = (),
    supervised: int | Sequence[int] = 1,
    **overlay: dict[str, Any],
) -> Path:
    """Write the YAML of a run, and what building it would store; return the YAML."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"model": "none"},
        "template": {"max_length": 80},
        "custom": {"train_jsonl": str(folder / "data.jsonl")},
        "training": {"output_dir": str(folder / name), "effective_batch_size": 4, "learning_rate": "1e-5"},
    }
    for section, keys in overlay.items():
        sections[section] |= keys
    if eval_lengths:
        sections["custom"]["val_jsonl"] = str(folder / "val.jsonl")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(sections))
    config = read_config(path)
    for split, of in (("train", lengths), ("eval", eval_lengths)):
        if of:
            shutil.rmtree(artefacts_folder(config.training.output_dir) / split, ignore_errors=True)
            rows = _rows(of[:measured], supervised, repeatability=repeatability)
            _store(config, split, of, world_sizes, rows)
    if files:
        stores = open_stores(config, "train")
        with stores.lock.hold(timeout_s=1, report=lambda _: None):
            stores.lengths.save_file_descriptions(files)
    return path


def _rows(lengths: Sequence[int], supervised: int | Sequence[int], *, repeatability: bool) -> StoredRows:
    rows = np.zeros((len(lengths), len(COLUMNS)), dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[0, 2:4] = lengths, supervised, (1, 4)
    media = np.array([[1000, 28, 56, 7, 0, 0, 0]], dtype=np.int64).reshape(-1, len(MEDIA_COLUMNS))
    return StoredRows(rows, media, repeatability={"samples": [0]} if repeatability else None)


def _store(config: RunConfig, split: str, lengths: Sequence[int], world_sizes: Sequence[int], rows: StoredRows) -> None:
    stores, policy = open_stores(config, split), plan_policy(config, split)
    inputs = config_length_inputs(config)
    with stores.lock.hold(timeout_s=1, report=lambda _: None):
        stores.lengths.open_for_append(Fingerprint(inputs), len(lengths), str)
        stores.lengths.append(rows, f"data {lengths}")
        if len(rows.table) < len(lengths):
            return
        raw, key = build_raw_plan(lengths, policy), policy.fingerprint(stores.lengths.digest())
        stores.plans.save(key, raw)
        for world_size in world_sizes:
            stores.plans.save_aligned(
                key, align_measured(raw, np.array(lengths), world_size=world_size, **align_options(config, split))
            )


def asked(path: Path) -> Path:
    """Store a verdict on a run's model, so that none of its processes asks; return the YAML."""
    from packplan.app.opening import verdicts

    config = read_config(str(path))
    if verdicts.needs_verdict(config) and verdicts.load_verdict(config) is None:
        of_model = _VERDICTS.get(verdicts.verdict_key(config).digest)
        verdicts.store_verdict(config, of_model or verdicts.probe_unless_stored(config))
    return path


def remember_verdict(config: RunConfig) -> None:
    """Let `asked` store the verdict of a run that has ended for others of the same model, too."""
    from packplan.app.opening.verdicts import load_verdict, verdict_key

    if (verdict := load_verdict(config)) is not None:
        _VERDICTS[verdict_key(config).digest] = verdict


_VERDICTS: dict[str, PackingVerdict] = {}
"""Verdicts on the models that this process has trained, by the digest of what they depend on."""
