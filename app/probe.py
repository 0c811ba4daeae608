"""
Prove that a model keeps the samples of a pack apart, or show which module mixes them:
`packplan probe MODEL`.

MODEL is a folder, a config.json, or an id in a local cache. A small copy of the model with random
weights is tested in a few seconds, with each installed attention backend. No weights are read. The
exit status is 0 if the model can be packed with the default attention of a run (auto), and 3 if
not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from packplan.adapters.model_folder import find_model  # needs neither a run's YAML nor cattrs
from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_logging_options, command_parser, run_command, run_program
from packplan.core.errors import MismatchError

if TYPE_CHECKING:
    from packplan.app.opening.probing import BackendProbe

_HEAD = ("backend", "packs", "isolation", "equality", "seconds", "how")


def as_table(found: Sequence[BackendProbe]) -> str:
    """Return the results of a probe as a table in text."""
    rows = [_HEAD, *(_table_cells(one) for one in found if one.verdict is not None)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{one.backend}: not run, since {one.reason}" for one in found if one.verdict is None]
    mixing = {one.mixes_in for one in found if one.mixes_in is not None}
    lines += [f"Without Packplan, samples are first mixed in {module}" for module in mixing]
    return "\n".join(lines)


def _table_cells(found: BackendProbe) -> tuple[str, ...]:
    verdict = found.verdict
    how = found.reason if len(found.reason) <= 100 else f"{found.reason[:99]}…"
    if found.may_pack and verdict is not None:
        how = "by itself" if found.packs_by_itself else "kept apart by Packplan"
        if verdict.split:
            how = f"{' and '.join(verdict.split)} run sample by sample"
        if verdict.attention != found.backend:
            how = f"{verdict.attention}, {how}"
    measured = None if verdict is None else verdict.measured
    numbers = ["", ""] if measured is None else [f"{measured.isolation:.2g}", f"{measured.equality:.2g}"]
    return (found.backend, "yes" if found.may_pack else "no", *numbers, f"{found.seconds:.1f}", how)


def as_json(model: str, found: Sequence[BackendProbe]) -> str:
    """Return the results of a probe as JSON text."""
    backends = []
    for one in found:
        verdict = None if one.verdict is None else one.verdict.to_dict()
        flags = {"packs": one.may_pack, "by_itself": one.packs_by_itself, "verdict": verdict}
        backends.append({**attrs.asdict(one, recurse=False), **flags})
    return json.dumps({"model": model, "passed": found[0].may_pack, "backends": backends}, indent=2)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("probe", __doc__)
    parser.add_argument("model", metavar="MODEL", help="folder, config.json, or id in a local cache")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="data type to compute in (default: float32)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device (default: a GPU for backends that need it, else the CPU)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    add_logging_options(parser)
    options = parser.parse_args(arguments)

    def command() -> None:
        path = find_model(options.model)
        with loading_libraries():
            from packplan.app.opening.probing import probe_backends

        found = list(
            probe_backends(
                path, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
            )
        )  # fmt: skip
        print(as_json(options.model, found) if options.json else as_table(found))
        run = found[0]
        if not run.may_pack:
            where = next((f"; they first mix in {one.mixes_in}" for one in found if one.mixes_in is not None), "")
            fact = f"samples of {options.model} may not share packs: {run.reason}{where}"
            raise MismatchError("leak", fact, {"module": run.mixes_in})

    return run_command(command, verbose=options.verbose, quiet=options.quiet, kept="nothing is kept")


if __name__ == "__main__":
    raise SystemExit(run_program(main))
