"""
Settings by which a run is known again in its checkpoints: which a resumed run has to share, and
which it may change.

Data and packing are compared by the plan and the digest of the data. `docs/training.md` has the
same table.
"""

import re
from collections.abc import Mapping
from typing import Any

from packplan.core.config.keys import key_of
from packplan.core.config.planning import configured_inputs
from packplan.core.config.ranks import KEYS, run_values
from packplan.core.config.run import LOADS, TRAINS, TUNES, RunConfig
from packplan.core.fingerprint import Fingerprint, RunIdentity

FIXED_ARGUMENTS = frozenset(
    {
        "label_smoothing_factor", "loss_reduction", "loss_type", "enable_dft_loss", "enable_channel_loss",
        "neftune_noise_alpha", "router_aux_loss_coef", "optim", "optim_args", "optim_target_modules", "optimizer",
        "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "freeze_llm", "freeze_vit",
        # A checkpoint's optimizer brings these along, whatever a run says.
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "vit_lr", "aligner_lr",
    }
)  # fmt: skip
"""Settings of the trainer that a resumed run has to share: loss, optimizer, rate over time."""

_FIXED = re.compile(r"(lora|boft|vera|fourier|adapter|llamapro|galore|lisa)_")
"""Settings of tuners and optimizers, which a resumed run has to share too."""

UNCOMPARED = re.compile(
    # A checkpoint names its attention.
    r"attn_impl|"
    # How a run is read, watched, saved and evaluated; seeds are compared as the schedule's.
    r"resume_.*|restore_.*|output_dir|download|trust_remote_code|trainer|seed|data_seed|train_dataloader_shuffle|"
    r"(?:dataloader_(?!drop_last)|eval_|do_|log_|logging_|save_|hub_|include_|metric_|load_best|ddp_|torch_|trackio_).*|"
    r"(?:per_device_eval_|greater_|push_|batch_eval).*|report_to|run_name|project|debug|callbacks|disable_tqdm|"
    r"early_stop_interval|(?:vit_)?gradient_checkpointing.*|use_cpu|prediction_loss_only|safe_serialization|max_shard_size|skip_memory_metrics|tuner_type"
)
"""Names of keys that are not kept, since they decide no step, or are compared elsewhere."""


def run_identity(config: RunConfig, *, files: Mapping[str, Any], model: Mapping[str, str]) -> RunIdentity:
    """
    Return the model, samples, loss and settings of a run, as its checkpoints keep them.

    Samples of equal lengths may have other labels, so that the plan does not tell them apart.

    Args:
        config: The run.
        files: Key -> content of the file that it names.
        model: Size and digest of each file of the model, by name.
    """
    samples = configured_inputs(config.template, config.custom, packing_length=config.packing_length)
    fixed, told = {**samples, **model}, dict[str, str]()
    for key, value in run_values(config, files).items():
        section, name = key.split(".")[:2]
        if section not in {"model", "training"} or name == "model" or UNCOMPARED.fullmatch(name):
            continue
        declared = KEYS.get(f"{section}.{name}")
        decides = TRAINS if declared is None else key_of(declared).neither
        if decides in {LOADS, TUNES} or name in FIXED_ARGUMENTS or _FIXED.match(name):
            fixed[key] = value
        elif decides == TRAINS:
            told[key] = value
    return RunIdentity(Fingerprint(fixed), Fingerprint(told))
