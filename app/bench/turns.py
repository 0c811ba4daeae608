"""
Several workloads measured in turn, so that what slows the machine for a while slows them all alike.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from packplan.app.bench.measure import peak_bytes, reset_peak
from packplan.app.bench.process import WAITING, Message, OwnProcess, Turns
from packplan.core.errors import DataSetError

Workload = Callable[[], Callable[[Turns], Any]]
"""
Prepares, unmeasured; returns the call to measure, which waits for its turn before each of its
parts.
"""


@attrs.frozen
class Turned:
    """What a workload cost, and said."""

    peak_bytes: int
    """Memory of its process beyond what it held when it was prepared."""

    result: Any


def take_turns(
    workloads: Mapping[str, Workload], *, limit_s: float, on_turn: Callable[[], object]
) -> dict[str, Turned]:
    """
    Run workloads part by part: the first part of each, then the second of each, until all are done.

    Args:
        workloads: What to run, by the name that an error gives it. Each runs in a process of its
        own, so that its peak
            of memory is its own; while one works, the others wait.

        limit_s: Seconds for a preparation or a part; beyond, all are ended.

        on_turn: Called after each part.

    Raises:
        DataSetError: A workload failed, died, or took too long; the text names it.
    """
    with contextlib.ExitStack() as running:
        processes: dict[str, OwnProcess] = {}
        messages: dict[str, dict[str, Any]] = {}
        for name, prepare in workloads.items():
            processes[name] = OwnProcess(partial(_serve, prepare))
            running.callback(processes[name].end)
            messages[name] = _message(name, processes[name], limit_s)
        while waiting := [name for name, message in messages.items() if message == WAITING]:
            for name in waiting:
                processes[name].go_on()
                messages[name] = _message(name, processes[name], limit_s)
                on_turn()
    return {name: Turned(**message) for name, message in messages.items()}


def run_alone(name: str, call: Callable[[], Any], *, limit_s: float) -> Any:
    """
    Return what a call returns in a process of its own, which leaves no threads and no GPU context
    in this one to be forked.

    Args:
        name: What an error calls it.

        call: What to run; it returns something that JSON can say.

        limit_s: Seconds until it is ended.

    Raises:
        DataSetError: It failed, died, or took too long.
    """
    return take_turns({name: lambda: lambda _: call()}, limit_s=limit_s, on_turn=lambda: None)[name].result


def _message(name: str, process: OwnProcess, limit_s: float) -> dict[str, Any]:
    message = process.next_message(limit_s)
    if "error" in message:
        text = f"{name} cannot be measured: {message['error']}"
        raise DataSetError(text)
    return message


def _serve(prepare: Workload, turns: Turns) -> Message:
    call = prepare()
    gc.collect()
    before = reset_peak()
    result = call(turns)
    return {"peak_bytes": peak_bytes() - before, "result": result}
