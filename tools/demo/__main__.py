"""
Make the tiny models and the data set that the examples train on, then train a model.

`python -m tools.demo` makes and trains, and its last line says how the loss fell. `python -m
tools.demo make` only makes models and data; `--videos` adds the data of `app/demo_videos.yaml`.
"""

import argparse
import math
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from packplan.adapters.files import wrap_save_errors, wrap_write_errors
from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import run_command, run_program
from packplan.app.opening.runs import read_config
from packplan.core.errors import counted

if TYPE_CHECKING:
    from packplan.app.planning.split import PlannedSplit

CONFIG = Path(__file__).resolve().parents[2] / "app" / "demo.yaml"

FOLDER = Path("runs/demo")
"""Folder in which the demo's YAMLs expect models and data."""


def make(folder: Path, *, seed: int, num_train: int, num_val: int) -> None:
    """
    Write the data to `data/` and the models to `models/` under *folder*.

    Args:
        folder: Output folder.
        seed: Seed of the data and the weights.
        num_train: Number of records in each file of training data.
        num_val: Number of records in the evaluation data.
    """
    with loading_libraries():
        from tools.demo.scenes import read_corpus, write_data
        from tools.demo.tiny_models import MODEL_TYPES, write_model

    with wrap_write_errors(folder / "data"):
        write_data(folder / "data", seed=seed, num_train=num_train, num_val=num_val)
    for model_type in MODEL_TYPES:
        with wrap_save_errors(folder / "models" / model_type):
            write_model(folder / "models" / model_type, model_type, read_corpus(folder / "data"), seed=seed)


def make_videos(folder: Path) -> None:
    """
    Write clips, pictures and `videos.jsonl`, whose records have text, images and videos, to
    `videos/` under *folder*.
    """
    from tools.demo.videos import write_records

    with wrap_write_errors(folder / "videos"):
        write_records(folder / "videos")


def describe_folder(folder: Path) -> str:
    """Return a line for each kind of file in *folder*, and the commands that train on the files."""
    from tools.demo.tiny_models import MODEL_TYPES

    lines = [f"{folder / 'models'}: {', '.join(MODEL_TYPES)}; tiny, with random weights"]
    for name in ("data", "videos"):
        files = sorted((folder / name).glob("*.jsonl"))
        held = [f"{file.name} ({counted(len(file.read_bytes().splitlines()), 'record')})" for file in files]
        if held:
            lines.append(f"{folder / name}: {', '.join(held)}, and their media")
    lines.append(f"train on them: {_training_command(folder, CONFIG)}")
    if (folder / "videos").is_dir():
        lines.append(f"with videos: {_training_command(folder, CONFIG.with_name('demo_videos.yaml'))}")
    return "\n".join(lines)


def _training_command(folder: Path, config: Path) -> str:
    """Return the command that trains a YAML of the demo with the models and data in *folder*."""
    shown = os.path.relpath(config) if config.is_relative_to(Path.cwd()) else str(config)
    own = Path(sys.executable).with_name("packplan")
    program = "packplan" if shutil.which("packplan") == str(own) else os.path.relpath(own)
    words = [program, "sft", shown]
    if folder != FOLDER:
        document = yaml.safe_load(config.read_text(encoding="utf-8"))
        for key in ("model.model", "custom.train_jsonl", "custom.val_jsonl", "training.output_dir"):
            section, _, name = key.partition(".")
            if (value := document[section].get(name)) is not None:
                words.append(f"{key}={_yaml_in_folder(value, folder)}")
    return shlex.join(words)


def _yaml_in_folder(value: str | list[str], folder: Path) -> str:
    """
    Return a path or a list of paths of the demo's YAML, moved to *folder*, as YAML text. Only names
    that need quotes are quoted.
    """
    if isinstance(value, str):
        moved: str | list[str] = str(folder / Path(value).relative_to(FOLDER))
    else:
        moved = [str(folder / Path(path).relative_to(FOLDER)) for path in value]
    text = yaml.safe_dump(moved, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def train() -> None:
    """Train the run of `app/demo.yaml`, and print how the loss fell."""
    with loading_libraries():
        from packplan.app.opening.ranks import join_ranks
        from packplan.app.sft.train import train as train_run

    config = read_config(CONFIG)
    with join_ranks(config) as group:
        trainer, splits = train_run(config, group)
    plan = cast("PlannedSplit", splits["train"])  # one for all epochs
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"held-out scenes: loss {evaluated[0]:.3f} -> {evaluated[-1]:.3f}")
    steps = trainer.state.global_step
    print(
        f"demo: loss {losses[0]:.3f} -> {losses[-1]:.3f} over {steps} steps, {len(plan.raw.packs)} packs, "
        f"fill {plan.raw.fill:.3f}, checksum {plan.raw_checksum[:12]}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["make"], help="make the models and data, and do not train")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: %(default)s)")
    parser.add_argument("--train", type=int, default=240, metavar="N", help="training records (default: %(default)s)")
    parser.add_argument("--val", type=int, default=40, metavar="N", help="held-out records (default: %(default)s)")
    parser.add_argument("--videos", action="store_true", help="also make a small data set of text, images and videos")
    parser.add_argument("--verbose", action="store_true", help="also show what the libraries log")
    options = parser.parse_args(arguments)
    if options.what != "make" and options.folder != parser.get_default("folder"):
        parser.error("--folder needs make, since training reads the folders in app/demo.yaml: add make")
    if options.what != "make" and options.videos:
        parser.error("--videos needs make: add make, then run packplan sft app/demo_videos.yaml")

    def command() -> None:
        make(options.folder, seed=options.seed, num_train=options.train, num_val=options.val)
        if options.videos:
            make_videos(options.folder)
        if options.what == "make":
            print(describe_folder(options.folder))
        else:
            train()

    return run_command(command, verbose=options.verbose)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
