"""
Opens the splits of a run, for all commands that plan, train or verify. Opening writes no files
except copies of data files that cannot be read in random order.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial

import attrs
import torch

from packplan.adapters.samples.data_set import FileRecords
from packplan.adapters.samples.dataset_rows import DatasetRowsMeasurer
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.adapters.samples.template import PROCESSING_VARIABLES, length_inputs, open_template
from packplan.app.opening.command_rows import open_command_encoders
from packplan.app.opening.length_tables import open_known_lengths
from packplan.app.opening.policies import epoch_recipe, policy_of_split, work_of_run
from packplan.app.opening.stores import open_stores, records_cache
from packplan.app.planning.split import Split, align_options
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, Fault
from packplan.core.fingerprint import Fingerprint
from packplan.core.ports import BlockExecutor, MeasuredBlock

log = logging.getLogger(__name__)


def open_splits(config: RunConfig) -> dict[str, Split]:
    """
    Open the splits of a run, `train` and perhaps `eval`, with their settings, stores, samples and
    measurers.
    """
    splits = {}
    custom, training = config.custom, config.training
    measurer = SwiftMeasurer if config.command is None else DatasetRowsMeasurer
    for name, encoder in open_encoders(config).items():
        join = partial(_join_ray, config, encoder) if training.packing_length_measured_by == "ray" else None
        source = measurer(encoder, workers=training.packing_length_precompute_workers, join_cluster=join)
        splits[name] = Split(
            name=name, policy=policy_of_split(config, name), align_options=align_options(config, name),
            work_model=work_of_run(config)[0], recipe=epoch_recipe(config, name, encoder.data_files()),
            max_bad_share=custom.max_bad_share if custom.on_bad_record == "skip" else None,
            flush_every=training.packing_length_cache_persist_every,
            stores=open_stores(config, name), encoder=encoder, source=source,
            known=open_known_lengths(custom.lengths, source) if custom.lengths else None,
        )  # fmt: skip
    return splits


def _join_ray(config: RunConfig, encoder: SwiftEncoder, in_full: bool) -> BlockExecutor:  # noqa: FBT001  # by place
    """Connect to the Ray cluster that measures a run's samples."""
    from packplan.adapters.ranks.ray_executor import RayExecutor

    training = attrs.evolve(config.training, trainer={})  # which may hold secrets
    sent, key = attrs.evolve(config, training=training), length_inputs(config, encoder.template)
    opens = partial(_open_on_node, sent, encoder.paths, encoder.records, key, in_full=in_full)
    # Each process has one core: tokenizers would start as many threads as a node has.
    variables = {name: os.environ.get(name) for name in PROCESSING_VARIABLES} | {"TOKENIZERS_PARALLELISM": "false"}
    timeout_s = training.packing_wait_timeout_s
    return RayExecutor(opens, address=training.ray_address, variables=variables, timeout_s=timeout_s)


def _open_on_node(
    config: RunConfig, paths: tuple[str, ...], records: FileRecords, key: Fingerprint, *, in_full: bool
) -> Callable[[range], MeasuredBlock]:
    """
    Open template and records in a process of a cluster, and return a function that measures blocks
    of records there.

    Raises:
        DataSetError: A file is missing on this node, or differs from the starting machine's file.
        ConfigError: The model, a package version or an environment variable differs on this node.
    """
    records.reopen()
    torch.set_num_threads(1)
    template = open_template(config.model, config.template, packing_length=config.packing_length)
    if differences := key.differences(length_inputs(config, template)):
        faults = (
            Fault(one.key, f"is {one.current!r}, but {one.stored!r} on the starting machine") for one in differences
        )
        raise ConfigError("its environment", tuple(faults))
    measurer = SwiftMeasurer(SwiftEncoder(config, paths, template=template, records=records))
    return partial(measurer.measure_block, in_full=in_full)


def open_encoders(config: RunConfig) -> Mapping[str, SwiftEncoder]:
    """Open the records of the splits, `train` and perhaps `eval`, with a shared template."""
    if config.command is not None:
        return open_command_encoders(config, config.command)
    template = open_template(
        config.model, config.template, packing_length=config.packing_length, packs=config.training.packing
    )
    encoders: dict[str, SwiftEncoder] = {}
    for split, files in {"train": config.custom.train_jsonl, "eval": config.custom.val_jsonl}.items():
        if files:
            encoders[split] = SwiftEncoder(config, files, template=template, cache=records_cache(config))
            _ = encoders[split].image_tokens  # refuses a template that cannot encode the model's images
            for one in encoders[split].data_files():
                log.info("%s: %s has records of the shape %s", split, one.file, one.shape)
    return encoders
