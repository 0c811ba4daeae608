"""Work is what a real forward pass computes."""

from __future__ import annotations

import json

import pytest

from core.work import WorkModel

GRIDS = [(1, 8, 14), (1, 10, 6), (1, 4, 4)]
"""Whole windows, windows that the edge cuts, and less than a window of the released models."""


def inputs(config, num_tokens, grids):
    """Return what the model takes: a row of tokens, with the images' patches and their places."""
    import torch

    ids = torch.full((1, num_tokens), 5)
    if not grids:
        return {"input_ids": ids}
    kinds, start = torch.zeros_like(ids), 0
    for frames, rows, columns in grids:
        ids[0, start] = config["vision_start_token_id"]
        stop = start + 1 + frames * rows * columns // 4
        ids[0, start + 1 : stop], kinds[0, start + 1 : stop] = config["image_token_id"], 1
        start = stop
    patch = 3 * 2 * config["vision_config"]["patch_size"] ** 2
    pixels = torch.zeros(sum(t * h * w for t, h, w in grids), patch)
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}


@pytest.mark.slow
@pytest.mark.covers
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl"])
def test_torch_counts_the_same_operations(demo, model_type):
    """
    Exactly, in one forward pass, with images and without.

    Under eager attention, whose products torch's counter sees: it computes whole squares, where
    causal attention needs the pairs up to the diagonal.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder = demo / "models" / model_type
    config = json.loads((folder / "config.json").read_text())
    sees_images = "vision_config" in config
    auto = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation="eager")
    work = WorkModel.from_config(config)

    for num_tokens, grids in [(1, []), (60, []), (700, []), *([(90, GRIDS), (400, GRIDS[:1])] if sees_images else [])]:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(**inputs(config, num_tokens, grids), use_cache=False)
        mine = work.of_positions(num_tokens, num_tokens**2) + work.of_images(grids).sum()
        assert counter.get_total_flops() == mine
