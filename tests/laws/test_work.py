"""Work: FLOPs of samples and packs, from the sizes of a model's layers."""

from collections import Counter
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from benchmarks.work import image_flops
from packplan.core.errors import ArgumentError, ModelError
from packplan.core.packs import Packs
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.text import LocalAttention
from packplan.core.work.vision import VisionWork

MODEL = WorkModel(7, 3, VisionWork(per_patch=11, per_image_pair=5, per_window_pair=2, window=8))

TOWERLESS = WorkModel(MODEL.per_position, MODEL.per_pair)

TEXT = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 5, "intermediate_size": 16, "vocab_size": 100,
}  # fmt: skip


def window_pairs(rows: int, columns: int, window: int) -> int:
    """Count the pairs of patches in one window, patch by patch."""
    sizes = Counter((row // window, column // window) for row in range(rows) for column in range(columns))
    return sum(size**2 for size in sizes.values())


HELD = st.tuples(st.integers(1, 500), st.integers(0, 3), st.integers(1, 40), st.integers(0, 4))
"""Tokens, images and 8 patches of their width, and pairs of frames of a video of the same size."""


@given(st.lists(HELD, min_size=1, max_size=9))
def test_work_is_counted_pair_by_pair(samples):
    """
    Positions, pairs of tokens, patches, and pairs of patches each have their price. Two frames of a
    video are as an image; a model that sees nothing has no work with either.
    """
    lengths, images, sides, pairs = map(list, zip(*samples, strict=True))
    expected = [
        7 * length + 3 * sum(range(1, length + 1))
        + (num + pairs) * (11 * 64 * side + 5 * (64 * side) ** 2 + 2 * window_pairs(8, 8 * side, 8))
        for length, num, side, pairs in samples
    ]  # fmt: skip
    grids = [[(1, 8, 8 * side)] * num + [(frames, 8, 8 * side)] * bool(frames) for _, num, side, frames in samples]
    counts = {
        "images": images,
        "patches": [64 * side * num for _, num, side, _ in samples],
        "frames": [2 * num for num in pairs],
        "video_patches": [64 * side * num for side, num in zip(sides, pairs, strict=True)],
    }

    works = SampleWorks.from_lengths(MODEL, lengths, **counts)

    assert expected == works.flops.tolist()
    text = TOWERLESS.sample_flops(lengths).tolist()
    assert expected == [one + image_flops(MODEL.vision, own).sum() for one, own in zip(text, grids, strict=True)]
    assert text == SampleWorks.from_lengths(TOWERLESS, lengths, **counts).flops.tolist()


def test_a_backward_pass_takes_twice_as_many_where_weights_are_trained():
    """Once more for what a layer is given, once more for its weights; attention has none."""
    trained = MODEL.trained()
    assert 3 * MODEL.sample_flops([9])[0] == trained.sample_flops([9])[0]
    assert 3 * MODEL.vision.estimate_image_flops(1, 64) == trained.vision.estimate_image_flops(1, 64)
    frozen = MODEL.trained(text=False, vision=False, vision_gradients=False)
    assert (2 * MODEL.per_position, 3 * MODEL.per_pair, MODEL.vision) == (
        frozen.per_position, frozen.per_pair, frozen.vision
    )  # fmt: skip
    adapters = MODEL.trained(text=False, vision=False).vision
    assert (2 * MODEL.vision.per_patch, 3 * MODEL.vision.per_image_pair) == (
        adapters.per_patch, adapters.per_image_pair
    )  # fmt: skip
    assert WorkModel(30, 6) == WorkModel(10, 2).trained()


def test_head_dim_and_shared_keys_are_read():
    """Worked by hand: heads are wider than the model, and share keys and values."""
    per_layer = 8 * 20 + 2 * 8 * 10 + 20 * 8 + 3 * 8 * 16

    assert WorkModel(2 * (3 * per_layer + 8 * 100), 4 * 3 * 20) == WorkModel.from_config(TEXT)


@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=9))
@example([1_500_000])
@example([1_000_000, 1_000_000, 8])
def test_work_of_long_samples_is_that_of_whole_numbers(lengths):
    """Works beyond 64 bits are exact to a float's precision, and rise with each token."""
    lengths = [length for length in sorted(lengths) if sum(lengths) < 2**63] or [1]
    model = WorkModel(436 * 10**9, 12 * 80 * 8192)
    exact = [model.per_position * n + model.per_pair * (n * (n + 1) // 2) for n in lengths]
    works = SampleWorks.from_lengths(model, lengths).flops
    event(f"beyond 64 bits: {sum(exact) >= 2**63}")

    assert exact == pytest.approx(works.tolist(), rel=2**-50)
    assert sorted(works.tolist()) == works.tolist()
    assert [sum(exact)] == pytest.approx(Packs.from_lists([range(len(lengths))]).sums(works).tolist(), rel=2**-50)
    if max(exact) < 2**53:
        assert exact == works.tolist()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 90), st.booleans())
def test_local_attention_is_counted_pair_by_pair(lengths, tokens, in_chunks):
    """Each token with those of its window, or of its chunk, up to itself."""
    local = LocalAttention(5, tokens, in_chunks=in_chunks)
    model = WorkModel(per_position=7, per_pair=3, local=(local,), per_chunk=11)

    expected = []
    for length in lengths:
        seen = sum((place % tokens if in_chunks else min(place, tokens - 1)) + 1 for place in range(length))
        expected.append(7 * length + 3 * length * (length + 1) / 2 + 5 * seen + 11 * -(-length // 64))

    assert expected == model.sample_flops(lengths).tolist()
    assert [3 * work for work in expected] == model.trained().sample_flops(lengths).tolist()


def test_layers_that_see_a_window_are_read():
    """By their names, by a pattern, by how many are first, or all."""
    pair = 4 * 20

    for config, full in (
        ({**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 1),
        ({**WINDOW, "sliding_window_pattern": 3}, 1),
        ({**WINDOW, "max_window_layers": 1}, 1),
        (WINDOW, 0),
    ):
        read = WorkModel.from_config(config)
        assert (full * pair, (LocalAttention((3 - full) * pair, 8),)) == (read.per_pair, read.local)
    chunked = {**TEXT, "layer_types": ["chunked_attention"] * 3, "attention_chunk_size": 8}
    assert (LocalAttention(3 * pair, 8, in_chunks=True),) == WorkModel.from_config(chunked).local


EXPERTS = {**TEXT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}

STATE = {
    **TEXT, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip

WINDOW = {**TEXT, "model_type": "mistral", "sliding_window": 8}

NO_PRODUCT = {
    "max_position_embeddings": 32768, "eos_token_id": 5, "rope_scaling": None, "pretraining_tp": 1, "ep_size": 1,
    "cache_implementation": "hybrid", "num_nextn_predict_layers": 1, "initializer_range": 0.02,
    "max_window_layers": 28, "sliding_window": 4096, "query_pre_attn_scalar": 224,
}  # fmt: skip
"""Keys that released configurations have: places, tokens, norms, caches, groups of experts."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({**TEXT, "head_dim": 2}, {**TEXT, "head_dim": None}),
        ({**TEXT, "num_key_value_heads": 4}, {**TEXT, "num_key_value_heads": None}),
        (TEXT, {**WINDOW, "layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}),
        (TEXT, {**WINDOW, "use_sliding_window": False}), (TEXT, {**WINDOW, "sliding_window": None}),
        (TEXT, {**TEXT, **NO_PRODUCT}),
        ({**STATE, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
         {**STATE, "full_attention_interval": 3}),
        *(
            ({**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}, {**EXPERTS, **shared, **way})
            for shared in ({"n_shared_experts": 1}, {"shared_intermediate_size": 6})
            for way in ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, {"moe_layers": [1, 2]},
                        {"moe_layer_freq": [0, 1, 1]})
        ),
    ],
)  # fmt: skip
def test_the_same_layers_may_be_said_in_several_ways(one, other):
    """Heads, windows that are off, intervals and kinds, experts by kinds, places or flags."""
    assert WorkModel.from_config(one) == WorkModel.from_config(other)


SIDES = {
    "use_absolute_position_embeddings": True, "num_hidden_layers": 2, "hidden_size": 4, "patch_size": 2,
    "image_size": [8, 4],
}  # fmt: skip
"""A tower of tiles that are not square."""

WIDE = {"attention_bias": False, "out_hidden_size": 8, "image_size": 8}
"""A tower whose layers are as wide as the text, without their own width."""


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**TEXT, "model_type": "falcon"}, "'falcon'"),
        ({}, "no hidden_size"),
        ({**TEXT, "layer_types": ["full_attention", "indexed_attention"]}, "indexed_attention"),
        ({key: size for key, size in TEXT.items() if key != "vocab_size"}, "no vocab_size"),
        ({**TEXT, "intermediate_size": [16, 16, 8]}, r"intermediate_size \[16, 16, 8\], but the work of a sample"),
        ({**TEXT, "num_hidden_layers": -1}, "has num_hidden_layers -1, but the work of a sample needs a finite"),
        ({**TEXT, "num_hidden_layers": float("inf")}, "has num_hidden_layers inf, but the work of a sample"),
        ({**TEXT, "num_attention_heads": 0}, "has num_attention_heads 0, but a model"),
        ({**TEXT, "num_streams_size": 4}, "the effect of num_streams_size in its config.json"),
        ({**TEXT, "layer_types": ["sliding_attention"] * 3, "sliding_window": 4, "swa_head_dim": 4}, "swa_head_dim"),
        ({**TEXT, "num_experts": 4}, "no num_experts_per_tok"),
        ({"text_config": TEXT, "vision_config": {}}, "its vision tower is not known"),
        ({"text_config": TEXT, "vision_config": {"deepstack_visual_indexes": []}}, "no intermediate_size"),
        ({"text_config": TEXT, "vision_config": WIDE}, "no hidden_size"),
        ({"text_config": TEXT, "vision_config": SIDES, "downsample_ratio": 0.5}, r"has image_size \[8, 4\], but"),
        ({"text_config": TEXT, "audio_config": {}}, "audio_config"),
    ],
)
def test_what_is_not_known_is_named(config, named):
    """Unknown layers, keys and sizes are errors, never a number that looks right."""
    with pytest.raises(ModelError, match=named):
        WorkModel.from_config(config)


def test_a_config_is_a_dict_or_an_object_that_gives_one():
    """As `model.config` of transformers does."""
    given = SimpleNamespace(to_dict=lambda: TEXT)

    assert WorkModel.from_config(given) == WorkModel.from_config(TEXT)
    assert WorkModel.estimated(given) == WorkModel.estimated(TEXT)
    with pytest.raises(ArgumentError, match=r"config has to be the content of a config.json, .*, not NoneType"):
        WorkModel.from_config(None)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=9), st.booleans())
def test_the_parts_of_a_work_add_up_to_it(lengths, in_chunks):
    """Text, attention and vision, each in a unit of its own; windows and chunks included."""
    model = attrs.evolve(MODEL, local=(LocalAttention(13, 5, in_chunks=in_chunks),), per_chunk=17)
    works = SampleWorks.from_lengths(model, lengths, images=1, patches=4)

    text, attention, vision = (works.scaled(*weights).flops for weights in np.eye(3))

    tokens = np.array(lengths)
    assert (text == 7 * tokens + 17 * np.ceil(tokens / 64)).all()
    assert (vision == MODEL.vision.estimate_image_flops(1, 4)).all()
    assert (text + attention + vision == works.flops).all()
    assert (2 * text + 3 * attention + 5 * vision == works.scaled(2, 3, 5).flops).all()
