"""Makes a tiny model and tokenized rows: `python -m tests.hosts.made FOLDER`."""

import sys
from pathlib import Path

from tests.hosts.law import model_of, rows_of, tokenizer

# isort: split
from datasets import Dataset


def main(folder: str) -> None:
    """Write `model` and `rows`, as a page's reader has them."""
    model_of("qwen2", "sdpa").save_pretrained(Path(folder) / "model")
    tokenizer().save_pretrained(Path(folder) / "model")
    rows = [row for row in rows_of("qwen2") for _ in range(12)]  # a killed run is far from its end
    Dataset.from_list(rows).save_to_disk(Path(folder) / "rows")


if __name__ == "__main__":
    main(sys.argv[1])
