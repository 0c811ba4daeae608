"""Test that packed samples equal those alone, for three collators; see docs/use-it-in/prove.md."""

import pytest

from packplan.testing import assert_equal_to_alone, assert_isolated

from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def axolotl(rows):
    batching = pytest.importorskip("axolotl.utils.collators.batching")
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(AutoTokenizer.from_pretrained("path/to/model"))
    features = [
        {**row, "attention_mask": [1] * len(row["input_ids"]), "position_ids": list(range(len(row["input_ids"])))}
        for row in rows
    ]
    batch = dict(collator([features]))
    batch["labels"][batch["position_ids"] == 0] = -100
    return batch


COLLATORS = {
    "transformers": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt"),
    "trl": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    "axolotl": axolotl,
}


@pytest.mark.parametrize("collator", COLLATORS)
def test_packed_samples_are_as_they_are_alone(collator):
    model = AutoModelForCausalLM.from_pretrained("path/to/model", use_cache=False)
    rows = load_from_disk("path/to/rows").shuffle(seed=0)
    batch = COLLATORS[collator]([rows[number] for number in range(4)])
    if collator == "axolotl":
        with pytest.raises(AssertionError, match="self_attn"):
            assert_isolated(model, batch)
        del batch["attention_mask"]
    assert_isolated(model, batch)
    assert_equal_to_alone(model, batch)
