"""Commands of a script -> the one that trains with ms-swift, and the ranks that it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from packplan.core.conversion.shell import Command, Word
from packplan.core.errors import ConfigError, Fault

_TASKS = frozenset(
    {"app", "deploy", "eval", "export", "infer", "merge-lora", "pt", "rlhf", "rollout", "sample", "sft", "web-ui"}
)

_BEFORE = frozenset({"exec", "nohup", "time", "sudo", "env", "command"})
"""Programs that start what follows them."""

_TORCHRUN_FLAGS = frozenset({"standalone", "no_python", "run_path", "virtual_local_rank"})

_RANK_VARIABLES = frozenset(
    {"NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE",
     "LOCAL_WORLD_SIZE"}
)  # fmt: skip
"""Variables that say which ranks there are; torchrun's options say the same."""

OTHER_TASKS: Mapping[str, str] = {
    "pt": "trains on all tokens of plain texts, without a chat template: only swift sft is converted",
    "rlhf": "trains on preferences or rewards: only swift sft is converted (for GRPO, see docs/rl.md)",
    "infer": "answers prompts, and trains nothing: only swift sft is converted",
}


@attrs.frozen
class Launch:
    """A command that trains with `swift sft`."""

    arguments: tuple[Word, ...]
    """What follows `swift sft`."""

    environment: Mapping[str, Word]
    """Variables that it is started with, those of the ranks aside."""

    ranks_per_node: Word | None = None
    """Processes on each machine; None if the command does not say."""

    nodes: Word | None = None

    torchrun: tuple[Word, ...] = ()
    """Other options of torchrun, with their values: addresses and ports."""

    line: int = 1

    left: tuple[str, ...] = ()
    """Other commands of ms-swift in the same script, as `line 4: swift infer`."""


def find_launch(commands: Iterable[Command], *, source: str) -> Launch:
    """
    Return the one command of a script that trains with `swift sft`.

    Args:
        commands: Of the script, in order.
        source: Name of the script, for errors.

    Raises:
        ConfigError: There is none, or several, or it is of another task or program.
    """
    launches: list[Launch] = []
    others: list[tuple[int, str, str]] = []
    computed: list[str] = []
    for command in commands:
        read = _read(command)
        if isinstance(read, Launch):
            launches.append(read)
        elif read is not None:
            others.append((command.line, *read))
        else:
            computed += [text for word in command.words for text in word.computed]
    if len(launches) > 1:
        lines = ", ".join(str(launch.line) for launch in launches)
        reason = (
            f"{len(launches)} commands of swift sft, in the lines {lines}: put the one to convert into its own file"
        )
        raise ConfigError(source, (Fault("", reason),))
    if not launches:
        if not others:
            reason = "holds no command of ms-swift: give one that begins with swift sft, or torchrun … swift/cli/sft.py"
            reason += f"; {computed[0]} is not computed here: write it out" if computed else ""
            raise ConfigError(source, (Fault("", reason),))
        raise ConfigError(source, tuple(Fault(f"line {line}", f"{name} {why}") for line, name, why in others))
    return attrs.evolve(launches[0], left=tuple(f"line {line}: {name}" for line, name, _ in others))


def _read(command: Command) -> Launch | tuple[str, str] | None:
    """
    Return what a command of ms-swift trains, or its name and why it is not converted; None of
    another program.
    """
    words, environment = _started(command)
    if not words:
        return None
    program = _base(words[0])
    if program in {"swift", "megatron"}:
        return _task(command, program, words[1:], environment)
    options: dict[str, Word] = {}
    rest = words[1:]
    if program == "torchrun":
        options, rest = _torchrun_options(rest)
    elif program.startswith("python"):
        options, rest = _python_options(rest)
    elif program in {"accelerate", "deepspeed"} and any(_script_task(word.text) for word in rest):
        reason = "starts ranks by a configuration of its own: start ms-swift with NPROC_PER_NODE or torchrun instead"
        return program, reason
    task, rest = _script(rest)
    if task is None:
        return None
    return _task(command, "swift", [Word(task), *rest], environment, options)


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
    if [word.text for word in rest[:1]] == ["-m"] and rest[1:] and _is_torchrun(rest[1].text):
        return _torchrun_options(rest[2:])
    return {}, rest


def _task(
    command: Command,
    program: str,
    words: Sequence[Word],
    environment: dict[str, Word],
    options: Mapping[str, Word] | None = None,
) -> Launch | tuple[str, str] | None:
    name = words[0].text.replace("_", "-") if words else ""
    if program == "megatron":
        reason = "trains with Megatron-LM, whose arguments and parallel layouts are others: only swift sft is converted"
        return f"megatron {name}", reason
    if name not in _TASKS:
        return f"swift {name}", "is no command of ms-swift: write swift sft"
    if name != "sft":
        return f"swift {name}", OTHER_TASKS.get(name, "trains nothing: only swift sft is converted")
    started = {**{name: word for name, word in environment.items() if name in _RANK_VARIABLES}}
    options = dict(options or {})
    return Launch(
        arguments=tuple(words[1:]),
        environment={name: word for name, word in environment.items() if name not in _RANK_VARIABLES},
        ranks_per_node=options.pop("nproc_per_node", None) or started.get("NPROC_PER_NODE"),
        nodes=options.pop("nnodes", None) or started.get("NNODES"),
        torchrun=tuple(_flat(options, started)),
        line=command.line,
    )


def _flat(options: Mapping[str, Word], started: Mapping[str, Word]) -> Iterator[Word]:
    """Yield the options that say where ranks meet."""
    named = {"NODE_RANK": "node_rank", "MASTER_ADDR": "master_addr", "MASTER_PORT": "master_port"}
    meeting = {option: started[name] for name, option in named.items() if name in started} | dict(options)
    for name, value in meeting.items():
        yield Word(f"--{name.replace('_', '-')}")
        if name not in _TORCHRUN_FLAGS:
            yield value


def _torchrun_options(words: Sequence[Word]) -> tuple[dict[str, Word], list[Word]]:
    """Return the options of torchrun, and what follows them."""
    options: dict[str, Word] = {}
    rest = list(words)
    while rest and rest[0].text.startswith("-") and rest[0].text != "-m":
        word = rest.pop(0)
        name, equals, value = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if equals:
            options[name] = attrs.evolve(word, text=value)
        elif name in _TORCHRUN_FLAGS:
            options[name] = Word("")
        elif rest:
            options[name] = rest.pop(0)
    return options, rest


def _script(words: Sequence[Word]) -> tuple[str | None, list[Word]]:
    """Return the task whose script a command starts, and the script's arguments."""
    rest = list(words)
    if rest and rest[0].text == "-m":
        rest.pop(0)
        module = rest[0].text if rest else ""
        parts = module.split(".")
        task = parts[-1] if parts[:2] == ["swift", "cli"] and len(parts) == 3 else None
    elif rest[1:] and _base(rest[0]) == "swift":  # the console script, which python and torchrun start too
        rest.pop(0)
        task = rest[0].text
    else:
        task = _script_task(rest[0].text) if rest else None
    return task, rest[1:]


def _script_task(path: str) -> str | None:
    folders = path.split("/")
    is_one = folders[-1].endswith(".py") and folders[-3:-1] == ["swift", "cli"]
    return folders[-1].removesuffix(".py") if is_one else None


def _is_torchrun(module: str) -> bool:
    return module in {"torch.distributed.run", "torch.distributed.launch"}


def _base(word: Word) -> str:
    return word.text.rpartition("/")[2]
