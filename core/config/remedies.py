"""
Remedy for each kind of error: an action of the user, often with a YAML key to set.

A remedy for errors that scripts get too names the argument of `plan` or `schedule` beside the YAML
key. In messages about a command of ms-swift, `name_arguments` replaces YAML keys by
arguments of the command. The page docs/troubleshooting.md has further remedies.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

MEASURE_AGAIN = "restore it, or measure and plan again in another folder (training.output_dir)"
"""Remedy for an input, an image or a sample that has changed since its length was measured."""

LOSS_REMEDY = "divide the loss by num_items_in_batch, or by the number of pairs, and let no sample affect another"
"""Remedy for a pack whose loss differs from that of its samples alone."""

GRADIENT_REMEDY = "the loss agrees, so check hooks, masks and position_ids: samples may affect each other"
"""Remedy for a pack that differs from its samples alone only in its gradients."""

DROP_LESS_REMEDY = "To drop less, set training.packing_drop_last: false, or lower training.packing_min_fill_ratio"
"""Remedy for a stream that drops too large a share of its tokens."""

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "set training.effective_batch_size to {nearest}",
        "all_skipped": "train them by training.packing_allow_single_long: true (in Python: allow_single_long=True)",
        "all_dropped": "to train all packs, set training.packing_drop_last: false (in Python: drop_last=False)",
        "dropped_tokens": "to train all packs, set training.packing_drop_last: false (in Python: drop_last=False)",
        "too_long": "raise the packing length (template.max_length) to {longest:,}",
        "degree": "set training.max_sequence_parallel_size (in Python: degrees) to {largest}",
        "too_short": "to train the remainder, set training.dataloader_drop_last: false (in Python: drop_last=False)",
        "unsupervised": "raise template.max_length if it truncates answers; packplan plan show RUN.yaml "
        "--sample {sample} --text shows which text of a sample is trained",
        "too_many_epochs": "lower training.max_steps or training.num_train_epochs",
        **dict.fromkeys(("isolation", "probe", "unequal"), "train without packing (training.packing: false)"),
        "attention": "let the run choose another attention (model.attn_impl: auto)",
        "stale_lengths": "measure again in another folder (training.output_dir), or delete {folder}, which has no "
        "checkpoints",
        "borrowed_lengths": "to measure here, remove training.packing_lengths_from",
        "table_lengths": "to measure here, remove custom.lengths; packplan measure --config writes a table that fits",
        "changed_plan": "restore the data and the settings, or start a new run from the checkpoint's weights: load the "
        "model from the checkpoint, and remove resume_from_checkpoint (in Python: load_state_dict)",
        "fewer_ranks": "start as many ranks as before, or share no pack (training.sequence_parallel_size: 1)",
        "changed_order": "install the version that wrote the checkpoint: the present one trains packs in another order",
        **dict.fromkeys(("changed_image", "changed_sample"), MEASURE_AGAIN),
        "changed_row": "restore it, let collators keep order and mask padding, or plan the lengths that rows have now",
        "changed_copy": "delete {copy}: the next run makes the copy again",
        "not_built": "run packplan plan build, which measures and plans",
        "refused": "free disk space, or choose another folder (training.output_dir)",
        "locked": "wait until that job is done, or raise training.packing_wait_timeout_s",
        "different_runs": "start all ranks with the same YAML, options, model and packages",
        "work": "WorkModel.estimated(config) estimates it from the width and the layers",
        "not_finite": "lower training.learning_rate",
    }
)
"""Kind of an error -> remedy. Names in braces are replaced by the error's `details`."""

_PHRASES: Mapping[str, str] = MappingProxyType(
    {
        "truncated (template.max_length)": "truncated (--max_length)",
        "raise template.max_length if it truncates": "raise --max_length if it truncates",
        "training.packing_allow_single_long: false": "a lower --max_length",
        "(model.attn_impl: auto)": "(leave --attn_impl out)",
        ", or raise training.packing_wait_timeout_s": "",
        ", or raise custom.max_image_pixels": "",
        "custom.media_dir, else ROOT_IMAGE_DIR, else the data file's folder": "ROOT_IMAGE_DIR, else the current folder",
        "custom.on_bad_record: skip": "--strict false",
        " RUN.yaml": "",
    }
)
"""
Part of a message -> its replacement in messages about a command of ms-swift. Such a replacement is
needed if replacing the key alone is not enough.
"""

_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "custom.train_jsonl": "--dataset",
        "swift.template_type": "--template",
        "packing_length": "--packing_length",
        "custom.val_jsonl": "--val_dataset",
        "template.max_length": "--packing_length",
        "training.max_sequence_parallel_size": "--max-sequence-parallel-size",
    }
)
"""
Key -> the command's argument, for arguments that are named differently. An argument with dashes
belongs to `packplan plugin swift`.
"""

_KEY = re.compile(
    r"(?<![\w./-])(?:custom\.(?:train|val)_jsonl|packing_length(?= was )|(?:model|swift|template|training)\."
    r"(?!(?:parts|prompt|safetensors|arrow|[ct]sv|jinja|jsonl?|parquet|py|txt|ya?ml|zst|gz)\b|packing_(?!length\b))(\w+))"
    r"(?!\.?\w)(: (?=true\b|false\b|\d))?"
)
"""Pattern for a YAML key, or the same name in a fingerprint, and the colon before its value."""


def name_arguments(text: str) -> str:
    """
    Replace the YAML keys in a message about a command of ms-swift by arguments of the command.

    >>> name_arguments("training.dataloader_drop_last: false repeats packs (template.max_length)")
    '--dataloader_drop_last false repeats packs (--packing_length)'
    """
    for phrase, same in _PHRASES.items():
        text = text.replace(phrase, same)

    def name(found: re.Match[str]) -> str:
        key = found[0].removesuffix(": ")
        return _RENAMED.get(key, f"--{found[1]}") + " " * bool(found[2])

    return _KEY.sub(name, text)
