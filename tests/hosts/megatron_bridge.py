"""Reads an exported file by Megatron-Bridge's data modules alone; the package needs GPUs."""

import json
import sys
import types
from pathlib import Path

import megatron

PACKAGES = ("", "data", "training", "training/tokenizers", "utils")
"""Packages whose own code is not run."""


class Words:
    """Tokenizer that names the tokens of padding."""

    pad_id, eos_id, eod, bos_id = 0, 1, 1, 2


def main(path: str, width: int) -> None:
    """Read and collate each pack by itself, and write the batches."""
    (root,) = (Path(folder) / "bridge" for folder in megatron.__path__ if (Path(folder) / "bridge").is_dir())
    for package in PACKAGES:
        name = ".".join(["megatron.bridge", *filter(None, package.split("/"))])
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root / package)]
    from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset

    packs = GPTSFTPackedParquetDataset(path, Words(), max_seq_length=width, prompt_template="{text} {answer}")
    batches = []
    for number in range(len(packs)):
        pack = packs[number]
        packs.validate_row(number, pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"][:-1])
        batch = packs.collate_fn([pack])
        names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens_q")
        batches.append({name: batch[name][0].tolist() for name in names})
    Path(f"{path}.json").write_text(json.dumps(batches))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
