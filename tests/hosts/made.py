"""Makes a tiny model and tokenized rows."""

from pathlib import Path

from tests.hosts.law import model_of, rows_of

# isort: split
from datasets import Dataset
from transformers import AutoTokenizer

from tools.demo.tiny_models import learned_tokenizer

_TEXT = "red blue a circle"


def main(folder: str) -> None:
    """Write `model` and `rows`, as a page's reader has them."""
    model = Path(folder) / "model"
    model_of("qwen2", "sdpa").save_pretrained(model)
    tokenizer = learned_tokenizer([_TEXT], vocabulary=270)
    tokenizer.save_pretrained(model)
    # A tokenizer of another kind would be read as Qwen's, and its words as nothing.
    assert tokenizer(_TEXT)["input_ids"] == AutoTokenizer.from_pretrained(model)(_TEXT)["input_ids"]
    rows = [row for row in rows_of("qwen2") for _ in range(12)]  # a killed run is far from its end
    Dataset.from_list(rows).save_to_disk(Path(folder) / "rows")
