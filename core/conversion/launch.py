"""Commands of a script -> the one that trains with ms-swift, and the ranks that it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs

from packplan.core.conversion.shell import Command, Word
from packplan.core.errors import ConfigError, Fault

_BEFORE = frozenset({"exec", "nohup", "time", "sudo", "env", "command"})
"""Programs that start what follows them."""

_TORCHRUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})

_TORCHRUN_FLAGS = frozenset({"standalone", "no_python", "run_path", "virtual_local_rank"})

_RANK_VARIABLES = frozenset(
    {"NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE",
     "LOCAL_WORLD_SIZE"}
)  # fmt: skip
"""Variables that say which ranks there are; torchrun's options say the same."""

_LAUNCHER_FLAGS = frozenset(
    {"multi_gpu", "same_network", "use_deepspeed", "use_fsdp", "use_megatron_lm", "cpu", "no_ssh"}
)

INSIDE = (
    "ms-swift itself trains it in planned packs, with --packing true --external_plugins plugin.py "
    "(packplan plugin swift -o plugin.py)"
)
"""Way that remains for what only ms-swift trains."""

OTHER_TASKS: Mapping[str, str] = {
    "rlhf": "trains on preferences or rewards: only swift sft and swift pt are converted (for GRPO, see "
    "docs/rl.md; for DPO, docs/use-it-in/swift.md)",
    "infer": "answers prompts, and trains nothing: only swift sft and swift pt are converted",
    **dict.fromkeys(
        ("app", "deploy", "eval", "export", "merge-lora", "rollout", "sample", "web-ui"),
        "trains nothing: only swift sft and swift pt are converted",
    ),
}
"""Command of ms-swift that is not converted -> why."""

CONVERTED = ("sft", "pt")
"""Commands of ms-swift that are converted."""

PLANNED = ("sft", "pt", "rlhf")
"""Commands of ms-swift whose samples are planned."""


@attrs.frozen
class Launcher:
    """A program other than torchrun that starts ranks."""

    name: Literal["accelerate", "deepspeed"]

    options: Mapping[str, Word]

    @property
    def file(self) -> Word | None:
        """File that says more: accelerate's configuration, or DeepSpeed's hosts."""
        return self.options.get("config_file") or self.options.get("hostfile")


@attrs.frozen
class Launch:
    """A command that trains with ms-swift."""

    arguments: tuple[Word, ...]
    """Words behind `swift sft`."""

    environment: Mapping[str, Word]
    """Variables that it is started with, those of the ranks aside."""

    ranks_per_node: Word | None = None
    """Processes on each machine; None if the command does not say."""

    nodes: Word | None = None

    torchrun: tuple[Word, ...] = ()
    """Other options of torchrun, with their values: addresses and ports."""

    line: int = 1

    task: str = "sft"
    """Command of ms-swift: `sft`, `pt` or `rlhf`."""

    launcher: Launcher | None = None

    exports: tuple[tuple[Word, ...], ...] = ()
    """Words behind each `swift export` of the same script."""

    left: tuple[str, ...] = ()
    """Other commands of ms-swift in the same script, as `line 4: swift infer`."""


def find_launch(commands: Iterable[Command], *, source: str, tasks: Sequence[str] = CONVERTED) -> Launch:
    """
    Return the one command of a script that trains with ms-swift.

    Args:
        commands: Commands of the script, in order.
        source: Name of the script, for errors.
        tasks: Commands of ms-swift that are looked for.

    Raises:
        ConfigError: There is none, or several, or it is of another task or program.
    """
    launches: list[Launch] = []
    others: list[tuple[int, str, str]] = []
    exports: list[tuple[Word, ...]] = []
    computed: list[str] = []
    for command in commands:
        read = _read(command, tasks)
        if isinstance(read, Launch):
            launches.append(read)
        elif read is not None:
            others.append((command.line, *read))
            exports += [command.words[2:]] if read[0] == "swift export" else []
        else:
            computed += [text for word in command.words for text in word.computed]
    if len(launches) == 1:
        left = tuple(f"line {line}: {name}" for line, name, _ in others)
        return attrs.evolve(launches[0], left=left, exports=tuple(exports))
    if launches:
        lines = ", ".join(str(launch.line) for launch in launches)
        names = " or ".join(f"swift {task}" for task in dict.fromkeys(launch.task for launch in launches))
        reason = f"{len(launches)} commands of {names}, in the lines {lines}: put the one to read into its own file"
        raise ConfigError(source, (Fault("", reason),))
    if not others:
        reason = "holds no command of ms-swift: give one that begins with swift sft, or torchrun … swift/cli/sft.py"
        reason += f"; {computed[0]} is not computed here: write it out" if computed else ""
        raise ConfigError(source, (Fault("", reason),))
    raise ConfigError(source, tuple(Fault(f"line {line}", f"{name} {why}") for line, name, why in others))


def ranks_and_nodes(launch: Launch, *, source: str) -> tuple[int, int]:
    """
    Return the ranks on each machine and the number of machines of a command, 1 where it is silent.

    Args:
        launch: The command.
        source: Name of its script, for errors.

    Raises:
        ConfigError: The script computes one, or it is no number.
    """
    return _number(launch.ranks_per_node, "NPROC_PER_NODE", source), _number(launch.nodes, "NNODES", source)


def _number(word: Word | None, name: str, source: str) -> int:
    if word is None or (not word.text and not word.computed):
        return 1
    if word.computed:
        reason = f"is computed by the script ({word.computed[0]}), and nothing is run here: write its value out"
        raise ConfigError(source, (Fault(name, reason),))
    if not word.text.isdecimal() or not int(word.text):
        raise ConfigError(source, (Fault(name, f"is {word.text}, but has to be a number of ranks"),))
    return int(word.text)


def _read(command: Command, tasks: Sequence[str]) -> Launch | tuple[str, str] | None:
    """
    Return the launch of a command of one of some tasks; the name of another command of ms-swift
    with the reason against it; None for another program.
    """
    words, environment = _started(command)
    if not words:
        return None
    program, rest = _base(words[0]), words[1:]
    if program == "megatron":
        reason = f"trains with Megatron-LM, whose arguments and parallel layouts are others: {INSIDE}"
        return f"megatron {_task(rest)}", reason
    options: dict[str, Word] = {}
    launcher: Launcher | None = None
    if program != "swift":
        if program == "torchrun":
            options, rest = _torchrun_options(rest)
        elif program.startswith("python"):
            options, rest = _python_options(rest)
        elif program == "accelerate" and rest and rest[0].text == "launch":
            options, rest = _torchrun_options(rest[1:], flags=_LAUNCHER_FLAGS)
            launcher = Launcher("accelerate", options)
        elif program == "deepspeed":
            options, rest = _torchrun_options(rest, flags=_LAUNCHER_FLAGS)
            launcher = Launcher("deepspeed", options)
        rest = _script(rest)
        if not rest:
            return None
    name = _task(rest)
    if name not in tasks:
        return f"swift {name}", OTHER_TASKS.get(name, "is no command of ms-swift: write swift sft")
    launch = _launch(command.line, rest[1:], environment, {} if launcher else options)
    return attrs.evolve(launch, task=name, launcher=launcher)


def _task(words: Sequence[Word]) -> str:
    return words[0].text.replace("_", "-") if words else ""


def _started(command: Command) -> tuple[list[Word], dict[str, Word]]:
    """Return the words of a command behind those that only start it, and its variables."""
    words, environment = list(command.words), dict(command.environment)
    while words and words[0].text in _BEFORE:
        words.pop(0)
        while words and "=" in words[0].text and not words[0].text.startswith("-"):
            name, _, value = words.pop(0).text.partition("=")
            environment[name] = Word(value)
    return words, environment


def _python_options(words: Sequence[Word]) -> tuple[dict[str, Word], list[Word]]:
    """Return torchrun's options of `python -m torch.distributed.run`, and what follows them."""
    rest = list(words)
    while rest and rest[0].text in {"-u", "-I", "-B"}:
        rest.pop(0)
    if rest[1:] and rest[0].text == "-m" and rest[1].text in _TORCHRUN_MODULES:
        return _torchrun_options(rest[2:])
    return {}, rest


def _launch(line: int, arguments: Sequence[Word], environment: Mapping[str, Word], options: dict[str, Word]) -> Launch:
    """Return a command of `swift sft`, with what its variables and torchrun say of ranks."""
    ranks = {name: word for name, word in environment.items() if name in _RANK_VARIABLES}
    return Launch(
        arguments=tuple(arguments),
        environment={name: word for name, word in environment.items() if name not in _RANK_VARIABLES},
        ranks_per_node=options.pop("nproc_per_node", None) or ranks.get("NPROC_PER_NODE"),
        nodes=options.pop("nnodes", None) or ranks.get("NNODES"),
        torchrun=tuple(_meeting(options, ranks)),
        line=line,
    )


def _meeting(options: Mapping[str, Word], ranks: Mapping[str, Word]) -> Iterator[Word]:
    """Yield the options that say where ranks meet."""
    named = {name.lower(): ranks[name] for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if name in ranks}
    for name, value in (named | dict(options)).items():
        yield Word(f"--{name.replace('_', '-')}")
        if name not in _TORCHRUN_FLAGS:
            yield value


def _torchrun_options(
    words: Sequence[Word], *, flags: Collection[str] = _TORCHRUN_FLAGS
) -> tuple[dict[str, Word], list[Word]]:
    """Return the options of torchrun or another launcher, and what follows them."""
    options: dict[str, Word] = {}
    rest = list(words)
    while rest and rest[0].text.startswith("-") and rest[0].text != "-m":
        word = rest.pop(0)
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if equals:
            options[name] = attrs.evolve(word, text=value)
        elif name in flags:
            options[name] = Word("")
        elif rest:
            options[name] = rest.pop(0)
    return options, rest


def _script(words: Sequence[Word]) -> list[Word]:
    """Return the task whose script a command starts, and the script's arguments; empty if none."""
    if not words:
        return []
    first, *rest = words
    if first.text == "-m":
        parts = rest[0].text.split(".") if rest else []
        return [Word(parts[2]), *rest[1:]] if parts[:2] == ["swift", "cli"] and len(parts) == 3 else []
    if rest and _base(first) == "swift":  # the console script, which python and torchrun start too
        return rest
    task = _script_task(first.text)
    return [Word(task), *rest] if task else []


def _script_task(path: str) -> str | None:
    *folders, name = path.split("/")
    return name.removesuffix(".py") if name.endswith(".py") and folders[-2:] == ["swift", "cli"] else None


def _base(word: Word) -> str:
    return word.text.rpartition("/")[2]
