"""The change of a run most likely to help, by kind of error; docs/troubleshooting.md has more."""

from collections.abc import Mapping
from types import MappingProxyType

from packplan.core.errors import PackplanError, shortened

LESS_DROPPED = "To drop less, set training.packing_drop_last: false, or lower training.packing_min_fill_ratio"
"""Remedy for a stream that drops too much."""

_MEASURE_AGAIN = "restore it, or use another training.output_dir to measure and plan again"

_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "set training.effective_batch_size to {nearest}",
        "all_skipped": "set training.packing_allow_single_long: true",
        "all_dropped": "set training.packing_drop_last: false to train all of them",
        "dropped_tokens": "set training.packing_drop_last: false to train all of them",
        "too_long": "raise template.max_length to {longest:,}",
        "too_short": "set training.dataloader_drop_last: false",
        "unsupervised": "raise template.max_length if it truncates their answers; packplan plan show RUN.yaml "
        "--sample {sample} --text shows what is trained of one",
        "too_many_epochs": "lower training.max_steps or training.num_train_epochs",
        "isolation": "set training.packing: false",
        "attention": "set model.attn_impl: auto",
        "probe": "set training.packing: false",
        "stale_lengths": "use another training.output_dir, or delete that folder to measure again (checkpoints lie "
        "elsewhere and stay)",
        "borrowed_lengths": "remove training.packing_lengths_from to measure here",
        "table_lengths": "remove custom.lengths to measure here, or write a table with packplan measure --config",
        "changed_plan": "restore the data and the settings, or start again from its weights: set model.model to it, "
        "and remove training.resume_from_checkpoint",
        "changed_order": "install the version that wrote the checkpoint: this one trains packs in another order",
        "changed_image": _MEASURE_AGAIN,
        "changed_sample": _MEASURE_AGAIN,
        "not_built": "packplan plan build measures and plans",
        "refused": "make room, or choose a training.output_dir that you may write",
        "locked": "wait until it is done, or raise training.packing_wait_timeout_s",
        "different_runs": "start all of them with the same YAML, options, model and packages",
        "not_finite": "lower training.learning_rate",
        "unequal": "set training.packing: false",
    }
)
"""Kind of an error -> remedy, with its `details` in braces."""


_KEYS_OF_PLANS: Mapping[str, str] = MappingProxyType(
    {
        "algorithm": "training.packing_algorithm",
        "allow_single_long": "training.packing_allow_single_long",
        "min_fill_ratio": "training.packing_min_fill_ratio",
        "mix": "custom.fusion_config",
        "mix_seed": "training.seed",
        "packing": "training.packing",
        "packing_length": "template.max_length",
        "replanned": "training.packing_epochs",
    }
)
"""Input of a plan -> the key that decides it."""


def with_remedy(error: PackplanError) -> str:
    """
    Return the text of an error with its remedy, if it has one, in keys of a run's YAML.

    >>> from packplan.core.errors import ArgumentError
    >>> with_remedy(ArgumentError("too_short", "3 packs cannot feed 4 ranks"))
    '3 packs cannot feed 4 ranks; set training.dataloader_drop_last: false'
    """
    fact, kind = str(error), error.kind
    if kind == "isolation" and error.details["attn_impl"] != "auto":
        kind = "attention"
    if kind not in _REMEDIES:
        return fact
    if kind == "changed_plan":
        changed = {_KEYS_OF_PLANS[one.key]: None for one in error.details["differences"] if one.key in _KEYS_OF_PLANS}
        fact += f"\n  changed: {', '.join(changed)}" if changed else ""
    between = "\n  " if "\n" in fact else "; "
    return shortened(f"{fact}{between}{_REMEDIES[kind].format_map(error.details)}")
