"""
Options and files of `accelerate launch` and `deepspeed` -> the ranks of torchrun, and arguments of
ms-swift that do the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from packplan.core.conversion.arguments import Given
from packplan.core.conversion.launch import Launch
from packplan.core.conversion.shell import Word
from packplan.core.errors import ConfigError, Fault

_MEETING = {
    "machine_rank": "node_rank",
    "node_rank": "node_rank",
    "main_process_ip": "master_addr",
    "master_addr": "master_addr",
    "main_process_port": "master_port",
    "master_port": "master_port",
}
"""Name that a launcher has for where ranks meet -> torchrun's."""

_PASSED = frozenset(
    {"config_file", "hostfile", "num_processes", "num_machines", "num_gpus", "num_nodes", "mixed_precision",
     "multi_gpu", "same_network", "rdzv_backend", "dynamo_backend", "num_cpu_threads_per_process", *_MEETING}
)  # fmt: skip
"""Options of launchers that are read, or leave training as it is."""

_SHARDING = (
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch", "forward_prefetch",
    "use_orig_params", "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing",
    "reshard_after_forward",
)  # fmt: skip
"""Settings of FSDP that accelerate and transformers call by the same name, but for `fsdp_`."""

_SLOTS = re.compile(r"(\S+)\s+slots=(\d+)")


def as_torchrun(launch: Launch, document: Mapping[str, Any], *, source: str) -> tuple[Launch, tuple[Given, ...]]:
    """
    Return the launch as torchrun would start it, and arguments for what its launcher sets up.

    Args:
        launch: Launch whose `launcher` is not None.
        document: Keys of accelerate's configuration, or host -> its ranks; empty without a file.
        source: Name of the script, for errors.

    Raises:
        ConfigError: The launcher does something else, or does not say how many ranks it starts.
    """
    launcher = launch.launcher
    assert launcher is not None  # noqa: S101  # by the caller
    found = [
        Fault(f"{launcher.name} --{name}", "sets training up by itself: say it by arguments of ms-swift instead")
        for name in launcher.options
        if name not in _PASSED
    ]
    options = {name: word.text for name, word in launcher.options.items()}
    given: tuple[Given, ...] = ()
    if launcher.name == "deepspeed":
        ranks, nodes = _of_hosts(options, document)
        meeting = {"master_addr": next(iter(document), ""), **options}
    else:
        meeting = {**document, **options}
        ranks, nodes = _of_machines(meeting)
        given = tuple(_arguments(meeting, found))
    ranks = ranks or _devices(launch)
    if ranks is None or nodes is None or not ranks:
        name = "num_processes" if launcher.name == "accelerate" else "num_gpus"
        found.append(Fault(launcher.name, f"does not say how many ranks each machine starts: add --{name} to it"))
    if found:
        raise ConfigError(source, tuple(found))
    told = {
        _MEETING[name]: str(value) for name, value in meeting.items() if name in _MEETING and value not in {"", None}
    }
    if nodes == 1:
        told = {}
    words = [Word(part) for name, value in sorted(told.items()) for part in (f"--{name.replace('_', '-')}", value)]
    launch = attrs.evolve(
        launch, ranks_per_node=Word(str(ranks)), nodes=Word(str(nodes)) if nodes != 1 else None, torchrun=tuple(words)
    )
    return launch, given


def read_hosts(text: str) -> dict[str, Any]:
    """
    Return the ranks of each host of DeepSpeed's hostfile.

    >>> read_hosts("a slots=2  # a comment")
    {'a': 2}
    """
    return {name: int(slots) for name, slots in _SLOTS.findall(re.sub(r"#.*", "", text))}


def _of_hosts(options: Mapping[str, str], hosts: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the ranks of each machine, and the machines; None for what is not said."""
    slots = set(hosts.values())
    ranks = options.get("num_gpus") or (slots.pop() if len(slots) == 1 else None)
    nodes = options.get("num_nodes") or len(hosts) or 1
    return _number(ranks), None if len(slots) > 1 and ranks is None else _number(nodes)


def _of_machines(values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    nodes = _number(values.get("num_machines", 1))
    ranks = _number(values.get("num_processes"))
    if ranks is None or not nodes:
        return None, nodes
    return (ranks // nodes, nodes) if not ranks % nodes else (None, None)


def _number(value: Any) -> int | None:
    return int(value) if str(value).isdecimal() else None


def _devices(launch: Launch) -> int | None:
    """Return the number of devices that a command is given; None if it does not say."""
    named = [word.text for name, word in launch.environment.items() if name.endswith("VISIBLE_DEVICES")]
    return len(named[0].split(",")) if named and named[0] else None


def _arguments(values: Mapping[str, Any], found: list[Fault]) -> Iterator[Given]:
    """
    Yield arguments of ms-swift for what accelerate's configuration sets up. Its `mixed_precision`
    is none of it, since ms-swift sets that from its own arguments.
    """
    kind = str(values.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        yield from _deepspeed(values.get("deepspeed_config") or {}, found)
    elif kind == "FSDP":
        yield _given("fsdp", _fsdp(values.get("fsdp_config") or {}, found), "{…}")
    elif kind not in {"NO", "MULTI_GPU", "MULTI_NPU"}:
        found.append(Fault("distributed_type", f"is {kind}, which is not trained here: use torchrun"))


def _given(name: str, value: Any, text: str) -> Given:
    return Given(name, value, f"{text} (of accelerate's configuration)", name)


def _deepspeed(config: Mapping[str, Any], found: list[Fault]) -> Iterator[Given]:
    """Yield the configuration of ms-swift with the same stage of ZeRO and the same offloading."""
    if file := config.get("deepspeed_config_file"):
        yield _given("deepspeed", file, file)
        return
    stage = str(config.get("zero_stage", 2))
    offloaded = tuple(str(config.get(f"offload_{what}_device", "none")) for what in ("optimizer", "param"))
    names = {
        ("none", "none"): "",
        ("cpu", "cpu"): "_offload",
        **({("cpu", "none"): "_offload"} if stage == "2" else {}),
    }
    if stage not in {"0", "1", "2", "3"} or offloaded not in names or (stage in {"0", "1"} and names[offloaded]):
        reason = "asks for a stage or an offloading that no configuration of ms-swift has: name a file in --deepspeed"
        found.append(Fault("deepspeed_config", reason))
        return
    name = f"zero{stage}{names[offloaded]}"
    yield _given("deepspeed", name, name)
    if config.get("gradient_clipping") not in {None, "auto"}:
        yield _given("max_grad_norm", float(config["gradient_clipping"]), str(config["gradient_clipping"]))


def _fsdp(config: Mapping[str, Any], found: list[Fault]) -> dict[str, Any]:
    """Return FSDP's settings as transformers has them."""
    values = {str(name).removeprefix("fsdp_"): value for name, value in config.items()}
    version = int(values.get("version", 1))
    strategy = str(values.get("sharding_strategy", "FULL_SHARD")).lower()
    if version == 2:  # FSDP's own
        strategy = "full_shard" if values.get("reshard_after_forward", True) else "shard_grad_op"
    elif strategy != "full_shard":
        reason = f"is {strategy.upper()}, which transformers takes of FSDP 2 alone: set fsdp_version: 2"
        found.append(Fault("fsdp_sharding_strategy", reason))
    offload = " offload" if values.get("offload_params") else ""
    kept = {name: values[name] for name in _SHARDING if name in values}
    return {"fsdp": f"{strategy} auto_wrap{offload}", "fsdp_config": {"fsdp_version": version, **kept}}
