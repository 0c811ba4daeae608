"""A run's samples, and their measurer."""

import logging
import os

from packplan.adapters.samples.encoder import SampleSpec, SwiftEncoder
from packplan.adapters.samples.measurer import POOL_START_S, SwiftMeasurer
from packplan.adapters.samples.rows import RowsEncoder, RowsFile
from packplan.adapters.samples.template import open_template, refuse_packing
from packplan.app.wiring.commands import CommandRun
from packplan.app.wiring.inputs import records_cache
from packplan.app.wiring.lengths import MeasuringRun
from packplan.core.config import RunConfig
from packplan.core.errors import agree, counted

log = logging.getLogger(__name__)


def open_samples(config: RunConfig) -> dict[str, SwiftEncoder]:
    """Open the data of each split, `train` and perhaps `eval`, on one template."""
    if isinstance(config, CommandRun):
        return _open_rows(config)
    packs = config.training.packing
    template = open_template(config.model, config.template, packing_length=config.packing_length, packs=packs)
    if packs:
        refuse_packing(template)
    opened: dict[str, SwiftEncoder] = {}
    paths = {"train": config.custom.train_jsonl, "eval": config.custom.val_jsonl}
    for split, files in paths.items():
        if not files:
            continue
        spec = SampleSpec(
            config.model,
            config.template,
            config.custom,
            files,
            config.packing_length,
            records_cache(config),
            heads=isinstance(config, MeasuringRun),
        )
        opened[split] = SwiftEncoder(spec, template=template)
        opened[split].require_images()
        for one in opened[split].data_files():
            log.info("%s: %s has records of the shape %s", split, one.file, one.shape)
        with_tags = opened[split].records.num_with_media_tags
        if with_tags and os.environ.get("RANK", "0") == "0":
            log.warning(
                "%s: %s of %s %s <video> or <audio> without such media, which stays text",
                split,
                f"{with_tags:,}",
                counted(len(opened[split]), "record"),
                agree(with_tags, "says", "say"),
            )
    return opened


def _open_rows(config: CommandRun) -> dict[str, SwiftEncoder]:
    """Open the rows that a command of ms-swift trains."""
    template = config.command.open_template()
    names = {"train": config.custom.train_jsonl, "eval": config.custom.val_jsonl}
    inputs = config.command.inputs()
    opened: dict[str, SwiftEncoder] = {}
    for split, rows in config.command.open_rows(template).items():
        spec = SampleSpec(config.model, config.template, config.custom, (), config.packing_length, inputs=inputs)
        file = RowsFile(rows, name=" ".join(names[split]), num_parts=max(config.command.num_parts, 1))
        opened[split] = RowsEncoder(spec, template=template, rows=file)
    return opened


def open_measurer(config: RunConfig, encoder: SwiftEncoder, *, pool_start_s: float = POOL_START_S) -> SwiftMeasurer:
    """
    Return the measurer of a split's samples.

    Args:
        config: The run.
        encoder: Gives the samples.
        pool_start_s: Seconds that a pool of workers takes to start.
    """
    return SwiftMeasurer(
        encoder,
        workers=config.training.packing_length_precompute_workers,
        pool_start_s=pool_start_s,
    )
