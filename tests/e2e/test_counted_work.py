"""Work is what a real forward pass computes."""

import json

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.work import image_flops, position_flops
from packplan.adapters.probe.small_model import SmallModels, hiding_warnings
from packplan.core.work.model import WorkModel
from tests.made.vision_models import VISION_FAMILIES
from tools.families import default_config

pytestmark = [pytest.mark.slow, pytest.mark.covers]

GRIDS = [(1, 8, 14), (1, 10, 6), (1, 4, 4)]
"""Whole windows, windows that the edge cuts, and less than a window of the released models."""

VIDEOS = [(2, 8, 14), (3, 4, 4)]
"""Grids of videos: pairs of frames, rows, columns."""

TILES = (1, 3, 7)
"""Tiles of InternVL's images."""


def inputs(config, num_tokens, grids, of="image"):
    """Return inputs of a model: a row of tokens, and the patches of images in their places."""
    ids = torch.full((1, num_tokens), 5)
    if not grids:
        return {"input_ids": ids}
    parts = grids
    if config["model_type"].startswith("qwen3_vl"):  # frames of a video stand apart in the text
        parts = [(1, rows, columns) for frames, rows, columns in grids for _ in range(frames)]
    kinds, start = torch.zeros_like(ids), 0
    for frames, rows, columns in parts:
        ids[0, start] = config["vision_start_token_id"]
        stop = start + 1 + frames * rows * columns // 4
        ids[0, start + 1 : stop] = config[f"{of}_token_id"]
        kinds[0, start + 1 : stop] = 1 if of == "image" else 2
        start = stop
    patch = 3 * 2 * config["vision_config"]["patch_size"] ** 2
    pixels = torch.zeros(sum(t * h * w for t, h, w in grids), patch)
    name = "pixel_values" if of == "image" else "pixel_values_videos"
    return {"input_ids": ids, name: pixels, f"{of}_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}


def counted(call, **given) -> int:
    """Return the operations that torch counts in a call without gradients."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(**given)
    return counter.get_total_flops()


def flops(work, num_tokens, grids):
    """Return the operations that a row of one sample and its images take."""
    return position_flops(work, num_tokens, num_tokens**2) + image_flops(work.vision, grids).sum()


def work_of(config):
    """Return the work of a model, as its written configuration says."""
    return WorkModel.from_config(json.loads(json.dumps(config.to_dict(), default=str)))


def open_shipped(demo, model_type):
    """Return a model of the demo with its configuration; eager, as torch's counter sees it."""
    folder = demo / "models" / model_type
    config = json.loads((folder / "config.json").read_text())
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation="eager"), config


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl"])
def test_torch_counts_the_same_operations(demo, model_type):
    """Under eager attention, which computes whole squares instead of causal pairs."""
    model, config = open_shipped(demo, model_type)
    work = WorkModel.from_config(config)

    cases = [(1, []), (60, []), (60 * 12, [])]
    if "vision_config" in config:
        cases += [(90, GRIDS), (400, GRIDS[:1]), (60 * 4, GRIDS * 4), (90, VIDEOS)]
    for num_tokens, grids in cases:
        given = inputs(config, num_tokens, grids, "video" if grids is VIDEOS else "image")
        assert counted(model, **given, use_cache=False) == flops(work, num_tokens, grids)


@pytest.mark.parametrize(
    ("frozen", "passes"),
    [
        ((), {}),
        (("visual",), {"vision": False, "vision_gradients": False}),
        (("language_model", "lm_head"), {"text": False}),
    ],
    ids=["all trained", "vision frozen", "text frozen"],
)
def test_torch_counts_a_backward_pass_beside_frozen_parts(demo, frozen, passes):
    """Within 2 %: frozen parts have no gradients of weights, and pass on those of others."""
    model, config = open_shipped(demo, "qwen2_5_vl")
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
    work = WorkModel.from_config(config).trained(**passes)
    # A row of text alone passes nothing on to frozen words.
    text_frozen = passes.get("text") is False

    for num_tokens, grids in ((90, GRIDS), (60 * 5, GRIDS * 4), *([] if text_frozen else [(60, [])])):
        with FlopCounterMode(display=False) as counter:
            given = inputs(config, num_tokens, grids)
            if grids:
                given["pixel_values"].requires_grad_("visual" not in frozen)
            model(**given, use_cache=False).logits.sum().backward()
        model.zero_grad()
        assert flops(work, num_tokens, grids) == pytest.approx(counter.get_total_flops(), rel=0.02)


TEXTS = (
    "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "gemma2", "gemma3_text", "mistral",
    "phi3", "gpt2", "starcoder2", "nemotron", "qwen3_next", "qwen3_5_text", "lfm2",
)  # fmt: skip
"""Experts, routers, windows, latent heads, MLPs of two products, states, convolutions."""


@pytest.mark.parametrize("family", [*TEXTS, "qwen2_vl", "qwen3_vl_moe", "qwen3_5"])
def test_torch_counts_about_the_same_in_families_that_keys_describe(family):
    """Within 2 % in a small copy, by its configuration alone, of a sample or a longer row."""
    with hiding_warnings():
        model = SmallModels(default_config(family)).build(attention="eager")
    # The kernels that compute experts together are not counted.
    model.set_experts_implementation("eager")
    config, work = model.config.to_dict(), work_of(model.config)

    images = [] if family in TEXTS else [(90, GRIDS), (60 * 4, GRIDS * 4)]
    for num_tokens, grids in ((60, []), (60 * 4, []), *images):
        found = counted(model, **inputs(config, num_tokens, grids), use_cache=False)
        assert flops(work, num_tokens, grids) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(
    ("family", "model_type"),
    [("internvl", "internvl"), ("internvl", "qianfan_ocr"), ("glm4v", "glm4v"), ("glm4v_moe", "glm4v_moe")],
)
def test_torch_counts_about_the_same_in_towers_of_tiles_and_of_wide_layers(family, model_type):
    """Within 2 %: tiles of one size, or grids, by each grid and by counts alone."""
    config = attrs.evolve(VISION_FAMILIES[family], model_type=model_type).config()
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    vision = work_of(config).vision

    for number, grid in zip(TILES, GRIDS, strict=True):
        if family == "internvl":
            media, grids = {"pixel_values": torch.zeros(number, 3, 56, 56)}, [(1, 4, 4)] * number
        else:
            patches = number * grid[0] * grid[1] * grid[2]
            pixels = torch.zeros(patches, 3 * 2 * config.vision_config.patch_size**2)
            media = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * number)}
            grids = [grid] * number
        mine = image_flops(vision, grids).sum()
        assert mine == pytest.approx(counted(model.get_image_features, **media), rel=0.02)
        images = 1 if family == "internvl" else number
        by_counts = vision.estimate_image_flops(images, sum(rows * columns for _, rows, columns in grids))
        assert by_counts == pytest.approx(mine, rel=1e-9)
