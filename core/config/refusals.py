"""Settings under which a host would not train what was planned, or cut: one table for all hosts."""

from collections.abc import Iterator
from functools import reduce
from typing import Any, Literal

import attrs

Host = Literal["sft", "plugin", "rlhf", "trainer", "balance"]
"""`packplan sft`; the plugin of ms-swift with packs, and without; `use_plan`; `balance`."""


@attrs.frozen
class Refusal:
    """A setting that has to be unset or off, and a size that has to be 1."""

    setting: str
    """Name of the setting; a name behind a dot is an attribute of the setting before."""

    hosts: tuple[Host, ...]
    """The hosts that refuse it; others do not have it, or obey it."""

    effect: str
    """Consequence of the setting, as a clause."""

    remedy: str = "remove it"

    def __str__(self) -> str:
        return f"{self.effect}: {self.remedy}"


_DRAWS = "draws batches by itself"

_SHARES = "lets ranks share rows"

REFUSALS = (
    Refusal("auto_find_batch_size", ("sft", "plugin", "trainer"), "changes the batch, which decides the steps"),
    Refusal("group_by_length", ("sft", "plugin", "trainer"), _DRAWS),
    Refusal("ignore_data_skip", ("sft", "plugin", "trainer"), "lets a resumed run train packs twice"),
    *(
        Refusal(name, ("sft",), _DRAWS, "use training.train_dataloader_shuffle")
        for name in ("sortish_sampler", "train_sampling_strategy")
    ),
    Refusal(
        "packing_length", ("sft",), "is derived from template.max_length", "set that instead"
    ),
    Refusal("packing_avg_samples", ("sft",), "guesses what a plan counts"),
    Refusal("max_epochs", ("sft",), "ends training at another step than planned", "use training.num_train_epochs"),
    Refusal("remove_unused_columns", ("sft",), "drops columns that packs need"),
    Refusal("eval_use_evalscope", ("sft",), "is not supported"),
    Refusal("use_galore", ("sft",), "was not tried with packs"),
    *(
        Refusal(name, ("sft",), "is for generated answers, but evaluation measures the loss")
        for name in ("predict_with_generate", "generation_config", "generation_max_length", "generation_num_beams")
    ),
    Refusal("parallelism_config", ("sft",), _SHARES),
    Refusal("average_tokens_across_devices", ("sft",), "is always on"),
    Refusal("streaming", ("plugin",), "gives no lengths before training"),
    Refusal("use_ray", ("plugin", "rlhf"), "starts processes that were not tried"),
    *(
        Refusal(name, ("plugin", "rlhf"), _SHARES, "set it to 1")
        for name in ("sequence_parallel_size", "context_parallel_size", "deepspeed_autotp_size")
    ),
    *(Refusal(name, ("trainer",), "packs rows by itself") for name in ("packing", "eval_packing")),
    Refusal("include_for_metrics", ("trainer",), "hands inputs of padded rows to metrics of packs"),
    *(
        Refusal(f"accelerator_config.{name}", ("trainer",), "hands the batches of one rank out to all")
        for name in ("dispatch_batches", "split_batches")
    ),
    *(Refusal(name, ("balance",), "divides losses in a kernel") for name in ("use_liger_kernel", "use_liger_loss")),
    *(Refusal(name, ("balance",), "averages over a batch") for name in ("entropy_coef", "use_adaptive_entropy")),
)  # fmt: skip


def refused_settings(host: Host) -> dict[str, Refusal]:
    """Return what a host refuses, by setting."""
    return {one.setting: one for one in REFUSALS if host in one.hosts}


def refusals_of(arguments: Any, host: Host) -> Iterator[Refusal]:
    """Yield what a host refuses of arguments; not every version of a host has each."""
    for setting, refusal in refused_settings(host).items():
        value = reduce(lambda found, name: getattr(found, name, None), setting.split("."), arguments)
        if value and not (setting.endswith("_size") and value == 1 and value is not True):
            yield refusal
