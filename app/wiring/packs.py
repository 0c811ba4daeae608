"""
Packs of a converted run, by the lengths of its samples: those that are stored, else those of some
of them, measured here. No weights are loaded, and nothing stays on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping

import attrs
import numpy as np

from packplan.adapters.config.run import parse_config
from packplan.adapters.config.trainer_keys import TrainerKey
from packplan.adapters.progress import BRIEF_S, progress
from packplan.app.planning.schedule import split_schedule
from packplan.app.planning.split import Alignment
from packplan.app.planning.stored_lengths import open_lengths, stale_inputs
from packplan.app.wiring.inputs import with_inputs
from packplan.app.wiring.stores import open_stores, require_inputs
from packplan.app.wiring.works import policy_of
from packplan.core.config import RunConfig, with_remedy
from packplan.core.conversion import Conversion, packs_of_step, samples_of_step, with_packs, without_packs
from packplan.core.errors import ConfigError, DataSetError, NotBuiltError, PackplanError, RecordError
from packplan.core.lengths import IntArray
from packplan.core.plan import RawPlan, build_raw_plan
from packplan.core.samples import ShortcutError

MEASURED = 512
"""Samples that are measured, where more are not stored."""

_AT_ONCE = 32
"""Samples in a row, of those that are measured."""

_MOST = 200
"""Characters of a reason that are shown."""


def packed(conversion: Conversion, keys: Mapping[str, TrainerKey], *, world_size: int) -> Conversion:
    """
    Return a run whose samples share packs, if its steps can keep their samples and their lengths
    can be known here; else the same run, and why.

    Args:
        conversion: The run as its command has it, without packs.
        keys: Settings that `training.` passes on.
        world_size: Ranks of the run.
    """
    samples = samples_of_step(conversion.document["training"])
    try:
        config = parse_config(conversion.document, "the run", keys)
        lengths = _lengths(config)
        if config.template.truncation_strategy is None:
            lengths = lengths[lengths < config.packing_length]
        plan = _plan(_with_packs(config, 1), lengths)
        samples_per_pack = plan.planned_samples / len(plan.packs)
        packs = packs_of_step(samples, samples_per_pack=samples_per_pack)
        if packs is None:
            why = f"a pack holds {samples_per_pack:.1f} samples in the mean, and a step of a rank {samples}"
            return without_packs(conversion, why)
        after = _with_packs(config, packs)
        steps = (_steps(config, _plan(config, lengths), world_size), _steps(after, plan, world_size))
        found = with_packs(conversion, packs, samples_per_pack=samples_per_pack, steps=steps, world_size=world_size)
        parse_config(found.document, "the run", keys)
    except PackplanError as error:
        why = str(error.faults[0]) if isinstance(error, ConfigError) else with_remedy(error)
        why = why if len(why) <= _MOST else f"{why[: _MOST - 1]}…"
        return without_packs(conversion, f"to pack it, convert it again when this is solved: {why}")
    return found


def _with_packs(config: RunConfig, packs: int) -> RunConfig:
    """Return a run of so many packs in a rank's step."""
    training = attrs.evolve(
        config.training, packing=True, per_device_train_batch_size=1, gradient_accumulation_steps=packs
    )
    return attrs.evolve(config, training=training)


def _plan(config: RunConfig, lengths: IntArray) -> RawPlan:
    return build_raw_plan(lengths, policy_of(config, "train"), quick_bound=True)


def _steps(config: RunConfig, plan: RawPlan, world_size: int) -> int:
    """Return the optimizer steps of a run."""
    aligned = Alignment.from_config(config, "train").align(plan, world_size=world_size)
    return split_schedule(config, "train", aligned).total_steps


def _lengths(config: RunConfig) -> IntArray:
    """
    Return the tokens of each sample, those that are not measured as those that are; shape
    (num_samples,).

    Raises:
        PackplanError: The model or the data are not here, or no sample can be measured.
    """
    try:
        stored = open_lengths(open_stores(config, "train").lengths)
        if not any(stale_inputs(config, stored)):
            return stored.tokens[stored.tokens > 0]
    except NotBuiltError:
        pass  # what is not stored is measured
    with tempfile.TemporaryDirectory() as cache:
        here = with_inputs(attrs.evolve(config, custom=attrs.evolve(config.custom, records_cache=cache)))
        require_inputs(here)
        try:
            total, lengths = _measured(here, in_full=False)
        except ShortcutError:
            total, lengths = _measured(here, in_full=True)
    if not lengths:
        message = f"none of {MEASURED} records can become a sample"
        raise DataSetError(message)
    return np.resize(np.array(lengths, dtype=np.int64), total)


def _measured(config: RunConfig, *, in_full: bool) -> tuple[int, list[int]]:
    """Return the number of samples, and the tokens of some of them, from all over the data."""
    from packplan.app.wiring.training import open_measurer, open_samples  # loads torch

    source = open_measurer(config, open_samples(config)["train"])
    total = len(source)
    rows = progress(list(_rows(total)), desc="measuring", unit=" rows", delay=BRIEF_S, leave=False)
    outcomes = (outcome for row in rows for outcome in source.measure_many(row, in_full=in_full))
    return total, [one.measurement.length for one in outcomes if not isinstance(one, RecordError)]


def _rows(total: int) -> Iterator[range]:
    """Yield rows of samples from all over the data; all samples where they are few."""
    count = min(-(-total // _AT_ONCE), MEASURED // _AT_ONCE)
    for row in range(count):
        start = row * (total - _AT_ONCE) // max(count - 1, 1) if count * _AT_ONCE < total else row * _AT_ONCE
        yield range(start, min(start + _AT_ONCE, total))
