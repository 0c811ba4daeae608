"""Settings that would break a plan or its microbatches, and the hosts that refuse each of them."""

from collections.abc import Iterator
from functools import reduce
from typing import Any, Literal

import attrs

Host = Literal["sft", "plugin", "rlhf", "trainer", "balance"]
"""
`sft` is `packplan sft`. `plugin` is Packplan's ms-swift plugin with packs, and `rlhf` is the plugin
without packs. `trainer` is `packplan.hf.use_plan`, and `balance` is `packplan.hf.balance`.
"""


_DRAWS = "makes batches by itself"
_SHARES = "lets ranks share rows in a way that Packplan does not support"

_REMOVE = "remove it"

_PLANNING: tuple[Host, ...] = ("sft", "plugin", "trainer")
_SWIFT: tuple[Host, ...] = ("plugin", "rlhf")


@attrs.frozen
class Refusal:
    """
    Setting that hosts refuse if it is on. A setting whose name ends in `_size` is on if it is
    neither unset nor 1.
    """

    setting: str
    """Name of the setting. `a.b` is the attribute `b` of the setting `a`."""

    hosts: tuple[Host, ...]
    """Hosts that refuse the setting. Other hosts do not have the setting, or support it."""

    effect: str
    """Clause that says why the setting is refused, such as `is not supported`."""

    remedy: str

    def __str__(self) -> str:
        return f"{self.effect}: {self.remedy}"


REFUSALS = tuple(
    Refusal(setting, hosts, effect, remedy)
    for settings, hosts, effect, remedy in (
        ("auto_find_batch_size", _PLANNING, "changes the batch size, on which the planned steps depend", _REMOVE),
        ("group_by_length", _PLANNING, _DRAWS, _REMOVE),
        ("ignore_data_skip", _PLANNING, "makes a resumed run train packs twice", _REMOVE),
        ("sortish_sampler train_sampling_strategy", ("sft",), "chooses the order of samples, which the plan decides",
         "for the plan's order, set training.train_dataloader_shuffle: false"),
        ("packing_length", ("sft",), "is derived from template.max_length", "set that instead"),
        ("packing_avg_samples", ("sft",), "estimates the samples of a pack, which a plan counts exactly", _REMOVE),
        ("max_epochs", ("sft",), "ends training at another step than planned", "use training.num_train_epochs"),
        ("remove_unused_columns", ("sft",), "drops columns that packs need", _REMOVE),
        ("eval_use_evalscope", ("sft",), "is not supported", _REMOVE),
        ("use_galore tuner_backend", ("sft",), "was not tested with packs", _REMOVE),
        ("predict_with_generate generation_config generation_max_length generation_num_beams", ("sft",),
         "is for generated answers, but evaluation measures the loss", _REMOVE),
        ("parallelism_config", ("sft",), _SHARES, _REMOVE),
        ("average_tokens_across_devices", ("sft",), "is always on", _REMOVE),
        ("label_smoothing_factor", _PLANNING, "is averaged over packs, not over tokens", _REMOVE),
        ("streaming", ("plugin",), "gives no lengths before training", _REMOVE),
        ("use_ray", _SWIFT, "starts processes through Ray, which was not tested with plans", _REMOVE),
        ("context_parallel_size deepspeed_autotp_size", _SWIFT, _SHARES, "set it to 1"),
        ("sequence_parallel_size", ("rlhf",), _SHARES, "set it to 1"),
        ("packing", ("trainer",), "lets the trainer pack its rows before the plan does",
         "leave it out of the trainer's arguments, since use_plan(trainer, args.max_length) packs the rows"),
        ("eval_packing", ("trainer",), "lets the trainer pack its rows before the plan does",
         "leave it out of the trainer's arguments, since use_plan(..., eval_plan=args.max_length) packs the rows"),
        ("include_for_metrics", ("trainer",), "passes padded inputs to metrics of packs", _REMOVE),
        ("accelerator_config.dispatch_batches accelerator_config.split_batches", ("trainer",),
         "distributes the batches of one rank to all ranks", _REMOVE),
        ("use_liger_kernel use_liger_loss", ("balance",), "averages the loss of a batch in its kernel", _REMOVE),
        ("entropy_coef use_adaptive_entropy", ("balance",), "averages the entropy over a whole batch", _REMOVE),
    )
    for setting in settings.split()
)  # fmt: skip


def refused_settings(host: Host) -> dict[str, Refusal]:
    """Return the refusals of a host: name of the setting -> refusal."""
    return {one.setting: one for one in REFUSALS if host in one.hosts}


def active_refusals(arguments: Any, host: Host) -> Iterator[Refusal]:
    """Yield the refusal of each refused setting that a host's arguments switch on."""
    for setting, refusal in refused_settings(host).items():
        value = reduce(lambda found, name: getattr(found, name, None), setting.split("."), arguments)
        if value and not (setting.endswith("_size") and value == 1 and value is not True):
            yield refusal
