"""
Check on a machine with GPUs that `megatron sft` trains planned packs.

`python -m tools.check_megatron` makes a tiny model and records, and runs the real command with the
plugin: once in one step of all packs, once to its end, and once killed and resumed. It says of each
claim of the page whether it holds. Exit status: 0 if all do, 3 if one does not, 2 if nothing could
be run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]

SPY = """
import json, os
from packplan.adapters.swift import packs

fetch = packs.PlannedPacks.__getitem__

def noted(self, item):
    with open(os.path.join({folder!r}, f"items{{os.environ.get('RANK', '0')}}.jsonl"), "a") as file:
        file.write(json.dumps([item, len(self), len(self.plan.packs)]) + "\\n")
    return fetch(self, item)

packs.PlannedPacks.__getitem__ = noted
"""
"""A second plugin, which writes down each item that a rank fetches; one is fetched to be shown."""

TOLERANCE = 0.02
"""Difference of losses in bfloat16 that rounding explains."""


def main() -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="GPUs to use (default: 2)")
    options = parser.parse_args()
    if missing := list(_missing(options.ranks)):
        print(f"not checked: {'; '.join(missing)}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        checks = dict(_checks(Path(folder), ranks=options.ranks))
    for claim, holds in checks.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim}")
    return 0 if all(checks.values()) else 3


def _missing(ranks: int) -> Iterator[str]:
    """Yield what this machine lacks."""
    for package in ("torch", "swift", "megatron", "mcore_bridge"):
        if find_spec(package) is None:
            yield f"the package {package} is not installed"
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.device_count() < ranks:
            yield f"{torch.cuda.device_count()} of {ranks} GPUs are here"


def _checks(folder: Path, *, ranks: int) -> Iterator[tuple[str, bool]]:
    """Yield each claim, and whether it holds."""
    words = _words(folder)
    # All packs in one step: the loss is that of swift sft on the same packs, before any training.
    (num_packs,) = {total for _, _, total in _run(folder, "count", [*words, "--num_train_epochs", "1"], ranks=ranks)}
    size = -(-num_packs // ranks) * ranks
    _run(folder, "one", [*words, "--num_train_epochs", "1", "--global_batch_size", str(size)], ranks=ranks)
    _run(folder, "plain", [*words, "--max_steps", "1", "--gradient_accumulation_steps", str(size // ranks)],
         ranks=ranks, program="swift")  # fmt: skip
    found, expected = (_losses(folder / name)[0] for name in ("one", "plain"))
    yield f"the first loss ({found:.4f}) is that of swift sft ({expected:.4f})", abs(found - expected) < TOLERANCE

    given = [*words, "--num_train_epochs", "2", "--global_batch_size", str(2 * ranks), "--save_steps", "2"]
    whole = _run(folder, "whole", given, ranks=ranks)
    yield "every pack is trained twice in two epochs, and those that repeat more often", _all_trained(whole, epochs=2)
    steps = 2 * whole[0][1] // (2 * ranks)
    yield f"it takes the {steps} steps that were told", steps == len(_losses(folder / "whole"))

    before = _run(folder, "killed", given, ranks=ranks, kill=True)
    saved = max((folder / "killed").glob("checkpoint-*"), key=lambda one: int(one.name.split("-")[1]))
    resume = ["--finetune", "false", "--mcore_model", str(saved)]
    rest = _run(folder, "rest", [*given, *resume], ranks=ranks)
    done = int(saved.name.split("-")[1]) * 2 * ranks
    both = [*before[:done], *rest]
    yield "killed and resumed, it trains the same packs", Counter(i for i, *_ in both) == Counter(i for i, *_ in whole)


def _words(folder: Path) -> list[str]:
    """Make a model, records and plugins; return the arguments of each command."""
    for words in (
        ["demo", "make", "--folder", str(folder / "demo")],
        ["plugin", "swift", "-o", str(folder / "plugin.py")],
    ):
        subprocess.run([sys.executable, "-m", "packplan", *words], check=True, cwd=ROOT)
    records = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": "blue " * (1 + number % 40)},
            ]
        }
        for number in range(101)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return [
        "--model", str(folder / "demo" / "models" / "qwen3"), "--model_type", "qwen3", "--template", "qwen3",
        "--dataset", str(folder / "data.jsonl"), "--split_dataset_ratio", "0", "--dataset_shuffle", "false",
        "--max_length", "512", "--packing", "true", "--tuner_type", "full", "--torch_dtype", "bfloat16",
        "--dataloader_num_workers", "0", "--logging_steps", "1", "--add_version", "false",
    ]  # fmt: skip


def _run(
    folder: Path, name: str, words: list[str], *, ranks: int, program: str = "megatron", kill: bool = False
) -> list[tuple[int, int, int]]:
    """
    Run a command; return item, number of items and number of packs of all that its ranks trained.

    Args:
        folder: Where all is written.
        name: Folder of this run.
        words: Arguments of the command.
        ranks: GPUs.
        program: `megatron`, or `swift`.
        kill: Kill it once it has saved twice.
    """
    out = folder / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "spy.py").write_text(SPY.format(folder=str(out)))
    plugins = ["--external_plugins", str(folder / "plugin.py"), str(out / "spy.py"), "--output_dir", str(out)]
    environment = {**os.environ, "NPROC_PER_NODE": str(ranks), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([program, "sft", *words, *plugins], env=environment, start_new_session=True)
    while process.poll() is None:
        if kill and len(list(out.glob("checkpoint-*/latest_checkpointed_iteration.txt"))) > 1:
            os.killpg(process.pid, 9)
            kill = False
        time.sleep(0.2)
    by_rank = [
        [tuple(json.loads(line)) for line in path.read_text().splitlines()][1:]  # the first one was shown
        for path in sorted(out.glob("items*.jsonl"))
    ]
    return [item for together in zip(*by_rank, strict=False) for item in together]


def _losses(out: Path) -> list[float]:
    """Return the loss of each step."""
    lines = map(json.loads, (out / "logging.jsonl").read_text().splitlines())
    return [float(line["loss"]) for line in lines if "loss" in line]


def _all_trained(items: list[tuple[int, int, int]], *, epochs: int) -> bool:
    """Return whether each item was fetched once an epoch."""
    counts = Counter(item for item, *_ in items)
    return set(counts) == set(range(items[0][1])) and set(counts.values()) == {epochs}


if __name__ == "__main__":
    sys.exit(main())
