"""One rank that runs several commands in turn, each on a YAML of its own rank."""

import os
import sys
from collections.abc import Mapping

import torch.distributed as dist

from packplan.app import measure, rl, sft
from packplan.app.plan import __main__ as plan
from packplan.app.wiring import ranks

COMMANDS = {"sft": sft.main, "plan": plan.main, "rl": rl.main, "measure": measure.main}

installed = ranks.installed_version


def other_numpy(package: str) -> str | None:
    return "0.0.1" if package == "numpy" else installed(package)


def main(cases: Mapping[str, tuple[str, list[list[str]], int]]) -> int:
    """Run commands by name, words of each rank and port; say on standard error when each runs."""
    rank = int(os.environ["RANK"])
    for name, (command, words, port) in cases.items():
        os.environ["MASTER_PORT"] = str(port)
        ranks.installed_version = other_numpy if name == "build" and rank else installed
        print(f"<{name}>", file=sys.stderr)
        status = COMMANDS[command](words[rank])
        print(f"</{name}> {status}", file=sys.stderr)
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
