"""Runs a stream as one rank, and notes each pack before it is trained."""

import json
import os
import signal
from itertools import accumulate, pairwise
from pathlib import Path

from packplan.adapters.progress import loading_libraries
from packplan.app import sft

with loading_libraries():
    from packplan.adapters.trainer.loader import NORMALISER
    from packplan.adapters.trainer.streams.trainer import StreamTrainer
    from packplan.core.batch import IGNORED_LABEL


def main(config: str, out: str, killed_in: int = -1) -> int:
    """Return the exit status; the process is killed in a step, if that is given."""
    path = Path(out) / f"packs{os.environ.get('RANK', '0')}.jsonl"
    plain = StreamTrainer.training_step

    def noted(trainer, model, inputs, *arguments, **options):
        step, ids = trainer.state.global_step, inputs["input_ids"][0].tolist()
        samples = [ids[start:stop] for start, stop in pairwise([0, *accumulate(inputs["sample_lengths"])])]
        with path.open("a") as lines:
            supervised = int((inputs["labels"] != IGNORED_LABEL).sum())
            pack = {"step": step, "samples": samples, "weight": inputs[NORMALISER], "supervised": supervised}
            lines.write(json.dumps(pack) + "\n")
        if step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(trainer, model, inputs, *arguments, **options)

    StreamTrainer.training_step = noted
    return sft.main([config])


def trained(out: Path, *, before: int | None = None) -> list[dict]:
    """Return the packs that all ranks have trained, in steps before that of a kill."""
    files = sorted(out.glob("packs*.jsonl"))
    packs = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [pack for pack in packs if before is None or pack["step"] < before]
